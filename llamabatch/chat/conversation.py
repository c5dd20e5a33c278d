"""Conversations to prompts, by the GGUF's own jinja2 template in jinja2's sandbox."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from llamabatch.errors import ConfigError, PromptError
from llamabatch.utils.checks import nearest, show

if TYPE_CHECKING:
    from llamabatch.chat.template import BoundedTemplate

Message = Mapping[str, Any]
Conversation = Sequence[Message]


# Variables of chat templates that a caller may set. A template is a program from the model's file: the sender of a
# request must not choose freely what it reads.
TEMPLATE_KWARGS = (
    "add_generation_prompt",
    "builtin_tools",
    "continue_final_message",
    "custom_tools",
    "date_string",
    "documents",
    "enable_thinking",
    "keep_past_thinking",
    "model_identity",
    "preserve_thinking",
    "reasoning_effort",
    "thinking",
    "thinking_budget",
    "tools_in_user_message",
    "xml_tools",
)


@dataclass(frozen=True)
class ChatOptions:
    """The variables of a chat template other than the messages.

    Attributes:
        tools: OpenAI's function tools, [{"type": "function", "function": {"name": …, "parameters": …}}].
        kwargs: variables of the template, of those in TEMPLATE_KWARGS.

    Raises:
        PromptError: the tools are no such list, or a variable is not in TEMPLATE_KWARGS.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tools is not None:
            _check_tools(self.tools)
        if not isinstance(self.kwargs, Mapping):
            raise PromptError(f"chat_template_kwargs is {show(self.kwargs)}; give a mapping from name to value")
        for name in self.kwargs:
            if name not in TEMPLATE_KWARGS:
                raise PromptError(f"chat_template_kwargs has {show(name)}{nearest(str(name), TEMPLATE_KWARGS)}")


def render(
    template: str | None,
    conversation: Conversation,
    bos: str,
    eos: str,
    options: ChatOptions | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> str:
    """The prompt of a conversation, ending where the assistant's answer begins.

    Args:
        template: jinja2 source from the model's metadata.
        conversation: messages with "role" and "content"; content is a text, or OpenAI's list of text parts.
        bos, eos: text of these special tokens, for templates that write them.
        options: tools and variables.
        cancelled: returns True when the text is needed no more; called every few milliseconds.

    Raises:
        ConfigError: the model has no chat template, or none that can be compiled.
        PromptError: a message has no role or content, the template refuses the conversation or takes too much time or
            memory for it (see template.BUDGET), or it does not know a variable that was given.
        CancelledError: `cancelled` returned True.
    """
    if template is None:
        raise ConfigError("this model has no chat template; use generate with a prompt of its own format")
    messages = [_message(message) for message in _messages(conversation)]
    options = options or ChatOptions()
    compiled = _compile(template)
    given = {"tools": options.tools} if options.tools else {}
    for name in (*given, *options.kwargs):
        if name not in compiled.variables and name != "add_generation_prompt":
            raise PromptError(f"this model's chat template does not know {name!r}, so giving it would change nothing")
    variables = {"add_generation_prompt": True, "tools": None, **given, **options.kwargs}
    variables |= {"messages": messages, "bos_token": bos, "eos_token": eos}
    try:
        return compiled.render(variables, cancelled)
    except CancelledError:
        raise
    except Exception as error:  # a template is a program: it can raise any exception
        from llamabatch.chat.template import describe

        raise PromptError(f"the model's chat template refuses this conversation: {describe(error)}") from error


def check_conversation(conversation: object) -> Conversation:
    """The conversation itself, if it has the form of one. Raises PromptError."""
    messages = _messages(conversation)
    for message in messages:
        _message(message)
    return messages


class ChatModel(Protocol):
    """The part of a model that turns a conversation into token ids."""

    @property
    def chat_template(self) -> str | None: ...

    def special_token(self, name: str) -> str: ...

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]: ...


def to_tokens(
    model: ChatModel,
    conversation: Conversation,
    options: ChatOptions | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> tuple[str, tuple[int, ...]]:
    """A conversation as text and token ids. Raises as render and Model.tokenize do.

    The whole text is read with its special tokens, as llama-server does: a message that spells out <|im_end|> ends its
    turn. A program that passes on text of strangers must decide what to do about that.
    """
    bos = model.special_token("bos")
    text = render(model.chat_template, conversation, bos, model.special_token("eos"), options, cancelled)
    # a template that writes BOS itself must not get a second one
    add_special = not (bos and text.startswith(bos))
    return text, tuple(model.tokenize(text, add_special=add_special, parse_special=True))


def _messages(conversation: object) -> Conversation:
    if isinstance(conversation, (str, Mapping)) or not isinstance(conversation, Sequence):
        raise PromptError(f"a conversation is a list of messages, not {type(conversation).__name__}")
    if not conversation:
        raise PromptError("the conversation is empty; give at least one message")
    return conversation


def _message(message: object) -> Message:
    """A message as templates expect it: content as one text, arguments of tool calls as values."""
    well_formed = isinstance(message, Mapping) and isinstance(message.get("role"), str)
    if not well_formed or ("content" not in message and "tool_calls" not in message):  # type: ignore[operator]
        raise PromptError('a message is {"role": "user" | "assistant" | "system" | "tool", "content": text}')
    assert isinstance(message, Mapping)
    plain = {**message, "content": _content(message.get("content"))}
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, (list, tuple)):
            raise PromptError(f"tool_calls is {show(calls)}; give a list of them")
        plain["tool_calls"] = [_tool_call(call) for call in calls]
    return plain


def _content(content: object) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise PromptError(f"content is {show(content)}; give a text, or a list of text parts")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise PromptError(f"content has a part of type {show(kind)}; only text parts can be read")
    return "".join(part["text"] for part in content)


def _tool_call(call: Any) -> Any:
    """OpenAI sends arguments as JSON text, and templates write them with tojson, which would quote them twice."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise PromptError(f'a tool call is {show(call)}; give {{"function": {{"name": …, "arguments": …}}}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise PromptError(
                f"the arguments of tool call {show(function.get('name'))} are no JSON: {error}"
            ) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _check_tools(tools: object) -> None:
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise PromptError(f"tools is {show(tools)}; give a list of function tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise PromptError(f'a tool is {show(tool)}; give {{"type": "function", "function": {{"name": …}}}}')


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> BoundedTemplate:
    from llamabatch.chat.template import BoundedTemplate  # with jinja2, which only chats need

    return BoundedTemplate(template)
