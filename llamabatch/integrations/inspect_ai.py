"""Inspect AI over one engine in this process. A package entry point registers the models llamabatch/…."""

from __future__ import annotations

import math
from typing import Any

from llamabatch.entrypoints.llm import LLM
from llamabatch.errors import ContextLengthError, LlamaBatchError, PromptError
from llamabatch.integrations import needs
from llamabatch.integrations.shared import SharedEngine
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.utils.checks import show

with needs("inspect_ai", "inspect"):
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessage,
        ChatMessageAssistant,
        ContentReasoning,
        ContentText,
        GenerateConfig,
        Logprob,
        Logprobs,
        ModelAPI,
        ModelCall,
        ModelOutput,
        ModelUsage,
        StopReason,
        TopLogprob,
        modelapi,
    )
    from inspect_ai.tool import ToolCall, ToolChoice, ToolFunction, ToolInfo

MAX_CONNECTIONS = 256  # default number of requests in flight; requests without a slot wait in the engine's queue

# field of GenerateConfig -> field of SamplingParams
_FIELDS = {
    **{name: name for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "best_of", "logprobs")},
    **{name: name for name in ("frequency_penalty", "presence_penalty", "logit_bias", "top_logprobs")},
    "stop_seqs": "stop",
    "num_choices": "n",
    "reasoning_tokens": "thinking_token_budget",
    "timeout": "deadline_s",
}


@modelapi(name="llamabatch")
class LlamaBatchAPI(ModelAPI):
    """A model provider of Inspect over a GGUF model: `inspect eval task.py --model llamabatch/tiny -M n_slots=32`.

    The requests of all samples share the batches of one engine. Inspect must run on asyncio, its default.

    Args:
        model_name: the part after "llamabatch/": path of a .gguf file, "tiny", or a name on the hub.
        base_url, api_key: parameters of Inspect's interface, ignored because there is no server.
        config: Inspect's options of generation.
        llm: an LLM in place of the model; close() leaves it open.
        **model_args: options of the engine, as for LLM.

    Raises:
        ConfigError: an option is invalid.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008  # the signature that Inspect calls
        *,
        llm: LLM | None = None,
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        self._shared = SharedEngine(model_name if llm is None else llm, model_args)

    def close(self) -> None:
        """Closes the engine, unless it belongs to an LLM passed in."""
        self._shared.close()

    def max_connections(self) -> int:
        """Returns the default number of requests in flight. Inspect's configuration overrides the number."""
        return MAX_CONNECTIONS

    def connection_key(self) -> str:
        """Returns a name for the engine. Inspect limits connections per name, so each model has its own limit."""
        return f"llamabatch/{self.model_name}"

    async def tokenize(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        return await self._shared.async_llm.tokenize(text)

    async def count_text_tokens(self, text: str) -> int:
        """Returns the number of tokens of a text."""
        return len(await self.tokenize(text))

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput | tuple[ModelOutput | Exception, ModelCall]:
        """Returns the answer to a conversation, and the call (request and response) for Inspect's log.

        For a prompt that is too long, returns an output with the stop reason "model_length". For other errors of
        AsyncLLM.chat, returns the error in place of the output. Raises PromptError if a part of a message is neither
        text nor thinking.
        """
        messages = [_message(each) for each in input]
        options: dict[str, Any] = {}
        if tools:
            options = {"tools": [_tool(each) for each in tools], "tool_choice": _tool_choice(tool_choice)}
            if config.parallel_tool_calls is not None:
                options["parallel_tool_calls"] = config.parallel_tool_calls
        if config.reasoning_effort is not None:
            options["chat_template_kwargs"] = {"reasoning_effort": config.reasoning_effort}
        request = {"model": self.model_name, "messages": messages, **options, **_given(config)}
        try:
            params = SamplingParams.from_options(**_given(config))
            [output] = await self._shared.async_llm.chat(messages, params, errors="raise", **options)
        except ContextLengthError as error:
            too_long = ModelOutput.from_content(self.model_name, str(error), stop_reason="model_length")
            return too_long, ModelCall.create(request, {"error": str(error)})
        except LlamaBatchError as error:
            return error, ModelCall.create(request, {"error": str(error)})
        call = ModelCall.create(request, output.to_openai(chat=True, model=self.model_name))
        if (aborted := output.exception()) is not None:
            return aborted, call
        return self._output(output), call

    def _output(self, output: RequestOutput) -> ModelOutput:
        given, cached = len(output.prompt_token_ids), output.num_cached_tokens
        made = sum(len(each.token_ids) for each in output.outputs)
        return ModelOutput(
            model=self.model_name,
            choices=[self._choice(output, number) for number in range(len(output.outputs))],
            usage=ModelUsage(
                input_tokens=given - cached,
                input_tokens_cache_read=cached,
                output_tokens=made,
                total_tokens=given + made,
            ),
            time=output.timings.total_s,
        )

    def _choice(self, output: RequestOutput, number: int) -> ChatCompletionChoice:
        each = output.outputs[number]
        content: Any = each.text
        if each.reasoning is not None:
            content = [ContentReasoning(reasoning=each.reasoning), ContentText(text=each.text)]
        calls = [
            ToolCall(
                id=call.id,
                function=call.name,
                arguments=call.parsed or {},
                parse_error=None if call.parsed is not None else f"the arguments are no JSON object: {call.arguments}",
            )
            for call in each.tool_calls
        ]
        message = ChatMessageAssistant(
            content=content, tool_calls=calls or None, model=self.model_name, source="generate"
        )
        return ChatCompletionChoice(message=message, stop_reason=_stop_reason(each), logprobs=_logprobs(output, number))


def _given(config: GenerateConfig) -> dict[str, Any]:
    """Returns the sampling parameters that a configuration sets."""
    found = {ours: value for theirs, ours in _FIELDS.items() if (value := getattr(config, theirs)) is not None}
    if config.response_schema is not None:
        found["structured_outputs"] = {"json": config.response_schema.json_schema.model_dump(exclude_none=True)}
    if config.prompt_logprobs is not None:
        found["prompt_logprobs"] = config.prompt_logprobs
    return {**found, **(config.extra_body or {})}


def _message(message: ChatMessage) -> dict[str, Any]:
    """Returns a message in the form of OpenAI's API. Raises PromptError for a part that is not text or thinking."""
    parts = [] if isinstance(message.content, str) else message.content
    for part in parts:
        if part.type not in ("text", "reasoning"):
            raise PromptError(f"a message has a part of type {show(part.type)}; only text can be read here")
    found: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.role == "assistant":
        if message.tool_calls:
            found["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.function, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        thinking = "".join(part.reasoning for part in parts if isinstance(part, ContentReasoning))
        if thinking:
            found["reasoning_content"] = thinking
    if message.role == "tool":
        found |= {"tool_call_id": message.tool_call_id, "name": message.function}
        if message.error is not None:
            found["content"] = f"Error: {message.error.message}"
    return found


def _tool(tool: ToolInfo) -> dict[str, Any]:
    parameters = tool.parameters.model_dump(exclude_none=True)
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def _tool_choice(choice: ToolChoice) -> Any:
    if isinstance(choice, ToolFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice == "any" else choice


def _stop_reason(each: CompletionOutput) -> StopReason:
    if each.finish_reason is FinishReason.LENGTH:
        return "max_tokens"
    return "tool_calls" if each.tool_calls else "stop"


def _logprobs(output: RequestOutput, number: int) -> Logprobs | None:
    if output.outputs[number].logprobs is None:
        return None
    content = output.to_openai(chat=True)["choices"][number]["logprobs"]["content"]
    return Logprobs(content=[_logprob(each) for each in content])


def _logprob(each: dict[str, Any]) -> Logprob:
    others = [TopLogprob(**other) for other in each["top_logprobs"] if math.isfinite(other["logprob"])]
    return Logprob(token=each["token"], logprob=each["logprob"], bytes=each["bytes"], top_logprobs=others)
