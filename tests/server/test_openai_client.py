"""OpenAI's own client, which validates the server's answers strictly."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion
from pydantic import BaseModel

from llamabatch import LLM
from tests.server.conftest import running

HELLO = [{"role": "user", "content": "Tell me about the fox."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def client_of(url, key="none", strict=True):
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, _strict_response_validation=strict, timeout=60)


@pytest.fixture(scope="module")
def client(url):
    with client_of(url) as made:
        yield made


@pytest.fixture(scope="module")
def lenient(url):
    """A client without strict validation, for three values that OpenAI's API gives but the client's types do not allow.

    These are a null finish_reason of a completion's piece, a null logprob of the first token, and a base64 embedding.
    """
    with client_of(url, strict=False) as made:
        yield made


def test_a_chat_whole_and_streamed(client):
    asked = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({(chunk.id, chunk.created, chunk.system_fingerprint) for chunk in chunks}) == 1
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(parts) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    last = chunks[-1]
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    with LLM("tiny", n_slots=8) as llm:
        assert llm.chat([HELLO], {"temperature": 0, "max_tokens": 24})[0].text == whole.choices[0].message.content


def test_several_choices_with_logprobs(client):
    asked = {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 8,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 4,
        "seed": 5,
    }
    whole = client.chat.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts: dict[int, str] = {}
    logprobs: dict[int, list[float]] = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.logprobs is not None:
                logprobs.setdefault(choice.index, []).extend(each.logprob for each in choice.logprobs.content)
    for choice in whole.choices:
        content = choice.logprobs.content
        assert all(len(each.top_logprobs) == 4 for each in content)
        assert all(each.logprob <= each.top_logprobs[0].logprob + 1e-6 for each in content)
        assert texts[choice.index] == choice.message.content
        assert logprobs[choice.index] == pytest.approx([each.logprob for each in content], abs=0.05)
        assert (
            b"".join(bytes(each.bytes) for each in content)
            .decode(errors="replace")
            .startswith(choice.message.content[:3])
        )


def test_a_completion_whole_streamed_and_of_several_prompts(client, lenient):
    asked = {"model": "tiny", "prompt": ["Once upon", "The fox"], "temperature": 0, "max_tokens": 12, "n": 2}
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text == whole.choices[1].text
    texts = dict.fromkeys(range(4), "")
    reasons = dict.fromkeys(range(4))
    for chunk in lenient.completions.create(**asked, stream=True):
        checked = chunk.model_dump()
        for choice in checked["choices"]:
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(checked, strict=True)
    assert list(reasons.values()) == [choice.finish_reason for choice in whole.choices]
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert whole.usage.completion_tokens >= 4


def test_a_prompt_is_echoed_with_its_logprobs(lenient):
    text = "The fox runs over the hill."
    [choice] = lenient.completions.create(model="tiny", prompt=text, echo=True, logprobs=2, max_tokens=1).choices
    found = choice.logprobs
    assert choice.text.startswith(text)
    assert "".join(found.tokens) == choice.text
    assert found.token_logprobs[0] is None
    with LLM("tiny", n_slots=8) as llm:
        ids = llm.tokenize(text)
        [score] = llm.score(ids[:1], [ids[1:]])
    assert sum(found.token_logprobs[1 : len(ids)]) == pytest.approx(score.logprob, abs=1e-3)


class Answer(BaseModel):
    color: Literal["red", "blue"]
    count: int


def test_structured_outputs_are_parsed(client):
    found = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Answer, max_tokens=64)
    assert found.choices[0].message.parsed.color in ("red", "blue")
    chosen = client.chat.completions.create(
        model="tiny", messages=HELLO, extra_body={"guided_choice": ["yes", "no"]}, max_tokens=8
    )
    assert chosen.choices[0].message.content in ("yes", "no")
    with client.chat.completions.stream(model="tiny", messages=HELLO, response_format=Answer, max_tokens=64) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed.color in ("red", "blue")


def test_tools_are_called_whole_and_streamed(client):
    asked = {"model": "tiny", "messages": HELLO, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 64}
    whole = client.chat.completions.create(**asked, temperature=0)
    [choice] = whole.choices
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    name, arguments, reason = "", "", None
    for chunk in client.chat.completions.create(**asked, temperature=0, stream=True):
        for each in chunk.choices:
            reason = each.finish_reason or reason
            for delta in each.delta.tool_calls or []:
                if delta.index == 0:
                    name += delta.function.name or ""
                    arguments += delta.function.arguments or ""
    assert (name, arguments, reason) == (call.function.name, call.function.arguments, "tool_calls")
    told = [
        *HELLO,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    assert client.chat.completions.create(model="tiny", messages=told, max_tokens=4).choices


def test_thinking_has_two_names(tmp_path):
    form = {"regex": "<think>a fox</think>yes", "enable_in_reasoning": True}
    with (
        running(tmp_path, model="tiny", n_slots=2, reasoning_tags=["<think>", "</think>"]) as url,
        client_of(url) as client,
    ):
        asked = {"model": "tiny", "messages": HELLO, "max_tokens": 40, "extra_body": {"structured_outputs": form}}
        whole = client.chat.completions.create(**asked).choices[0].message
        assert (whole.content, whole.reasoning_content, whole.reasoning) == ("yes", "a fox", "a fox")
        content, thinking, again = "", "", ""
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                content += choice.delta.content or ""
                thinking += getattr(choice.delta, "reasoning_content", None) or ""
                again += getattr(choice.delta, "reasoning", None) or ""
        assert (content, thinking, again) == ("yes", "a fox", "a fox")


def test_embeddings_come_as_floats_and_as_base64(client, lenient):
    coded = lenient.embeddings.create(model="tiny", input=["one", "two"])  # by default, the client asks for base64
    plain = client.embeddings.create(model="tiny", input=["one", "two"], encoding_format="float")
    for one, other in zip(coded.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
    assert (
        len(
            client.embeddings.create(model="tiny", input="one", dimensions=8, encoding_format="float").data[0].embedding
        )
        == 8
    )


def test_models_are_listed(client):
    [model] = client.models.list().data
    assert client.models.retrieve(model.id) == model


def test_unknown_fields_are_named(client):
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=HELLO, max_tokens=1, extra_body={"topp": 1}
    )
    assert raw.headers["x-llamabatch-ignored"] == "topp"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"temperature": -1}, None, "temperature"),
        ({"messages": [{"role": "user", "content": "fox " * 9000}]}, "context_length_exceeded", None),
        ({"extra_body": {"guided_json": {"type": "nothing"}}}, None, None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "unsupported_content_part",
            "messages",
        ),
    ],
)
def test_a_bad_request_has_its_class(client, fields, code, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": HELLO, **fields})
    assert (caught.value.code, caught.value.type) == (
        code,
        "invalid_request_error",
    ) or code == "context_length_exceeded"
    assert caught.value.code == code
    assert param is None or caught.value.param == param
    assert caught.value.body["message"]


def test_errors_of_a_guarded_server_have_their_classes(tmp_path):
    options = {"api_keys": ["secret-of-the-test"], "served_model_names": ["mine"], "n_slots": 1, "max_queue": 1}
    with running(tmp_path, model="tiny", **options) as url:
        with client_of(url, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with client_of(url, "secret-of-the-test") as client:
            assert [model.id for model in client.models.list()] == ["mine"]
            with pytest.raises(openai.NotFoundError) as caught:
                client.chat.completions.create(model="other", messages=HELLO)
            assert caught.value.code == "model_not_found"
        asyncio.run(_crowd(url))


async def _crowd(url):
    """Sends more calls at once than the slot and the queue can accept. The others are told to try again."""
    made = AsyncOpenAI(
        base_url=f"{url}/v1", api_key="secret-of-the-test", max_retries=0, _strict_response_validation=True
    )
    async with made as client:
        calls = [
            client.completions.create(model="mine", prompt="a", max_tokens=400, extra_body={"ignore_eos": True})
            for _ in range(12)
        ]
        ended = await asyncio.gather(*calls, return_exceptions=True)
    refused = [each for each in ended if isinstance(each, openai.RateLimitError)]
    assert refused
    assert all(int(each.response.headers["retry-after"]) >= 1 for each in refused)
    assert any(not isinstance(each, Exception) for each in ended)
    assert all(isinstance(each, openai.RateLimitError) or not isinstance(each, Exception) for each in ended)


def test_a_deadline_is_a_504(client):
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(
            model="tiny", prompt="a", max_tokens=2000, extra_body={"deadline_s": 0.001, "ignore_eos": True}
        )
    assert caught.value.status_code == 504
    assert caught.value.code == "deadline_exceeded"


def test_32_callers_at_once_have_the_texts_of_one(url, client):
    asked = [{"model": "tiny", "prompt": f"{i} foxes", "temperature": 0, "max_tokens": 16} for i in range(32)]
    alone = [client.completions.create(**each).choices[0].text for each in asked]

    async def together():
        limits = httpx.Limits(max_connections=64)
        http = openai.DefaultAsyncHttpxClient(limits=limits)
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0) as made:
            return await asyncio.gather(*(made.completions.create(**each) for each in asked))

    found = [each.choices[0].text for each in asyncio.run(together())]
    assert sum(one == other for one, other in zip(alone, found, strict=True)) >= 31
