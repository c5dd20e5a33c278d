"""The library's errors become errors of an API."""

import asyncio
import json
import logging
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from llamabatch.client.crash_triage import KILLS_ALONE
from llamabatch.client.restart_policy import ENGINE_ENDED
from llamabatch.engine.validation import check_length, check_text
from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.errors import (
    AdapterError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    EngineError,
    MemoryPlanError,
    PromptError,
    QueueFull,
    SamplingError,
)
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.server.http.errors import ApiError, exception_handlers, model_not_found
from llamabatch.server.llama_server import dialect as llama_server
from llamabatch.server.serving.bounded_model import for_prompts
from llamabatch.server.serving.checks import with_cure
from llamabatch.testing import FakeLLM


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (SamplingError("temperature is -1"), 400, "invalid_request_error", None),
        (PromptError("the prompt is empty"), 400, "invalid_request_error", None),
        (AdapterError("there is no adapter"), 400, "invalid_request_error", None),
        (ContextLengthError("too long"), 400, "exceed_context_size_error", "context_length_exceeded"),
        (ConfigError("x.gguf gives no embeddings"), 400, "invalid_request_error", "model_not_supported"),
        (QueueFull("64 wait"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (EngineClosedError("the engine died"), 503, "service_unavailable_error", "service_unavailable"),
        (MemoryPlanError("it does not fit"), 503, "service_unavailable_error", "service_unavailable"),
        (EngineError("DeadlineExceeded: deadline_s is 1"), 504, "timeout_error", "deadline_exceeded"),
        (EngineError("prompts[1]: DeadlineExceeded: deadline_s is 1"), 504, "timeout_error", "deadline_exceeded"),
        (EngineError(f"it ended 2 times {KILLS_ALONE}, at last with SIGSEGV"), 500, "server_error", "engine_crash"),
        (EngineError(f"{ENGINE_ENDED} 9 times in a row"), 503, "service_unavailable_error", "service_unavailable"),
        (
            EngineError("all 2 prompts failed, first: prompts[0]: DeadlineExceeded: deadline_s is 1"),
            504,
            "timeout_error",
            "deadline_exceeded",
        ),
        (EngineError("llama_decode failed"), 500, "server_error", "internal_error"),
        (asyncio.CancelledError(), 499, "request_cancelled", "request_cancelled"),
        (model_not_found("x", ["a"]), 404, "invalid_request_error", "model_not_found"),
    ],
)
def test_each_error_has_its_status_type_and_code(error, status, kind, code):
    found = ApiError.of(error)
    assert (found.status, found.type, found.code) == (status, kind, code)
    assert set(found.to_openai()["error"]) >= {"message", "type", "param", "code"}


def test_a_prompt_that_is_too_long_is_told_both_numbers():
    with FakeLLM(n_ctx=256) as llm:
        processor = InputProcessor(llm._client)
        for prompts in ([5] * 300, [[1], [5] * 300]):
            with pytest.raises(ContextLengthError) as caught:
                processor.prompts(prompts, SamplingParams(), None, "raise")
            found = ApiError.of(caught.value)
            numbers = {"n_prompt_tokens": 300, "n_ctx": 256}
            assert numbers.items() <= found.to_openai()["error"].items()
            assert "300" in found.message
            assert "256" in found.message
            there = llama_server.error_document(found)["error"]
            assert there == {"code": 400, "type": "exceed_context_size_error", "message": found.message, **numbers}


def test_a_full_queue_names_the_wait():
    assert ApiError.of(QueueFull("full")).headers == {"Retry-After": "1"}
    error = QueueFull("full")
    error.retry_after_s = 2.1
    assert ApiError.of(error).headers == {"Retry-After": "3"}


def test_another_exception_is_named_by_an_id_that_the_log_has(caplog):
    with caplog.at_level(logging.ERROR):
        try:
            int("the " + "secret prompt")
        except ValueError as error:
            found = ApiError.of(error)
    assert found.status == 500
    assert "secret" not in found.message
    [record] = caplog.records
    assert record.getMessage().split(":")[0] in found.message
    assert "ValueError" in record.getMessage()
    assert "test_errors.py" in record.getMessage()  # the place where it was raised
    assert "the secret" not in record.getMessage()
    assert record.exc_info is None


def _client(raising: Exception | None = None) -> TestClient:
    async def endpoint(request):
        raise raising or ApiError(400, "half a character: \ud800", headers={"X-A": "b"})

    app = Starlette(routes=[Route("/v1/x", endpoint, methods=["POST"])], exception_handlers=exception_handlers())
    return TestClient(app, raise_server_exceptions=False)


def test_every_response_of_an_error_is_json_of_one_shape():
    client = _client()
    response = client.post("/v1/x")
    assert (response.status_code, response.headers["x-a"]) == (400, "b")
    assert json.loads(response.content)["error"]["message"] == "half a character: \ud800"
    missing, wrong = client.get("/v1/y"), client.get("/v1/x")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "not_found"
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["message"] == "'/v1/x' takes no 'GET'; allowed are POST"
    broken = _client(RuntimeError("secret")).post("/v1/x")
    assert broken.status_code == 500
    assert "secret" not in broken.text
    assert broken.json()["error"]["type"] == "server_error"


def test_a_prompt_that_is_too_long_names_the_option_and_what_it_costs():
    def cured(n_tokens, trained, counted=True):
        model = SimpleNamespace(metadata={"general.architecture": "a", "a.context_length": str(trained)})
        config = SimpleNamespace(n_ctx=4096, n_slots=4, kv_cells=0)
        plan = SimpleNamespace(config=config, memory=SimpleNamespace(kv_cache=4 * 2**26, gpus=()))
        error = ContextLengthError("too long")
        error.n_tokens, error.n_allowed, error.is_cured_by_n_ctx = n_tokens, 4096, counted
        found = with_cure(error, model, plan)
        assert (found.n_tokens, found.n_allowed) == (n_tokens, 4096)
        return str(found)

    assert cured(5000, 2**17) == (
        "too long; start the server with -c 8192 -np 1: each slot (-np) of 8192 tokens takes 128 MiB"
    )
    assert "-c 32768 -np 1" in cured(20_000, 2**17)
    assert "-c 22000 -np 1" in cured(20_000, 22_000)
    assert cured(20_000, 16_000) == (
        "too long; the model was trained for 16000 tokens, so that no -c admits the prompt"
    )
    assert cured(5000, 2**17, counted=False) == "too long"


def test_a_larger_n_ctx_cures_no_text_to_embed_and_none_that_was_not_counted():
    def is_cured(check, *arguments):
        with pytest.raises(ContextLengthError) as caught:
            check(*arguments)
        assert caught.value.n_allowed == 4
        return caught.value.is_cured_by_n_ctx

    counts = SimpleNamespace(longest_token=1, tokenize=lambda text, **_: [1] * len(text))
    bounded = for_prompts(counts, 4, 1, cuts=False)
    assert is_cured(check_length, 5, 4)
    assert not is_cured(check_text, (1,) * 5, 9, 4)
    assert is_cured(bounded.tokenize, "abcde")
    assert not is_cured(bounded.tokenize, "abcde")  # only the first call counts
