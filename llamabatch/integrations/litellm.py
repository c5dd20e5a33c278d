"""LiteLLM and DSPy over engines in this process: register() adds models named llamabatch/… to LiteLLM."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from llamabatch.errors import ContextLengthError, EngineClosedError, InputError, LlamaBatchError, QueueFull
from llamabatch.integrations import needs
from llamabatch.integrations.shared import SharedEngine, chat_arguments
from llamabatch.request.outputs import RequestOutput, SequenceOutput
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.tool_calls import ToolCallDelta

with needs("litellm", "litellm"):
    import litellm
    from litellm import CustomLLM
    from litellm.types.utils import EmbeddingResponse, GenericStreamingChunk, ModelResponse
    from litellm.utils import custom_llm_setup

PROVIDER = "llamabatch"
_DEFAULT_TIMEOUT_S = 600.0  # LiteLLM's default. The caller did not choose this timeout, so it sets no deadline_s
_PRICES = (
    *("input_cost_per_token", "output_cost_per_token"),
    *("cache_creation_input_token_cost", "cache_read_input_token_cost"),  # without them, register_model warns
)
_WITHOUT_MEANING = ("user", "max_retries", "extra_headers", "stream", "stream_options", "encoding_format")


def register(*, engines: Mapping[str, Any] | None = None, **options: Any) -> LlamaBatchLiteLLM:
    """Registers models named llamabatch/… with LiteLLM. A second call closes the first provider and replaces it.

    Args:
        engines: LLMs by name, as {"mine": llm} for the model llamabatch/mine. The provider never closes these LLMs.
        **options: options of the engines for all other names, as for LLM.

    Returns:
        The provider. Its close() closes its engines.

    Raises:
        ConfigError: an option is invalid.
    """
    provider = LlamaBatchLiteLLM(engines=engines, **options)
    others = [each for each in litellm.custom_provider_map if each["provider"] != PROVIDER]
    for each in litellm.custom_provider_map:
        if each["provider"] == PROVIDER:
            each["custom_handler"].close()
    litellm.custom_provider_map = [*others, {"provider": PROVIDER, "custom_handler": provider}]
    custom_llm_setup()
    return provider


class LlamaBatchLiteLLM(CustomLLM):
    """A provider of LiteLLM over GGUF models. The first call for a model starts its engine.

    Requests of threads and coroutines share the engine's batches. A failed request raises an error of LiteLLM.

    Args:
        engines, **options: as for register().
    """

    def __init__(self, *, engines: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__()
        SharedEngine("tiny", options)  # only checks the options, without loading a model
        self._options = options
        self._engines = {name: SharedEngine(llm) for name, llm in (engines or {}).items()}
        self._priced: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Closes the engines, except the engines of LLMs that were passed in. Later calls fail."""
        with self._lock:
            engines, self._engines, self._closed = list(self._engines.values()), {}, True
        for engine in engines:
            engine.close()

    def completion(self, model: str, messages: list[Any], optional_params: dict[str, Any], **given: Any) -> Any:
        """Answers LiteLLM's completion()."""
        with _Errors(model):
            params, options = _call(optional_params, given)
            engine = self._engine(model)
            [output] = engine.llm.chat(_conversation(messages), params, errors="raise", progress=False, **options)
            return _response(output, model)

    async def acompletion(self, model: str, messages: list[Any], optional_params: dict[str, Any], **given: Any) -> Any:
        """Answers LiteLLM's acompletion()."""
        with _Errors(model):
            params, options = _call(optional_params, given)
            engine = self._engine(model)
            [output] = await engine.async_llm.chat(_conversation(messages), params, errors="raise", **options)
            return _response(output, model)

    def streaming(
        self, model: str, messages: list[Any], optional_params: dict[str, Any], **given: Any
    ) -> Iterator[GenericStreamingChunk]:
        """Answers LiteLLM's completion(stream=True)."""
        with _Errors(model):
            params, options = _call(optional_params, given)
            engine = self._engine(model)
            for piece in engine.llm.stream(_conversation(messages), params, errors="raise", **options):
                yield from _chunks(piece)

    async def astreaming(
        self, model: str, messages: list[Any], optional_params: dict[str, Any], **given: Any
    ) -> AsyncIterator[GenericStreamingChunk]:
        """Answers LiteLLM's acompletion(stream=True)."""
        with _Errors(model):
            params, options = _call(optional_params, given)
            engine = self._engine(model)
            async for piece in engine.async_llm.stream(_conversation(messages), params, errors="raise", **options):
                for chunk in _chunks(piece):
                    yield chunk

    def embedding(self, model: str, input: list[Any], optional_params: dict[str, Any], **given: Any) -> Any:
        """Answers LiteLLM's embedding()."""
        with _Errors(model):
            texts, llm = _texts(input), self._engine(model).llm
            vectors = llm.embed(texts, normalize=True, progress=False)
            return _embeddings(model, vectors, sum(map(len, llm.tokenize(texts))))

    async def aembedding(self, model: str, input: list[Any], optional_params: dict[str, Any], **given: Any) -> Any:
        """Answers LiteLLM's aembedding()."""
        with _Errors(model):
            texts, llm = _texts(input), self._engine(model).async_llm
            vectors = await llm.embed(texts, normalize=True)
            return _embeddings(model, vectors, sum(map(len, await llm.tokenize(texts))))

    def _engine(self, model: str) -> SharedEngine:
        with self._lock:
            if self._closed:
                raise EngineClosedError("this provider is closed; call register() again")
            if model not in self._engines:
                self._engines[model] = SharedEngine(model, self._options)
            if model not in self._priced:
                _price(model)
                self._priced.add(model)
            return self._engines[model]


def _price(model: str) -> None:
    """Gives a model the price 0 if it has no price, because LiteLLM's completion_cost raises for an unknown model."""
    name = f"{PROVIDER}/{model}"
    free = dict.fromkeys(_PRICES, 0.0)
    if name not in litellm.model_cost:
        litellm.register_model({name: {"litellm_provider": PROVIDER, "mode": "chat", **free}})


class _Errors:
    """A context manager that converts errors of llamabatch to LiteLLM's errors, which have an HTTP status."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        if isinstance(error, LlamaBatchError):
            raise _error(error, self._model) from error


def _error(error: LlamaBatchError, model: str) -> Exception:
    kinds: tuple[tuple[type[LlamaBatchError], Any], ...] = (
        (ContextLengthError, litellm.ContextWindowExceededError),
        (InputError, litellm.BadRequestError),
        (QueueFull, litellm.RateLimitError),
        (EngineClosedError, litellm.ServiceUnavailableError),
        (LlamaBatchError, litellm.InternalServerError),
    )
    found = next(theirs for ours, theirs in kinds if isinstance(error, ours))
    made: Exception = found(message=str(error), model=model, llm_provider=PROVIDER)
    return made


def _call(optional_params: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[SamplingParams, dict[str, Any]]:
    """Returns the sampling parameters of a call, and the other arguments for LLM.chat."""
    named = {name: value for name, value in optional_params.items() if value is not None}
    named |= named.pop("extra_body", {})
    for name in _WITHOUT_MEANING:
        named.pop(name, None)
    options = chat_arguments(named)
    timeout = given.get("timeout")
    if isinstance(timeout, (int, float)) and timeout not in (_DEFAULT_TIMEOUT_S, litellm.request_timeout):
        named.setdefault("deadline_s", timeout)
    return SamplingParams.from_options(**named), options


def _conversation(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns messages as dictionaries. Some messages may be objects of LiteLLM's classes."""
    return [each if isinstance(each, dict) else each.model_dump(exclude_none=True) for each in messages]


def _response(output: RequestOutput, model: str) -> ModelResponse:
    if (error := output.exception()) is not None:
        raise error
    found = output.to_openai(chat=True, model=f"{PROVIDER}/{model}")
    for choice in found["choices"]:  # "reasoning" repeats "reasoning_content", and is unknown to LiteLLM
        choice["message"].pop("reasoning", None)
    return ModelResponse(**found)


def _chunks(piece: SequenceOutput) -> Iterator[GenericStreamingChunk]:
    """Converts a piece to chunks. Each tool call gets its own chunk, because a chunk can have only one call."""
    output = piece.finished
    if output is not None and (error := output.exception()) is not None:
        raise error
    thinking = {"reasoning_content": piece.reasoning} if piece.reasoning else None
    if piece.text or thinking:
        yield _chunk(piece.text, thinking=thinking)
    for call in piece.tool_calls:
        yield _chunk("", call)
    if output is not None:
        found = output.to_openai(chat=True)
        yield _chunk("", reason=found["choices"][0]["finish_reason"], usage=found["usage"])


def _chunk(
    text: str, call: ToolCallDelta | None = None, *, thinking: Any = None, reason: str = "", usage: Any = None
) -> GenericStreamingChunk:
    tool: Any = None
    if call is not None:
        function = {"name": call.name, "arguments": call.arguments}
        tool = {"id": call.id, "type": "function", "index": call.index, "function": function}
    return GenericStreamingChunk(
        text=text,
        tool_use=tool,
        is_finished=bool(reason),
        finish_reason=reason,
        usage=usage,
        index=0,
        provider_specific_fields=thinking,
    )


def _texts(given: Any) -> list[Any]:
    return [given] if isinstance(given, str) else list(given)


def _embeddings(model: str, vectors: Sequence[Any], n_tokens: int) -> EmbeddingResponse:
    data = [
        {"object": "embedding", "index": number, "embedding": vector.tolist()} for number, vector in enumerate(vectors)
    ]
    usage: Any = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return EmbeddingResponse(model=f"{PROVIDER}/{model}", data=data, object="list", usage=usage)
