"""Bounds on requests: logprobs at each place, and texts that the answer repeats."""

import pytest

from llamabatch.errors import ConfigError
from llamabatch.server.anthropic.messages_body import read_messages
from llamabatch.server.http.errors import ApiError
from llamabatch.server.llama_server.completion_body import read_infill, read_llama_completion
from llamabatch.server.openai.completion_body import read_completion
from llamabatch.server.openai.embeddings import read_embedding
from llamabatch.server.openai.responses_body import read_responses
from llamabatch.server.options import ServerOptions
from llamabatch.server.request.body import Rules
from llamabatch.server.request.chat_body import read_chat
from llamabatch.server.request.json_body import _object
from llamabatch.server.vllm.tokenize import read_detokenize, read_tokenize
from tests.unit.server.serving_clients import ready_client

CHAT = {"messages": [{"role": "user", "content": "a"}]}
TOO_MANY = [
    (read_chat, CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (read_chat, CHAT | {"prompt_logprobs": -1}, "prompt_logprobs"),
    (read_completion, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (read_completion, {"prompt": "a", "logprobs": -1}, "logprobs"),
    (read_completion, {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
    (read_completion, {"prompt": "a", "logprob_token_ids": list(range(21))}, "logprob_token_ids"),
    (read_responses, {"input": "a", "top_logprobs": 21}, "top_logprobs"),
    (read_llama_completion, {"prompt": "a", "n_probs": 21}, "n_probs"),
    (read_infill, {"input_prefix": "a", "input_suffix": "b", "n_probs": 21}, "n_probs"),
    (read_messages, {**CHAT, "max_tokens": 1, "top_logprobs": 21}, "top_logprobs"),
]


@pytest.mark.parametrize(("read", "body", "name"), TOO_MANY)
def test_more_logprobs_than_the_server_gives_are_refused_before_anything_else(read, body, name):
    with pytest.raises(ApiError, match=rf"{name} is .*; allowed are 0 to 20 \(max_logprobs of the server\)") as caught:
        read(body | {"temperature": "hot"}, Rules())
    assert (caught.value.status, caught.value.param) == (400, name)
    with pytest.raises(ApiError, match=r"temperature|needs logprobs"):
        read(body | {"temperature": "hot"}, Rules(max_logprobs=-1))


def test_the_option_sets_the_bound_of_requests_and_of_their_defaults():
    assert read_completion({"prompt": "a", "logprobs": 20}).params.logprobs == 20
    assert read_completion({"prompt": "a", "logprobs": 1024}, Rules(max_logprobs=1024)).params.logprobs == 1024
    assert read_completion({"prompt": "a", "logprobs": -1}, Rules(max_logprobs=-1)).params.logprobs == -1
    with pytest.raises(ConfigError, match="sampling has logprobs 21, above max_logprobs=20"):
        ServerOptions(sampling={"logprobs": 21})
    ServerOptions(sampling={"logprobs": 21}, max_logprobs=21)
    with ready_client(server={"max_logprobs": 2}) as client:
        for n, status in ((2, 200), (3, 400)):
            assert client.post("/v1/completions", json={"prompt": "a", "logprobs": n}).status_code == status


REPEATED = [
    (read_chat, CHAT, "model"),
    (read_completion, {"prompt": "a"}, "model"),
    (read_messages, CHAT | {"max_tokens": 1}, "model"),
    (read_llama_completion, {"prompt": "a"}, "model"),
    (read_embedding, {"input": "a"}, "model"),
    (read_tokenize, {"content": "a"}, "model"),
    (read_detokenize, {"tokens": [1]}, "model"),
    *((read_responses, {"input": "a"}, name) for name in ("model", "user", "prompt_cache_key", "safety_identifier")),
]


@pytest.mark.parametrize(("read", "body", "name"), REPEATED)
def test_a_text_that_the_answer_repeats_has_256_characters_at_most(read, body, name):
    read(body | {name: "m" * 256}, Rules())
    with pytest.raises(ApiError, match=f"{name} has 257 characters; allowed are up to 256") as caught:
        read(body | {name: "m" * 257}, Rules())
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize(
    "more",
    [
        {"metadata": {"a": "x" * 10_000}},
        {"metadata": {"x" * 10_000: "a"}},
        {"metadata": {str(i): "a" for i in range(17)}},
        {"metadata": {"a": {"b": "x" * 10_000}}},
        {"max_tool_calls": "x" * 10_000},
        {"text": {"format": {"type": "json_schema", "name": "x" * 10_000, "schema": {"type": "string"}}}},
    ],
)
def test_a_response_repeats_nothing_large_that_the_model_never_reads(more):
    with pytest.raises(ApiError):
        read_responses({"input": "a"} | more)


def test_a_response_repeats_the_known_fields_of_tools_alone():
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "more": "x" * 10_000}
    chosen = {"type": "function", "name": "f", "more": "x" * 10_000}
    form = {"type": "text", "more": "x" * 10_000}
    body = read_responses({"input": "a", "tools": [tool], "tool_choice": chosen, "text": {"format": form}})
    assert body.repeated["tools"] == [
        {"type": "function", "name": "f", "description": None, "parameters": {"type": "object"}, "strict": False}
    ]
    assert body.repeated["tool_choice"] == {"type": "function", "name": "f"}
    assert body.repeated["text"] == {"format": {"type": "text"}}


def test_a_name_that_stands_twice_is_found_in_one_pass():
    n_equal = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            nonlocal n_equal
            n_equal += 1
            return str.__eq__(self, other)

    n = 20_000
    names = [*(Name(f"n{i}") for i in range(n)), Name(f"n{n - 1}")]
    with pytest.raises(ValueError, match=f"the name 'n{n - 1}' stands twice"):
        _object([(name, 0) for name in names])
    assert n_equal < 4 * n
