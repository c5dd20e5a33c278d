"""Large answers are written on another thread than the event loop's, which lets other threads run in between."""

import re
import threading

import pytest

from llamabatch.server.anthropic.messages_response import MessageEvents
from llamabatch.server.llama_server.completion_response import LlamaCompletionChunks
from llamabatch.server.openai import responses_response
from llamabatch.server.openai.chat_response import ChatChunks
from llamabatch.server.openai.completion_response import CompletionChunks
from llamabatch.server.openai.responses_response import ResponseEvents
from llamabatch.server.response import answer as answer_module
from llamabatch.server.response import event_stream, generation, json_text
from llamabatch.server.response.answer import in_parts
from llamabatch.server.response.json_text import Rows, dump_in_pieces
from tests.unit.server.serving_clients import ready_client

VALUES = [
    {"tokens": list(range(5000)), "count": 5000},
    {"tokens": [{"id": i, "piece": [i, 200] if i % 7 == 0 else 'a"ä'} for i in range(3000)]},
    {"data": [{"embedding": [0.5] * 3000, "index": i} for i in range(3)], "usage": {"prompt_tokens": 3}},
    [{"index": 0, "embedding": [[0.25, -1e-9]] * 2000}],
    {"top_logprobs": [None, *({"a": -0.5, "b\n": -1.5} for _ in range(2000))], "empty": [], "none": None, "no": {}},
    [],
    {},
    "text",
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_the_text_is_that_of_dump_and_no_call_writes_a_long_list(value, monkeypatch):
    written = []
    real = json_text._dump

    def watched(each):
        written.append(numbers(each))
        return real(each)

    monkeypatch.setattr(json_text, "_dump", watched)
    text = "".join(dump_in_pieces(value))
    assert text == real(value)
    assert max(written, default=0) <= 4 * json_text._SLICE


def numbers(value):
    """Returns how many values a value contains."""
    if isinstance(value, (list, dict)):
        return sum(map(numbers, value.values() if isinstance(value, dict) else value))
    return 1


CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
BODIES = [
    ("/tokenize", {"content": "a b c"}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "logprobs": 2}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "logprobs": 2, "echo": True, "prompt_logprobs": 1}),
    ("/completion", {"prompt": "a", "n_predict": 2, "n_probs": 2}),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    ("/v1/responses", {"input": "a", "top_logprobs": 2}),
    ("/v1/messages", CHAT),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ("/v1/classify", {"input": "a"}),
    ("/v1/embeddings", {"input": "a"}),
]
CHANGES = re.compile(r'"(id|created|created_at|completed_at|item_id|timings)":("[^"]*"|{[^}]*}|\d+)')


@pytest.fixture(scope="module")
def client():
    with ready_client() as made:
        yield made


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_workers_thread_writes_what_may_be_large(client, path, body, monkeypatch):
    threads = []
    real = answer_module.dump_in_pieces

    def watched(value):
        threads.append(threading.current_thread().name)
        yield from real(value)

    small = client.post(path, json=body)
    monkeypatch.setattr(answer_module, "dump_in_pieces", watched)
    monkeypatch.setattr(generation, "LIGHT", -1)
    monkeypatch.setattr(answer_module, "PART", 16)
    answer = client.post(path, json=body)
    assert answer.status_code == small.status_code == 200
    assert "content-length" not in answer.headers
    assert CHANGES.sub("", answer.text) == CHANGES.sub("", small.text)
    assert "llamabatch-server" in {name.rpartition("_")[0] for name in threads}


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "a b", "max_tokens": 99, "logprobs": 2, "echo": True}, CompletionChunks),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "max_tokens": 99}, ChatChunks),
        ("/v1/responses", {"input": "a", "top_logprobs": 2}, ResponseEvents),
        ("/v1/messages", CHAT | {"max_tokens": 99}, MessageEvents),
        ("/completion", {"prompt": "a b", "n_predict": 99, "n_probs": 2}, LlamaCompletionChunks),
    ],
)
def test_a_stream_whose_pieces_take_long_is_written_on_threads_too(client, path, body, kind, monkeypatch):
    threads = []
    real = kind.feed

    def watched(self, outputs):
        threads.append(threading.current_thread().name)
        return real(self, outputs)

    monkeypatch.setattr(kind, "feed", watched)
    small = client.post(path, json=body | {"stream": True})
    threads.clear()
    monkeypatch.setattr(kind, "takes_long", lambda self, outputs: True)
    monkeypatch.setattr(kind, "end_takes_long", lambda self: True)
    monkeypatch.setattr(event_stream, "_AT_ONCE", 1)
    answer = client.post(path, json=body | {"stream": True})
    assert answer.status_code == small.status_code == 200
    assert CHANGES.sub("", answer.text) == CHANGES.sub("", small.text)
    assert {name.rpartition("_")[0] for name in threads} == {"llamabatch-server"}


def test_a_stream_that_repeats_many_tools_writes_them_on_threads(client, monkeypatch):
    threads = []
    real = ResponseEvents.large_event

    def watched(self, kind, more):
        threads.append(threading.current_thread().name)
        return real(self, kind, more)

    monkeypatch.setattr(ResponseEvents, "large_event", watched)
    monkeypatch.setattr(responses_response, "_MUCH", 2**12)
    tool = {"type": "function", "description": "d", "parameters": {"type": "object", "properties": {}}}
    body = {"input": "a", "stream": True, "tools": [tool | {"name": f"f{number}"} for number in range(30)]}
    answer = client.post("/v1/responses", json=body | {"tool_choice": "none"})
    assert answer.text.count('"name":"f29"') == 3
    assert {name.rpartition("_")[0] for name in threads} == {"llamabatch-server"}
    response_id = re.search('"id":"(resp_[^"]*)"', answer.text)[1]
    assert len(client.get(f"/v1/responses/{response_id}").json()["tools"]) == 30


def test_a_large_answer_is_made_while_it_is_sent():
    """Entries of logprobs are made when they are written. The first part is sent before all of them are made."""
    made = []

    def entry(number):
        made.append(number)
        return {"number": number}

    rows = Rows(range(100_000), entry)
    text = in_parts(dump_in_pieces({"before": 1, "rows": rows}))
    next(text)
    assert 0 < len(made) < 20_000
    assert len(b"".join(text)) > 100_000
    assert made == list(range(100_000))
