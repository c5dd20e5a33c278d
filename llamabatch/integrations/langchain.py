"""LangChain's chat model and embeddings over one engine in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from operator import itemgetter
from typing import Any, Literal

from llamabatch.chat.conversation import to_tokens
from llamabatch.chat.options import chat_options
from llamabatch.config import EngineConfig
from llamabatch.entrypoints.llm import LLM
from llamabatch.errors import ConfigError, PromptError
from llamabatch.integrations import needs
from llamabatch.integrations.shared import SharedEngine, chat_arguments
from llamabatch.request.outputs import CompletionOutput, RequestOutput, SequenceOutput
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.tool_calls import ToolCallDelta
from llamabatch.utils.checks import nearest, show

with needs("langchain_core", "langchain"):
    from langchain_core.caches import BaseCache
    from langchain_core.embeddings import Embeddings
    from langchain_core.exceptions import OutputParserException
    from langchain_core.globals import get_llm_cache
    from langchain_core.language_models import BaseChatModel, LanguageModelInput
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
    from langchain_core.messages.ai import UsageMetadata
    from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
    from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation
    from langchain_core.runnables import Runnable, RunnableConfig, RunnableMap, RunnablePassthrough
    from langchain_core.runnables.config import get_config_list
    from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
    from langchain_core.utils.pydantic import is_basemodel_subclass
    from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

_METHODS = ("json_schema", "function_calling", "json_mode")

# A model and an output. The model's batch() has computed this output, and the model's next call returns it.
_computed: ContextVar[tuple[object, RequestOutput] | None] = ContextVar("llamabatch_langchain_computed", default=None)


class _WholeJson(JsonOutputParser):
    """LangChain's JSON parser with one change: it refuses an answer that was cut off, instead of completing its
    JSON."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if not partial:
            _check_whole(result)
        return super().parse_result(result, partial=partial)


class _WholePydantic(PydanticOutputParser[Any]):
    """LangChain's parser for a class of pydantic with one change: it refuses an answer that was cut off."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if not partial:
            _check_whole(result)
        return super().parse_result(result, partial=partial)


def _check_whole(result: list[Generation]) -> None:
    """Raises OutputParserException for an answer that ended at a length limit."""
    metadata = getattr(getattr(result[0], "message", None), "response_metadata", {})
    if metadata.get("finish_reason") == "length":
        raise OutputParserException(
            "the answer was cut at max_tokens or at the end of the context, so its JSON is incomplete; raise them",
            llm_output=result[0].text,
        )


class ChatLlamaBatch(BaseChatModel):
    """A chat model of LangChain over a GGUF model in this process.

    ::

        model = ChatLlamaBatch(model="model.gguf", temperature=0.2, engine={"n_slots": 32})
        answers = model.batch(["Hello", "Goodbye"])  # one call of the engine

    `batch` is one call of the engine. `abatch`, coroutines and threads share the engine's batches. The first call loads
    the model. invoke(), bind() and other methods accept fields of SamplingParams, under any of their names, and these
    arguments of LLM.chat: tools, tool_choice, parallel_tool_calls, chat_template_kwargs and adapters.

    Raises:
        ConfigError, SamplingError: an option of the engine or a parameter is invalid. pydantic does not wrap these
            errors.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str = "tiny"
    """Path of a .gguf file, "tiny" for the bundled model, or a name on the hub."""
    llm: Any = Field(default=None, exclude=True, repr=False)
    """An LLM in place of the model; close() leaves it open."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Options of the engine, as for LLM."""
    temperature: float | None = None
    max_tokens: int | None = None
    """Maximum number of tokens in an answer; None: the default of SamplingParams."""
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    timeout: float | None = None
    """Seconds after which a request ends with an error."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Other fields of SamplingParams."""
    chat_template_kwargs: dict[str, Any] | None = None
    streaming: bool = False
    """True: invoke() streams, too, so that callbacks get each token."""

    _shared: SharedEngine = PrivateAttr()

    def __init__(self, model: str | None = None, **given: Any) -> None:
        if model is not None:
            given["model"] = model
        if "stop" in given:
            given["stop_sequences"] = given.pop("stop")
        super().__init__(**given)
        if self.llm is not None and not isinstance(self.llm, LLM):
            raise ConfigError(f"llm is {show(self.llm)}; give an LLM")
        self._shared = SharedEngine(self.model if self.llm is None else self.llm, self.engine)
        self._params(None, {})

    @property
    def _llm_type(self) -> str:
        return "llamabatch"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All settings that change an answer, for tracing and for the key of LangChain's cache."""
        fields = self.model_dump(include={"model", "engine", *_FIELDS, "stop", "sampling", "chat_template_kwargs"})
        return {**fields, "model": self.model if self.llm is None else self._shared.name}

    def _resolve_model_profile(self) -> Any:
        """Returns the model's limits and abilities for LangChain. Does not load the model."""
        found: dict[str, Any] = {
            **dict.fromkeys(("image_inputs", "audio_inputs", "video_inputs", "pdf_inputs"), False),
            **dict.fromkeys(("image_outputs", "audio_outputs", "video_outputs"), False),
            "tool_calling": True,
            "tool_choice": True,
            # "structured_output" is left out. With this entry, agents would give a call a schema and also tools, but a
            # call can have only one of the two.
        }
        options = EngineConfig.from_options(self.model, self.engine)
        n_ctx = self.llm.n_ctx if isinstance(self.llm, LLM) else options.n_ctx
        if isinstance(n_ctx, int):
            found["max_input_tokens"] = n_ctx
        return found

    def get_token_ids(self, text: str) -> list[int]:
        """Returns the tokens of a text, without BOS. Loads the model. Raises the errors of LLM.tokenize."""
        if self.custom_get_token_ids is not None:
            return list(self.custom_get_token_ids(text))
        return self._shared.llm.tokenize(text, add_special=False)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Returns the number of tokens of the prompt that the chat template makes from the messages.

        LangChain's trim_messages also counts parts of a conversation, in reverse order. If the template refuses this
        order, the result is estimated: the tokens of the texts, plus the tokens that the template adds to each message.

        Args:
            tools: as for bind_tools.

        Raises:
            ConfigError, PromptError: as for LLM.apply_chat_template.
        """
        found = [convert_to_openai_tool(each) for each in tools] if tools else None
        try:
            return self._n_tokens(_conversation(messages), found)
        except PromptError:
            n_texts = sum(len(self.get_token_ids(_whole_text(each))) for each in messages)
            turns = [{"role": ("user", "assistant")[i % 2], "content": "."} for i in range(len(messages))]
            return self._n_tokens(turns, found) - len(turns) * len(self.get_token_ids(".")) + n_texts

    def _n_tokens(self, conversation: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> int:
        if not conversation:
            return 0
        options = chat_options(tools=tools, chat_template_kwargs=self.chat_template_kwargs)
        return len(to_tokens(self._shared.llm._client.model, conversation, options)[1])

    def close(self) -> None:
        """Closes the engine, unless it belongs to an LLM given as `llm`."""
        self._shared.close()

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | Any],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Returns the model with tools that it may call.

        Args:
            tools: functions, tools of LangChain, pydantic classes, or tools in the form of OpenAI's API.
            tool_choice: "any", "required" or True: the model calls one of the tools; the name of a tool: the model
                calls this tool; "auto", None or False: the model decides; "none": no call. If a call is required, a
                grammar of the tools' schemas enforces it.
            strict: the field `strict` in the description of each tool.
        """
        found = [convert_to_openai_tool(each, strict=strict) for each in tools]
        names = [each["function"]["name"] for each in found]
        return self.bind(tools=found, tool_choice=_tool_choice(tool_choice, names), **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Returns a runnable whose answers are objects of `schema`.

        Args:
            schema: a pydantic class, a TypedDict, a JSON schema, or a tool of OpenAI's API.
            method: "json_schema": a grammar enforces the schema; "function_calling": the answer is a required tool
                call; "json_mode": a grammar enforces only JSON, so the prompt must describe the schema.
            include_raw: return a dictionary of "raw", "parsed" and "parsing_error" in place of the object.
            strict: for "function_calling" only, because a grammar is always strict.
        """
        if method not in _METHODS:
            raise ConfigError(f"method is {show(method)}{nearest(str(method), _METHODS)}")
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, strict=strict, **kwargs)
        if kwargs:
            raise ConfigError(f"{', '.join(kwargs)}: there is no such argument of with_structured_output")
        form: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            described = convert_to_json_schema(schema)
            form = {
                "type": "json_schema",
                "json_schema": {"name": described.get("title", "answer"), "schema": described},
            }
        bound = self.bind(
            response_format=form, ls_structured_output_format={"kwargs": {"method": method}, "schema": schema}
        )
        is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
        parser: Any = _WholePydantic(pydantic_object=schema) if is_class else _WholeJson()
        if not include_raw:
            return bound | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=bound) | parsed.with_fallbacks([failed], exception_key="parsing_error")

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Returns the answers to all inputs, from one call of the engine. If the config sets max_concurrency, each call
        of the engine has at most that many inputs. Callbacks run after the engine's call.

        Args:
            return_exceptions: True: return exceptions in place of failed answers; False: raise the first exception.
        """
        if not inputs:
            return []
        if self.rate_limiter is not None or self._cache is not None:  # limiter and cache need one call for each input
            one_by_one: list[Any] = super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)
            return one_by_one
        configs = get_config_list(config, len(inputs))
        most = configs[0].get("max_concurrency") or len(inputs)
        found: list[Any] = []
        for start in range(0, len(inputs), most):
            found += self._batched(
                inputs[start : start + most], configs[start : start + most], return_exceptions, kwargs
            )
        return found

    def _batched(
        self,
        inputs: Sequence[LanguageModelInput],
        configs: Sequence[RunnableConfig],
        return_exceptions: bool,
        kwargs: dict[str, Any],
    ) -> list[Any]:
        conversations = [_conversation(self._convert_input(each).to_messages()) for each in inputs]
        params, options = self._call(None, kwargs)
        outputs = self._shared.llm.chat(conversations, params, errors="return", progress=False, **options)
        answers: list[Any] = []
        for given, each, output in zip(inputs, configs, outputs, strict=True):
            token = _computed.set((self, output))
            try:
                answers.append(self.invoke(given, each, **kwargs))
            except Exception as error:
                if not return_exceptions:
                    raise
                answers.append(error)
            finally:
                _computed.reset(token)
        return answers

    @property
    def _cache(self) -> BaseCache | None:
        """LangChain's cache of answers; None if there is no cache, or if it is turned off."""
        if self.cache is False:
            return None
        return self.cache if isinstance(self.cache, BaseCache) else get_llm_cache()

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        output = self._taken()
        if output is None:
            params, options = self._call(stop, kwargs)
            [output] = self._shared.llm.chat(_conversation(messages), params, errors="raise", progress=False, **options)
        return self._result(output)

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        params, options = self._call(stop, kwargs)
        [output] = await self._shared.async_llm.chat(_conversation(messages), params, errors="raise", **options)
        return self._result(output)

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        if (output := self._taken()) is not None:
            pieces: Iterator[SequenceOutput] = iter([_as_piece(output)])
        else:
            params, options = self._call(stop, kwargs)
            pieces = self._shared.llm.stream(_conversation(messages), params, errors="raise", **options)
        for piece in pieces:
            if (chunk := self._chunk(piece)) is not None:
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        params, options = self._call(stop, kwargs)
        async for piece in self._shared.async_llm.stream(_conversation(messages), params, errors="raise", **options):
            if (chunk := self._chunk(piece)) is not None:
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _taken(self) -> RequestOutput | None:
        """Removes and returns the output that batch() has computed for this call; None if there is none."""
        found = _computed.get()
        if found is None or found[0] is not self:
            return None
        _computed.set(None)
        return found[1]

    def _call(self, stop: list[str] | None, given: Mapping[str, Any]) -> tuple[SamplingParams, dict[str, Any]]:
        """Returns the sampling parameters of a call, and the other arguments for LLM.chat."""
        named = dict(given)
        named.pop("stream", None)  # LangChain has already chosen _generate or _stream by this argument
        for name in ("ls_structured_output_format", "structured_output_format"):  # only for LangChain's tracing
            named.pop(name, None)
        if (model := named.pop("model", None)) not in (None, self.model):
            raise ConfigError(
                f"model is {show(model)}; this ChatLlamaBatch has {show(self.model)} loaded: make another one"
            )
        if "stop" in named:
            stop = named.pop("stop") if stop is None else stop
        options = chat_arguments(named)
        if self.chat_template_kwargs and "chat_template_kwargs" not in options:
            options["chat_template_kwargs"] = self.chat_template_kwargs
        return self._params(stop, named), options

    def _params(self, stop: list[str] | None, given: Mapping[str, Any]) -> SamplingParams:
        own = {name: value for name in _FIELDS if (value := getattr(self, name)) is not None}
        if "timeout" in own:
            own["deadline_s"] = own.pop("timeout")
        stops = self.stop if stop is None else stop
        if stops:
            own["stop"] = stops
        return SamplingParams.from_options(**{**own, **self.sampling, **given})

    def _result(self, output: RequestOutput) -> ChatResult:
        if (error := output.exception()) is not None:
            raise error
        usage = _usage(output)
        generations = []
        for number, each in enumerate(output.outputs):
            metadata = self._metadata(each)
            if each.logprobs is not None:
                metadata["logprobs"] = output.to_openai(chat=True)["choices"][number]["logprobs"]
            message = AIMessage(
                each.text,
                additional_kwargs={} if each.reasoning is None else {"reasoning_content": each.reasoning},
                usage_metadata=usage if number == 0 else None,
                response_metadata=metadata,
                **_tool_calls(each),
            )
            generations.append(ChatGeneration(message=message, generation_info=metadata))
        return ChatResult(generations=generations)

    def _chunk(self, piece: SequenceOutput) -> ChatGenerationChunk | None:
        """Converts a piece of a stream to a chunk; None if the piece is empty."""
        output = piece.finished
        if output is not None and (error := output.exception()) is not None:
            raise error
        if output is None and not (piece.text or piece.reasoning or piece.tool_calls or piece.logprobs):
            return None
        info: dict[str, Any] = {}
        if piece.logprobs is not None:
            info["logprobs"] = piece.to_openai(chat=True)["choices"][0]["logprobs"]
        message = AIMessageChunk(
            piece.text,
            additional_kwargs={"reasoning_content": piece.reasoning} if piece.reasoning else {},
            tool_call_chunks=[
                tool_call_chunk(name=each.name, args=each.arguments, id=each.id, index=each.index)
                for each in piece.tool_calls
            ],
            usage_metadata=None if output is None else _usage(output),
            chunk_position=None if output is None else "last",
        )
        if output is not None:
            info |= self._metadata(output.outputs[0])
        return ChatGenerationChunk(message=message, generation_info=info or None)

    def _metadata(self, each: CompletionOutput) -> dict[str, Any]:
        reason = "tool_calls" if each.tool_calls and each.finish_reason == "stop" else str(each.finish_reason)
        return {"finish_reason": reason, "model_name": self._shared.name, "model_provider": "llamabatch"}


_FIELDS = ("temperature", "max_tokens", "top_p", "top_k", "seed", "timeout")


class LlamaBatchEmbeddings(BaseModel, Embeddings):
    """LangChain's embeddings over a GGUF model in this process. embed_documents is one call of the engine.

    ::

        vectors = LlamaBatchEmbeddings(model="embedding.gguf").embed_documents(["one", "two"])
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    model: str = "tiny"
    """As in ChatLlamaBatch."""
    llm: Any = Field(default=None, exclude=True, repr=False)
    """An LLM in place of the model; close() leaves it open."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Options of the engine, as for LLM; for example `pooling`."""
    normalize: bool = True
    """True: scale vectors to length 1."""
    dimensions: int | None = None
    """Number of leading elements of a vector to keep; None: all."""
    query_prefix: str = ""
    """Text in front of a query, such as "search_query: " for some models."""
    document_prefix: str = ""
    """Text in front of a document."""

    _shared: SharedEngine = PrivateAttr()

    def __init__(self, model: str | None = None, **given: Any) -> None:
        super().__init__(**given if model is None else {**given, "model": model})
        if self.llm is not None and not isinstance(self.llm, LLM):
            raise ConfigError(f"llm is {show(self.llm)}; give an LLM")
        self._shared = SharedEngine(self.model if self.llm is None else self.llm, self.engine)

    def close(self) -> None:
        """Closes the engine, unless it belongs to an LLM given as `llm`."""
        self._shared.close()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Returns a vector for each text. Raises the errors of LLM.embed."""
        return self._embedded([self.document_prefix + text for text in texts])

    def embed_query(self, text: str) -> list[float]:
        """Returns the vector of a query. Raises the errors of LLM.embed."""
        return self._embedded([self.query_prefix + text])[0]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """Returns a vector for each text, as embed_documents does."""
        return await self._aembedded([self.document_prefix + text for text in texts])

    async def aembed_query(self, text: str) -> list[float]:
        """Returns the vector of a query, as embed_query does."""
        return (await self._aembedded([self.query_prefix + text]))[0]

    def _embedded(self, texts: list[str]) -> list[list[float]]:
        if not texts:
            return []
        options: Any = {"normalize": self.normalize, "dimensions": self.dimensions, "progress": False}
        return [vector.tolist() for vector in self._shared.llm.embed(texts, **options)]

    async def _aembedded(self, texts: list[str]) -> list[list[float]]:
        if not texts:
            return []
        found = await self._shared.async_llm.embed(texts, normalize=self.normalize, dimensions=self.dimensions)
        return [vector.tolist() for vector in found]


def _conversation(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Returns messages in the form of OpenAI's API, including the thinking of the model's answers."""
    found: list[dict[str, Any]] = []
    for message in messages:
        converted: Any = convert_to_openai_messages(message)
        if isinstance(message, AIMessage):  # the converted content may be blocks that repeat the tool calls
            converted["content"] = message.text
            thinking = message.additional_kwargs.get("reasoning_content")
            if thinking or (thinking := "".join(_thinking(message))):
                converted["reasoning_content"] = thinking
        found.append(converted)
    return found


def _whole_text(message: BaseMessage) -> str:
    """Returns the text of a message, followed by its tool calls as JSON."""
    calls = message.tool_calls if isinstance(message, AIMessage) else []
    return str(message.text) + "".join(json.dumps({"name": each["name"], "arguments": each["args"]}) for each in calls)


def _thinking(message: AIMessage) -> Iterator[str]:
    """Yields the thinking in the content blocks of a message (LangChain's output_version "v1")."""
    if isinstance(message.content, list):
        for block in message.content:
            if isinstance(block, dict) and block.get("type") == "reasoning":
                yield str(block.get("reasoning", ""))


def _tool_choice(given: str | bool | dict[str, Any] | None, names: Sequence[str]) -> str | dict[str, Any] | None:
    if given is None or given is False:
        return None
    if given in (True, "any", "required"):
        return "required"
    if isinstance(given, str) and given in names:
        return {"type": "function", "function": {"name": given}}
    if given in ("auto", "none") or isinstance(given, dict):
        return given
    raise ConfigError(f"tool_choice is {show(given)}{nearest(str(given), [*names, 'any', 'auto', 'none'])}")


def _tool_calls(each: CompletionOutput) -> dict[str, Any]:
    """Returns the tool calls of an answer as arguments of AIMessage. A call is invalid if its arguments are not a JSON
    object."""
    calls, invalid = [], []
    for call in each.tool_calls:
        if (args := call.parsed) is not None:
            calls.append(tool_call(name=call.name, args=args, id=call.id))
        else:
            error = "the arguments are no JSON object"
            invalid.append(invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=error))
    return {"tool_calls": calls, "invalid_tool_calls": invalid}


def _usage(output: RequestOutput) -> UsageMetadata:
    given, made = len(output.prompt_token_ids), sum(len(each.token_ids) for each in output.outputs)
    return UsageMetadata(
        input_tokens=given,
        output_tokens=made,
        total_tokens=given + made,
        input_token_details={"cache_read": output.num_cached_tokens},
    )


def _as_piece(output: RequestOutput) -> SequenceOutput:
    """Converts a whole output to the only piece of a stream."""
    each = output.outputs[0]
    calls = tuple(ToolCallDelta(i, call.id, call.name, call.arguments) for i, call in enumerate(each.tool_calls))
    return SequenceOutput(
        output.request_id,
        each.token_ids,
        each.text,
        output,
        logprobs=each.logprobs,
        reasoning=each.reasoning or "",
        tool_calls=calls,
        called_tools=bool(calls),
    )
