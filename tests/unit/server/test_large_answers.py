"""Large answers are written away from the event loop, in turns with other threads."""

import json
import threading

import pytest
from starlette.testclient import TestClient

from llamabatch.server.openai import chunks
from llamabatch.server.openai.chunks import dump, dump_in_turns
from tests.unit.server.serving_clients import fake_app
from tests.unit.server.test_application import ready

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
    real = chunks._dump

    def watched(each):
        written.append(numbers(each))
        return real(each)

    monkeypatch.setattr(chunks, "_dump", watched)
    text = dump_in_turns(value)
    assert text == real(value)
    assert max(written, default=0) <= 4 * chunks._SLICE


def numbers(value):
    """Values within a value."""
    if isinstance(value, (list, dict)):
        return sum(map(numbers, value.values() if isinstance(value, dict) else value))
    return 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "a b c"}),
        ("/detokenize", {"tokens": [1, 2]}),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "logprobs": 2}),
        ("/completion", {"prompt": "a", "n_predict": 2}),
    ],
)
def test_a_workers_thread_writes_what_may_be_large(path, body, monkeypatch):
    threads = []

    def watched(value):
        threads.append(threading.current_thread().name)
        return dump(value)

    monkeypatch.setattr(chunks, "dump_in_turns", watched)
    with TestClient(fake_app()) as client:
        answer = ready(client).post(path, json=body)
    assert answer.status_code == 200
    assert json.loads(answer.text)
    assert [name.rpartition("_")[0] for name in threads] == ["llamabatch-server"]
