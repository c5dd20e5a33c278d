"""The body of /v1/chat/completions and its reader, without HTTP."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llamabatch.chat.messages import PICTURE_TYPES, SOUND_TYPES, Conversation, check_conversation, media_kind
from llamabatch.chat.options import ChatOptions
from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission
from llamabatch.errors import PromptError
from llamabatch.llama.model import Model
from llamabatch.media.parts import has_media
from llamabatch.media.prompt import chat_prompt
from llamabatch.server.http.errors import ApiError
from llamabatch.server.request import optional
from llamabatch.server.request.body import BOOLEAN, OBJECT, RULES, TEXT, Body, Field, Fields, Json, Rules, reads, string
from llamabatch.server.request.generation import Generation, read_generation
from llamabatch.server.request.generation_fields import GENERATION
from llamabatch.server.request.media import media_part
from llamabatch.server.request.namespaces import NAMESPACE, Namespaced, chosen_name, functions_in, offered
from llamabatch.server.serving.bounded_model import for_tokens
from llamabatch.utils.checks import show

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

_REASONING_FORMATS = ("none", "auto", "deepseek")
# Programs send these template variables to every model, even if the model's template does not read them.
_WISHES = ("enable_thinking", "thinking", "reasoning_effort", "preserve_reasoning")

_MEDIA = {
    **dict.fromkeys(PICTURE_TYPES, "images"),
    **dict.fromkeys(SOUND_TYPES, "audio"),
    "video_url": "video",
    "input_video": "video",
    "file": "files",
}
_TEXTS = ("text", "input_text", "output_text")
_MESSAGE: Json = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": {
            "anyOf": [
                TEXT,
                {
                    "type": "array",
                    "items": {
                        "anyOf": [
                            {
                                "type": "object",
                                "required": ["type", "text"],
                                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                            },
                            {
                                "type": "object",
                                "required": ["type", "image_url"],
                                "properties": {
                                    "type": {"const": "image_url"},
                                    "image_url": {
                                        "type": ["object", "string"],
                                        "properties": {"url": {"type": "string"}},
                                    },
                                },
                            },
                        ]
                    },
                },
            ]
        },
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_call_id": TEXT,
    },
}
_TOOL: Json = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "description": TEXT,
                "parameters": OBJECT,
                "strict": BOOLEAN,
            },
        },
    },
}
_NAMESPACE: Json = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {
        "type": {"const": NAMESPACE},
        "name": {"type": "string"},
        "description": TEXT,
        "tools": {"type": ["array", "null"], "items": {"type": "object"}},
    },
}

CHAT: Fields = {
    **GENERATION,
    **optional.CHAT,
    "messages": Field({"type": "array", "items": _MESSAGE, "minItems": 1}, "the conversation"),
    "logprobs": Field(BOOLEAN, "give the logprob of each token"),
    "top_logprobs": Field({"type": ["integer", "null"], "minimum": -1, "maximum": 1024}, "and of so many likeliest"),
    "tools": Field(
        {"type": ["array", "null"], "items": {"anyOf": [_TOOL, _NAMESPACE]}},
        "functions that the model may call, and namespaces of them",
    ),
    "tool_choice": Field({}, 'auto, none, required, or {"type": "function", "function": {"name": …}}'),
    "parallel_tool_calls": Field(BOOLEAN, "more than one call may come"),
    "functions": Field({"type": ["array", "null"], "items": {"type": "object"}}, "tools of the old form"),
    "function_call": Field({}, "tool_choice of the old form"),
    "reasoning_effort": Field({"enum": [*EFFORTS, None]}, "a variable of the chat template; none: without thinking"),
    "reasoning_format": Field(
        {"enum": [*_REASONING_FORMATS, None]}, "none: thinking stays in content; others: in reasoning_content"
    ),
    "include_reasoning": Field(BOOLEAN, "give the thinking, too"),
    "chat_template_kwargs": Field(OBJECT, "variables of the chat template"),
    "chat_template": Field(TEXT, "needs --trust-request-chat-template"),
    "add_generation_prompt": Field(BOOLEAN, "the prompt ends with the header of the answer"),
    "continue_final_message": Field(BOOLEAN, "the answer goes on with the last message, an assistant's"),
    "add_special_tokens": Field(BOOLEAN, "", (False,), "the chat template writes the special tokens"),
    "echo": Field(BOOLEAN, "", (False,), "the answer never repeats the conversation"),
    "documents": Field({}, "", ([],), 'give chat_template_kwargs={"documents": …} to a template that reads them'),
    "modalities": Field({}, "", (["text"],), "answers are text"),
    "audio": Field({}, "", (), "answers are text"),
}


@dataclass(frozen=True)
class ChatBody(Generation):
    """A request for a chat completion.

    Attributes:
        conversation, options: the chat template makes the prompt from these two.
        include_reasoning: the answer contains the thinking.
        functions: the caller uses `functions`, the old form of tools, so the answer has function_call.
        before: the token ids that come before the conversation.
    """

    conversation: Conversation = ()
    options: ChatOptions = ChatOptions()
    include_reasoning: bool = True
    functions: bool = False
    before: tuple[int, ...] = ()

    @property
    def has_media(self) -> bool:
        return has_media(self.conversation)

    def submission(self, processor: InputProcessor, loaded: Sequence[str] = ()) -> Submission:
        """Returns the request for the engine. Raises InputError.

        Args:
            loaded: names of the loaded adapters. The index of a name is the adapter's id in llama-server's API.
        """
        adapters = self.adapter_scales(loaded)
        conversation = known_roles(self.conversation, self.options.template or processor.chat_template)
        params = self.params_for(processor)
        return processor.conversations(list(conversation), params, self.options, adapters, "raise", self.before)

    def rendered(self, model: Model) -> tuple[str, list[int]]:
        """Returns the conversation as text and token ids. Raises PromptError, ConfigError."""
        conversation = known_roles(self.conversation, self.options.template or model.chat_template)
        prompt = chat_prompt(for_tokens(model), conversation, self.options)
        return prompt.text or "", list(prompt.token_ids)


@reads
def read_chat(body: Mapping[str, Any], rules: Rules = RULES) -> ChatBody:
    """Reads a ChatBody from a request body. Raises ApiError with the field, its value and the allowed values."""
    given = Body(body, CHAT, rules)
    messages = given.needed("messages", 'a list, as [{"role": "user", "content": "Hello"}]')
    options, functions = _options(given, rules)
    found: dict[str, Any] = {
        "conversation": _conversation(messages, given),
        "options": options,
        "functions": functions,
        "include_reasoning": given.boolean("include_reasoning", True),
    }
    return ChatBody(**found, **read_generation(given, rules, chat=True))


def read_as_chat(body: Mapping[str, Any], rules: Rules, names: Mapping[str, str], ignored: Iterable[str]) -> ChatBody:
    """Reads a ChatBody from a chat body that was converted from another dialect. Raises ApiError.

    Args:
        names: maps a chat field to the dialect's name of the field, for error messages.
        ignored: the ignored fields of the dialect's body.
    """
    try:
        read = read_chat(body, rules)
        form = read.form and names.get(read.form, read.form)
        return replace(read, form=form, ignored=(*ignored, *read.ignored))
    except ApiError as error:
        own = names.get(error.param or "")
        if own is None or error.param is None:
            raise
        message = error.message.replace(error.param, own, 1)
        param = own.partition(".")[0]
        raise ApiError(error.status, message, error.type, error.code, param, error.headers, error.facts) from error


def _options(body: Body, rules: Rules) -> tuple[ChatOptions, bool]:
    """Reads the ChatOptions of a body. The second result is True if the body has functions, the old form of tools."""
    template = body.text("chat_template")
    if template is not None and not rules.trust_templates:
        raise ApiError(
            400,
            "chat_template is a program, which this server takes from its own options alone; start it with "
            "--trust-request-chat-template, or leave chat_template out",
            code="unsupported_parameter",
            param="chat_template",
        )
    if template is not None:
        rules = replace(rules, variables=None)  # the variables of the body's own template are not known
    effort = body.choice("reasoning_effort", EFFORTS)
    wished = effort_kwargs(body, rules, "reasoning_effort", effort)
    usual = {name: value for name, value in rules.template_kwargs.items() if name not in _WISHES or rules.reads(name)}
    kwargs = {**usual, **wished, **template_kwargs(body, rules)}
    reasoning = body.choice("reasoning_format", _REASONING_FORMATS)
    tools, choice = body.take("tools"), body.take("tool_choice")
    functions, call = body.take("functions"), body.take("function_call")
    if functions is not None or call is not None:
        if tools is not None or choice is not None:
            raise PromptError("functions and tools are both given; give tools alone")
        tools, choice = _new_form(functions, call)
    if isinstance(tools, list):
        tools, choice = _flat(body, tools, choice)
    options = ChatOptions(
        tools=tools,
        kwargs=kwargs,
        usual=_usual(rules),
        template=rules.template if template is None else template,
        add_generation_prompt=body.take("add_generation_prompt"),
        continue_final_message=body.boolean("continue_final_message"),
        tool_choice=choice,
        parallel_tool_calls=body.boolean("parallel_tool_calls", True),
        reasoning_format="none" if reasoning == "none" else None,
    )
    return options, functions is not None


def _flat(body: Body, given: list[Any], choice: Any) -> tuple[list[Any] | None, Any]:
    """Returns the tools and the tool choice. The tools contain functions with full names in place of namespaces."""
    tools: list[Any] = []
    namespaced: Namespaced = {}
    for place, tool in optional.own_tools(body, given, ("function", NAMESPACE)):
        if isinstance(tool, Mapping) and tool.get("type") == NAMESPACE:
            tools += functions_in(place, tool, body, ("function",), _function, namespaced)
        else:
            tools.append(tool)

    def named(place: str, chosen: Any) -> Any:
        function = chosen.get("function") if isinstance(chosen, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return chosen  # the choice is refused later, with a list of the known forms
        name = chosen_name(f"{place}.function", function["name"], tools, namespaced)
        return {**chosen, "function": {**function, "name": name}}

    allowed = choice.get("allowed_tools") if isinstance(choice, Mapping) else None
    if isinstance(allowed, Mapping) and isinstance(allowed.get("tools"), list):
        where = "tool_choice.allowed_tools.tools"
        some = [named(f"{where}[{number}]", each) for number, each in enumerate(allowed["tools"])]
        choice = {**choice, "allowed_tools": {**allowed, "tools": some}}
    return tools or None, named("tool_choice", choice)


def _function(where: str, tool: object, namespace: str) -> tuple[str, Json]:
    """Returns the plain name of a function in a namespace, and the function with its full name.

    Args:
        tool: a function in the form of /v1/responses or of a chat.
    """
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise PromptError(f"{where} is {show(tool)}; give an object of type function")
    name = string(f"{where}.name", function.get("name"))
    found = {name: function[name] for name in ("description", "parameters", "strict") if function.get(name) is not None}
    return name, {"name": offered(where, namespace, name), **found}


def is_begun(messages: list[Json]) -> bool:
    """True if a conversation ends with the beginning of an answer. Anthropic and ollama continue such an answer."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    return last.get("role") == "assistant" and isinstance(content, str) and content != "" and not last.get("tool_calls")


def template_kwargs(body: Body, rules: Rules) -> Json:
    """Removes and returns chat_template_kwargs. Variables in _WISHES are ignored if the template does not read them.

    Raises:
        PromptError: the value is not an object.
        ApiError: a variable would be ignored, and the rules are strict.
    """
    kwargs = body.take("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise PromptError(f"chat_template_kwargs is {show(kwargs)}; give an object")
    found = dict(kwargs or {})
    for name in [name for name in found if name in _WISHES and not rules.reads(name)]:
        body.ignore(f"chat_template_kwargs.{name}", found.pop(name), "the chat template does not read it")
    return found


def effort_kwargs(body: Body, rules: Rules, name: str, effort: str | None) -> Json:
    """Returns the variables of the chat template for a reasoning effort; {}: there are none.

    Programs send an effort to every model. If the effort has no effect, it is ignored and a header names the field.

    Args:
        name: the name of the field.
        effort: one of EFFORTS; None: not given.

    Raises:
        ApiError: the effort would change nothing, and the rules are strict.
    """
    if effort is None:
        return {}
    if effort == "none":
        return thinking_kwargs(body, rules, name, effort)
    if rules.reads("reasoning_effort"):
        return {"reasoning_effort": effort}
    body.ignore(name, effort, "the chat template does not read reasoning_effort")
    return {}


def thinking_kwargs(body: Body, rules: Rules, name: str, value: str) -> Json:
    """Returns the template variables that turn thinking on or off; {}: the template has no variable for thinking.
    Raises ApiError as effort_kwargs does.

    Args:
        name: the name of the field.
        value: "enabled": thinking is on; any other value: thinking is off.
    """
    wanted = value == "enabled"
    if rules.reads("enable_thinking"):
        return {"enable_thinking": wanted}
    if wanted != rules.thinks:
        what = "the model always thinks" if rules.thinks else "the model does not think"
        body.ignore(name, value, f"{what}, and its chat template does not read enable_thinking")
    return {}


def _usual(rules: Rules) -> dict[str, Any]:
    """Returns default values of variables that some templates read.

    The dates have llama-server's formats and replace fixed dates in templates. Some templates append the variable
    `functions` to a text. The default of `functions` is an empty text, because a message already describes the tools.
    """
    now = datetime.datetime.now()
    found: dict[str, Any] = {
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y"),
        "functions": "",
    }
    return found if rules.enable_thinking is None else found | {"enable_thinking": rules.enable_thinking}


def _new_form(functions: object, call: object) -> tuple[Any, Any]:
    """Converts OpenAI's old functions and function_call to tools and tool_choice."""
    if functions is not None and not isinstance(functions, list):
        raise PromptError(f"functions is {show(functions)}; give a list of functions")
    tools = None if functions is None else [{"type": "function", "function": each} for each in functions]
    if isinstance(call, Mapping):
        return tools, {"type": "function", "function": {"name": call.get("name")}}
    if call not in (None, "auto", "none"):
        raise PromptError(f"function_call is {show(call)}; give 'auto', 'none' or {{'name': …}}")
    return tools, call


def _conversation(messages: object, body: Body) -> Conversation:
    """Returns the checked messages. Old function calls get the new form. In the history, unreadable media become texts.
    Raises PromptError, ApiError."""
    if not isinstance(messages, list):
        raise PromptError(f"messages is {show(messages)}; give a list of messages")
    if not messages:
        raise PromptError("messages is an empty list; give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(f"messages[{index}] is {show(message)}; give an object with role and content")
    answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    asked = optional.behind(answers)
    messages = [
        _message_of(
            index,
            _in_text(index, message, body, shown=index >= asked and message.get("role") not in ("tool", "function")),
        )
        for index, message in enumerate(messages)
    ]
    return check_conversation(messages, media=bool(body.reads))


def _in_text(index: int, message: Mapping[str, Any], body: Body, *, shown: bool) -> Mapping[str, Any]:
    """Converts the media of a message to one form. Media that the model cannot read are refused, or replaced by texts.

    Args:
        shown: True: the message is the caller's question, so unreadable media are refused. False: the message is
            history or the result of a tool. Programs send history again with each request, so unreadable media become
            texts.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts: list[Any] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if media_kind(part) in body.reads:
            parts.append(media_part(f"messages[{index}].content[{number}]", part, body))
        elif not isinstance(kind, str) or kind not in _MEDIA:
            parts.append(part)
        elif not shown:
            text = optional.media_text(body, f"messages[{index}].content[{number}]", kind)
            parts.append({"type": "text", "text": text})
        else:
            readable = "only parts of type 'text'"
            if body.reads:
                readable = f"only text and {' and '.join(f'{each}s' for each in sorted(body.reads))}"
            elif media_kind(part) is not None:
                readable += "; a server started with --mmproj and an encoder's file reads more"
            raise ApiError(
                400,
                f"messages[{index}] has a part of type {kind!r}; {_MEDIA[kind]} cannot be read, {readable}",
                code="unsupported_content_part",
                param="messages",
            )
    return {**message, "content": parts}


def _message_of(index: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message without null entries. An old function_call becomes a tool call."""
    plain = {name: value for name, value in message.items() if value is not None or name == "content"}
    if plain.get("role") != "assistant" and plain.get("content", "") is None:
        plain["content"] = ""  # the message has no text
    call = plain.pop("function_call", None)
    if call is not None:
        if "tool_calls" in plain:
            raise PromptError(f"messages[{index}] has function_call and tool_calls; give tool_calls alone")
        plain["tool_calls"] = [{"id": "call_0", "type": "function", "function": call}]
    if plain.get("role") == "function":
        plain |= {"role": "tool", "tool_call_id": plain.get("tool_call_id", "call_0")}
    if plain.get("role") == "assistant" and "content" not in plain and "tool_calls" not in plain:
        plain["content"] = None  # the message has only thinking
    if isinstance(plain.get("content"), list):
        parts = plain["content"]
        known = (*_TEXTS, *PICTURE_TYPES, *SOUND_TYPES)
        if all(isinstance(part, Mapping) and part.get("type") in known for part in parts):
            plain["content"] = [{**part, "type": "text"} if part["type"] in _TEXTS else part for part in parts]
    return plain


def known_roles(conversation: Conversation, template: str | None) -> Conversation:
    """Returns the messages. If the template does not know OpenAI's newer role "developer", "system" replaces it."""
    if template is not None and "developer" in template:
        return conversation
    return [
        {**message, "role": "system"} if message.get("role") == "developer" else message for message in conversation
    ]
