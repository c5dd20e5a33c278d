"""ollama's own client, with only the address changed. Its models validate the answers."""

from __future__ import annotations

import asyncio

import ollama
import pytest

from llamabatch import LLM
from tests.server.conftest import running
from tests.server.test_dialects import CITY, HELLO, THINKS

GREEDY = {"temperature": 0, "num_predict": 24}


@pytest.fixture(scope="module")
def client(url):
    return ollama.Client(host=url, timeout=60)


@pytest.fixture(scope="module")
def plain():
    with LLM("tiny", n_slots=8) as llm:
        yield llm.chat([[{"role": "user", "content": HELLO}]], {"temperature": 0, "max_tokens": 24})[0].text


def user(text):
    return [{"role": "user", "content": text}]


def test_a_chat_whole_and_streamed(client, plain):
    whole = client.chat("tiny", user(HELLO), options=GREEDY)
    assert whole.message.content == plain
    assert whole.done_reason in ("stop", "length")
    assert whole.eval_count > 0
    assert whole.total_duration >= whole.eval_duration
    pieces = list(
        client.chat("tiny:latest", user(HELLO), options=ollama.Options(**GREEDY), stream=True, keep_alive="5m")
    )
    assert "".join(piece.message.content for piece in pieces) == plain
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 2
    assert pieces[-1].eval_count == whole.eval_count


def test_a_message_and_a_raw_text(client, plain):
    assert client.generate("tiny", HELLO, options=GREEDY).response == plain
    pieces = list(client.generate("tiny", "Once upon a time", raw=True, options=GREEDY, stream=True))
    assert "".join(piece.response for piece in pieces)
    assert client.generate("tiny").done_reason == "load"


def test_the_context_of_an_answer_goes_on(client):
    first = client.generate("tiny", HELLO, options=GREEDY)
    *_, second = client.generate("tiny", HELLO, context=first.context, options=GREEDY, stream=True)
    assert second.context[: len(first.context)] == first.context
    assert second.prompt_eval_count > len(first.context)
    assert len(second.context) == second.prompt_eval_count + second.eval_count
    with pytest.raises(ollama.ResponseError, match="suffix") as caught:
        client.generate("tiny", "def f(", suffix="):")  # the bundled model has no tokens for infill
    assert caught.value.status_code == 400


def test_forms_and_logprobs(client):
    said = client.chat("tiny", user("A city?"), format=CITY, options={"num_predict": 60})
    assert '"city"' in said.message.content
    said = client.chat("tiny", user(HELLO), logprobs=True, top_logprobs=2, options={"num_predict": 3})
    assert len(said.logprobs) == said.eval_count
    assert all(len(each.top_logprobs) == 2 for each in said.logprobs)


def test_a_tool_is_called_and_its_result_is_read(client):
    def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: of which
        """

    call = ollama.Message.ToolCall(
        function=ollama.Message.ToolCall.Function(name="weather", arguments={"city": "Rome"})
    )
    history = [
        *user("What is the weather in Rome?"),
        ollama.Message(role="assistant", content="", tool_calls=[call]),
        ollama.Message(role="tool", content="sunny", tool_name="weather"),
    ]
    said = client.chat("tiny", history, tools=[weather], options={"num_predict": 4})
    assert said.done
    for stream in (False, True):
        pieces = client.chat("tiny", history[:1], tools=[weather], options={"num_predict": 4}, stream=stream)
        assert [piece.done for piece in (pieces if stream else [pieces])][-1]


def test_thinking_is_told_apart(tmp_path_factory):
    with running(tmp_path_factory.mktemp("thinks"), model="tiny", chat_template=THINKS) as url:
        client = ollama.Client(host=url, timeout=60)
        options = {"num_predict": 24, "temperature": 0, "min_tokens": 6, "thinking_token_budget": 8}
        thought = client.chat("tiny", user(HELLO), think=True, options=options).message
        assert thought.thinking
        streamed = list(client.chat("tiny", user(HELLO), think=True, options=options, stream=True))
        assert "".join(piece.message.thinking or "" for piece in streamed) == thought.thinking
        said = client.chat("tiny", user(HELLO), think=False, options=options).message
        assert (said.thinking, bool(said.content)) == (None, True)


def test_texts_become_vectors(client):
    found = client.embed("tiny", ["one", "two " * 5000])
    assert len(found.embeddings) == 2
    assert sum(x * x for x in found.embeddings[1]) == pytest.approx(1, abs=1e-3)
    assert found.prompt_eval_count > 2
    assert len(client.embed("tiny", "one", dimensions=8).embeddings[0]) == 8
    with pytest.raises(ollama.ResponseError, match="tokens") as caught:
        client.embed("tiny", "two " * 5000, truncate=False)
    assert caught.value.status_code == 400
    assert client.embeddings("tiny", "one").embedding


def test_the_model_is_listed_shown_and_running(client):
    names = [model.model for model in client.list().models]
    shown = client.show(names[0])
    assert "completion" in shown.capabilities
    assert shown.modelinfo["general.architecture"]
    assert shown.details.format == "gguf"
    [running_one] = client.ps().models
    assert running_one.context_length > 0


def test_refusals_are_the_errors_of_the_client(client):
    with pytest.raises(ollama.ResponseError, match="images") as caught:
        client.chat("tiny", [{"role": "user", "content": "x", "images": [b"aGk="]}])
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="num_predict"):
        list(client.chat("tiny", user(HELLO), options={"num_predict": -7}, stream=True))


def test_the_asynchronous_client(url, plain):
    async def said():
        client = ollama.AsyncClient(host=url, timeout=60)
        return [piece async for piece in await client.chat("tiny", user(HELLO), options=GREEDY, stream=True)]

    assert "".join(piece.message.content for piece in asyncio.run(said())) == plain
