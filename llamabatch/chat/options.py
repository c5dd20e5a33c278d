"""Options for turning a conversation into a prompt: tools, variables, the template, and the end of the prompt."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, Literal, NamedTuple, TypedDict

from llamabatch.chat.named_templates import TEMPLATES
from llamabatch.chat.tool_schemas import types_of
from llamabatch.errors import ConfigError, PromptError
from llamabatch.utils.checks import boolean, nearest, show
from llamabatch.utils.paths import absolute

# Template variables for which chat() has separate keywords.
_OPTIONS_OF_THEIR_OWN = ("tools", "tool_choice", "add_generation_prompt", "continue_final_message")
# Variables of a template that a caller cannot set in chat_template_kwargs, because templates rely on the values of
# these variables: variables that llamabatch sets, functions of jinja2's environment, and jinja2's own names.
RESERVED = (
    *("messages", "bos_token", "eos_token", *_OPTIONS_OF_THEIR_OWN),
    *("range", "dict", "lipsum", "cycler", "joiner", "namespace", "raise_exception", "strftime_now"),
    *("loop", "self", "super", "caller", "varargs", "kwargs", "true", "false", "none"),
)

_MARKS = ("{{", "{%", "{#")  # a text with one of these marks is jinja2, not a path
_MAX_FILE = 2**20  # maximum size of a template's file in bytes; the template may have 256 Ki characters
_MAX_DEPTH = 64  # maximum depth of lists and objects in the value of a variable
_MAX_ITEMS = 2**20  # maximum number of values at one depth


ToolChoice = Literal["auto", "none", "required"] | Mapping[str, Any] | None
_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True)
class ChatOptions:
    """The options for turning a conversation into a prompt.

    Attributes:
        tools: OpenAI's function tools, [{"type": "function", "function": {"name": …, "parameters": …}}]. If the
            template has no place for tools, a message describes them.
        kwargs: Variables of the template by name. The values are plain, as in JSON. A variable that the template does
            not read is refused.
        usual: Default variables for any template. Each variable is passed on if the template reads this variable and
            `kwargs` does not have it.
        template: jinja2 source in place of the model's own template; None: the model's.
        add_generation_prompt: the prompt ends with the header of the assistant's answer; None: True if
            continue_final_message is False.
        continue_final_message: the prompt ends with the last message, an assistant's. The answer continues this
            message.
        tool_choice: "auto": the model decides whether to call a tool; "none": the answer is not searched for calls;
            "required": a tool must be called; {"type": "function", "function": {"name": …}}: this tool must be called;
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required", "tools": […]}}: one of
            these tools may, or must, be called. None: "auto".
        parallel_tool_calls: an answer may have more than one call.
        reasoning_format: "none": thinking stays in the text; None: the engine's setting.

    Raises:
        PromptError: `tools` is not such a list, or tool_choice does not fit it; a variable has a reserved name or a
            value that is not plain; or both add_generation_prompt and continue_final_message are True.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool = True
    usual: Mapping[str, Any] = field(default_factory=dict)
    reasoning_format: str | None = None

    def __post_init__(self) -> None:
        if self.tools is not None:
            _check_tools(self.tools)
        boolean(PromptError, "parallel_tool_calls", self.parallel_tool_calls)
        self._check_choice()
        if not isinstance(self.kwargs, Mapping):
            raise PromptError(f"chat_template_kwargs is {show(self.kwargs)}; give a mapping from name to value")
        for name, value in self.kwargs.items():
            _check_variable(name, value)
        if self.add_generation_prompt is not None:
            boolean(PromptError, "add_generation_prompt", self.add_generation_prompt)
        if boolean(PromptError, "continue_final_message", self.continue_final_message) and self.add_generation_prompt:
            raise PromptError(
                "add_generation_prompt and continue_final_message are both True; a prompt ends with the header of a "
                "new answer or with the last message: leave one of them out"
            )

    @property
    def given(self) -> list[str]:
        """Names of the keywords of LLM.chat that differ from their defaults."""
        names = {"kwargs": "chat_template_kwargs", "template": "chat_template"}
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return [
            names.get(name, name)
            for name, (value, default) in values.items()
            if name != "usual" and value != default and not (isinstance(value, (Mapping, Sequence)) and not value)
        ]

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The schema of each tool's parameters, by the name of the tool."""
        functions = [tool["function"] for tool in self.tools or ()]
        return {function["name"]: function.get("parameters") or {} for function in functions}

    @property
    def reads_calls(self) -> bool:
        """True if answers are searched for calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def allows_some(self) -> bool:
        """True if tool_choice allows only some of the functions."""
        return _allowed(self.tool_choice) is not None

    @property
    def _callable(self) -> dict[str, Mapping[str, Any]]:
        """The schemas of the functions that the model may call."""
        allowed = _allowed(self.tool_choice)
        return {name: schema for name, schema in self.schemas.items() if allowed is None or name in allowed.names}

    @property
    def forced_tools(self) -> dict[str, Mapping[str, Any]] | None:
        """The schemas of some functions, one of which must be called; None: no call is required."""
        allowed = _allowed(self.tool_choice)
        if self.tool_choice == "required" or (allowed is not None and allowed.mode == "required"):
            return self._callable
        name = _chosen(self.tool_choice)
        return None if name is None else {name: self.schemas[name]}

    @property
    def strict_tools(self) -> set[str]:
        """The names of the functions with "strict": true."""
        return {tool["function"]["name"] for tool in self.tools or () if tool["function"].get("strict") is True}

    @property
    def free_schemas(self) -> dict[str, Mapping[str, Any]]:
        """The schemas of callable functions, for optional calls. A function without "strict" accepts any object."""
        strict, loose = self.strict_tools, {"type": "object"}
        return {name: schema if name in strict else loose for name, schema in self._callable.items()}

    def _check_choice(self) -> None:
        choice, known = self.tool_choice, list(self.schemas)
        name, allowed = _chosen(choice), _allowed(choice)
        if name is None and allowed is None and choice not in (None, *_CHOICES):
            raise PromptError(
                f"tool_choice is {show(choice)}; give 'auto', 'none', 'required', "
                '{"type": "function", "function": {"name": …}}, or {"type": "allowed_tools", "allowed_tools": '
                '{"mode": "auto", "tools": [{"type": "function", "function": {"name": …}}]}}'
            )
        if choice in (None, "auto", "none"):
            return
        if not known:
            raise PromptError(
                f"tool_choice is {show(choice)}, and there are no tools to call; give tools, or leave it out"
            )
        for each in (name,) if allowed is None else allowed.names:
            if each is not None and each not in known:
                raise PromptError(f"tool_choice names {show(each)}, which is not in tools{nearest(each, known)}")


class _Allowed(NamedTuple):
    mode: str
    names: tuple[str, ...]


def _allowed(choice: object) -> _Allowed | None:
    """Returns the mode and the function names of a valid tool_choice of type "allowed_tools"; None for any other
    value."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return None
    inner = choice.get("allowed_tools")
    mode, tools = (inner.get("mode"), inner.get("tools")) if isinstance(inner, Mapping) else (None, None)
    names = [_chosen(tool) for tool in tools] if isinstance(tools, (list, tuple)) else []
    known = tuple(name for name in names if name is not None)
    return _Allowed(mode, known) if mode in ("auto", "required") and known and len(known) == len(names) else None


def _chosen(choice: object) -> str | None:
    """Returns the function's name in a tool_choice for one function; None for any other value."""
    if not isinstance(choice, Mapping) or choice.get("type", "function") != "function":
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def template_source(given: str | os.PathLike[str] | None) -> str | None:
    """Returns the jinja2 source of a chat template that a caller gives as source, path or name; None for None.

    Args:
        given: jinja2 (a text with "{{", "{%" or "{#"), the path of a file with jinja2, or one of llama.cpp's names in
            named_templates.TEMPLATES.

    Raises:
        ConfigError: there is no such file, or it cannot be read as UTF-8 of up to 1 MiB.
    """
    if given is None or (isinstance(given, str) and any(mark in given for mark in _MARKS)):
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise ConfigError(f"chat_template is {show(given)}; give the text of a jinja2 template, or the path of a file")
    if given in TEMPLATES:
        return TEMPLATES[str(given)]
    advice = f"give the path of a file, a text of jinja2, which has {{{{ or {{% in it, or one of {', '.join(TEMPLATES)}"
    try:
        path = absolute(given)
    except ConfigError as error:
        raise ConfigError(f"chat_template cannot be read: {error}; {advice}") from error
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe might never end
        raise ConfigError(f"chat_template {show(given)} is no file; {advice}")
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE + 1)
        if len(data) > _MAX_FILE:
            raise ConfigError(f"chat_template {show(given)} is larger than {_MAX_FILE} bytes")
        return data.decode().removeprefix("\ufeff")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise ConfigError(f"chat_template {show(given)} is no text in UTF-8: {error.reason}") from error
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"chat_template {show(given)} cannot be read: {why}; {advice}") from error


class TemplateKeywords(TypedDict, total=False):
    """The keywords of LLM.apply_chat_template, for type checkers. A test compares the keywords with chat_options."""

    tools: Sequence[Mapping[str, Any]] | None
    chat_template: str | os.PathLike[str] | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


class ChatKeywords(TemplateKeywords, total=False):
    """The conversation keywords of LLM.chat, LLM.stream and LLM.as_completed."""

    tool_choice: ToolChoice
    parallel_tool_calls: bool


def chat_options(
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: ToolChoice = None,
    parallel_tool_calls: bool = True,
    chat_template: str | os.PathLike[str] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> ChatOptions:
    """Makes ChatOptions from the keywords of a call. Errors are as in ChatOptions and template_source."""
    kwargs = {} if chat_template_kwargs is None else chat_template_kwargs
    template = template_source(chat_template)
    ends = (add_generation_prompt, continue_final_message)
    return ChatOptions(tools, kwargs, template, *ends, tool_choice, parallel_tool_calls)


def _check_variable(name: object, value: object) -> None:
    """Raises PromptError if a caller cannot set this variable of the template, or if the variable cannot have this
    value."""
    if not isinstance(name, str) or not name.isidentifier():
        raise PromptError(f"chat_template_kwargs has {show(name)}, which is no name of a variable")
    if name in _OPTIONS_OF_THEIR_OWN:
        raise PromptError(f"chat_template_kwargs has {name!r}, which is a separate argument; give chat(..., {name}=…)")
    if name in RESERVED:
        raise PromptError(f"chat_template_kwargs has {name!r}, which cannot be set")
    level = [value]
    for _ in range(_MAX_DEPTH):
        below: list[object] = []
        for item in level:
            if len(below) > _MAX_ITEMS:
                raise PromptError(f"chat_template_kwargs[{name!r}] holds more than {_MAX_ITEMS:,} values")
            if isinstance(item, Mapping):
                below += [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple)):
                below += item
            elif item is not None and not isinstance(item, (str, bool, int, float)):
                raise PromptError(f"chat_template_kwargs[{name!r}] holds {show(item)}; give values as in JSON")
        if not below:
            return
        level = below
    raise PromptError(f"chat_template_kwargs[{name!r}] is nested more than {_MAX_DEPTH} deep")


def _check_tools(tools: object) -> None:
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise PromptError(f"tools is {show(tools)}; give a list of function tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            form = '{"type": "function", "function": {"name": …}}'
            raise PromptError(f"tools[{index}] is {show(tool)}; give {form}")
        if tool.get("type", "function") != "function":
            raise PromptError(f"tools[{index}] is of type {show(tool['type'])}; only functions are known")
        name, parameters = function["name"], function.get("parameters")
        if not name or name in names:
            raise PromptError(f"tools has {'two functions' if name else 'a function'} of the name {show(name)}")
        names.add(name)
        types = types_of(parameters, parameters) if parameters else None
        if not isinstance(parameters, (Mapping, NoneType)) or (types is not None and "object" not in types):
            raise PromptError(f"the parameters of {show(name)} are {show(parameters)}; give a JSON schema of an object")
        if not isinstance(function.get("strict"), (bool, NoneType)):
            raise PromptError(f"strict of {show(name)} is {show(function['strict'])}; give True or False")
        try:
            json.dumps(tool, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(f"the tool {show(name)} cannot be written as JSON: {error}") from error
