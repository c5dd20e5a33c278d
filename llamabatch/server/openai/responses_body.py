"""The body of /v1/responses, read without HTTP. It becomes a ChatBody, so that all checks of a chat apply."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llamabatch.chat.messages import media_kind
from llamabatch.chat.tagged_values import LARK
from llamabatch.errors import PromptError
from llamabatch.server.batches.records import metadata_of
from llamabatch.server.http.errors import ApiError
from llamabatch.server.openai.kept_responses import Kept, response_of
from llamabatch.server.request import optional
from llamabatch.server.request.body import RULES, Body, Field, Fields, Json, Rules, check_repeated, reads
from llamabatch.server.request.chat_body import EFFORTS, ChatBody, effort_kwargs, read_as_chat, template_kwargs
from llamabatch.server.request.generation import GENERATION
from llamabatch.server.request.media import content_of, media_part
from llamabatch.server.request.namespaces import NAMESPACE, Namespaced, chosen_name, functions_in, offered, string
from llamabatch.utils.checks import choice, show

LOGPROBS = "message.output_text.logprobs"
_EFFORT = "reasoning.effort"
_INCLUDED = (
    *(LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
    *("web_search_call.action.sources", "message.input_image.image_url"),
    *("computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")
_MEDIA = ("input_image", "input_file", "input_audio")
_OWN_TOOLS = ("function", "custom")
_CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}  # the field with the arguments, by type of call

_BOOLEAN: Json = {"type": ["boolean", "null"]}
_TEXT: Json = {"type": ["string", "null"]}
_ITEM: Json = {"type": "object", "properties": {"type": {"type": "string"}, "role": {"enum": [*_ROLES]}}}
_TOOL: Json = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {
        "type": {"const": "function"},
        "name": {"type": "string"},
        "description": _TEXT,
        "parameters": {"type": ["object", "null"]},
        "strict": _BOOLEAN,
    },
}
_FORMAT = ("type", "name", "schema", "strict")
_CUSTOM: Json = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {
        "type": {"const": "custom"},
        "name": {"type": "string"},
        "description": _TEXT,
        "format": {"type": ["object", "null"]},
    },
}
_NAMESPACE: Json = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {
        "type": {"const": "namespace"},
        "name": {"type": "string"},
        "description": _TEXT,
        "tools": {"type": ["array", "null"], "items": {"anyOf": [_TOOL, _CUSTOM]}},
    },
}
_NOT_KEPT = (
    'which is not stored: a response with "store": false is never stored, a restart drops all responses, and new ones '
    "replace the oldest (--max-responses-bytes); send the items themselves "
    "(AI SDK: providerOptions: {openai: {store: false}})"
)
Find = Callable[[str], Kept | None]  # finds a stored response by its id
_OWN: Fields = {
    "input": Field(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM, "minItems": 1}]}, "a text, or the items so far"
    ),
    "instructions": Field(_TEXT, "the system prompt"),
    "max_output_tokens": Field({"type": ["integer", "null"], "minimum": 1}, "tokens to generate at most"),
    "tools": Field(
        {"type": ["array", "null"], "items": {"anyOf": [_TOOL, _CUSTOM, _NAMESPACE]}},
        "functions, custom tools and namespaces of both; tools of other types are ignored",
    ),
    "tool_choice": Field({}, 'auto, none, required, or {"type": "function", "name": …}'),
    "parallel_tool_calls": Field(_BOOLEAN, "more than one call may come"),
    "max_tool_calls": Field({"type": ["integer", "null"]}, "limit for built-in tools, which this server does not have"),
    "text": Field({"type": ["object", "null"]}, "format: text, json_object or json_schema"),
    "reasoning": Field({"type": ["object", "null"]}, "effort: a variable of the chat template"),
    "include": Field({"type": ["array", "null"], "items": {"enum": [*_INCLUDED]}}, "logprobs of the text"),
    "top_logprobs": Field({"type": ["integer", "null"], "minimum": 0, "maximum": 1024}, "likeliest tokens a position"),
    "truncation": Field({"enum": ["auto", "disabled", None]}, "auto: an input that is too long loses its beginning"),
    "store": Field(_BOOLEAN, "false: the response is not kept for a next one"),
    "stream_options": Field({"type": ["object", "null"]}, "without effect"),
    "previous_response_id": Field(_TEXT, "the response to continue, with all items before it"),
    "conversation": Field({}, "", (), "there are no stored conversations; give previous_response_id, or all items"),
    "background": Field({}, "", (False,), "give service_tier flex, or use /v1/batches"),
    "prompt": Field({}, "", (), "there are no stored prompts; give instructions and input"),
    "chat_template_kwargs": Field({"type": ["object", "null"]}, "variables of the chat template"),
}
_NOT_HERE = ("n", "n_cmpl", "best_of", "logprobs", "response_format", "background")

RESPONSES: Fields = {
    **{name: each for name, each in GENERATION.items() if name not in _NOT_HERE},
    **optional.RESPONSES,
    **_OWN,
}

# The fields of the body that the response repeats, with the value that the response has if the body has none.
_REPEATED: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}


@dataclass(frozen=True)
class ResponsesBody:
    """A request for a response.

    Attributes:
        chat: the same request as a chat.
        repeated: the fields of the request that the response repeats.
        logprobs: the text comes with logprobs.
        namespaced: maps the name under which the model knows a function to its namespace and plain name.
        custom: the names of custom tools. The model knows a custom tool as a function with one text as its argument.
        items: the items of earlier responses and of the input, to be stored; None: the response is not stored.
    """

    chat: ChatBody
    repeated: Json = field(default_factory=dict)
    logprobs: bool = False
    namespaced: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    custom: frozenset[str] = frozenset()
    items: tuple[Any, ...] | None = None

    def called(self, name: str) -> Json:
        """Returns the fields of an output item for the name of the called function."""
        if name not in self.namespaced:
            return {"name": name}
        namespace, plain = self.namespaced[name]
        return {"name": plain, "namespace": namespace}


@reads
def read_responses(
    body: Mapping[str, Any],
    rules: Rules = RULES,
    find: Find = lambda response_id: None,
    can_keep: Callable[[Iterable[Any]], bool] = lambda items: False,
) -> ResponsesBody:
    """Reads a ResponsesBody from a request body.

    Args:
        find: finds a stored response.
        can_keep: returns False if the input items are too large to be stored.

    Raises:
        ApiError: a field is refused. The message names the field, its value and the allowed values.
    """
    given = Body(body, RESPONSES, rules)
    sent = given.needed("input", "a text, or a list of items")
    instructions = given.text("instructions")
    messages: list[Json] = [] if instructions is None else [{"role": "system", "content": instructions}]
    items = [*_before(given.text("previous_response_id"), find), *_items(sent, find)]
    messages += _conversation(items, given, n_before=len(items) - (len(sent) if isinstance(sent, list) else 1))
    keeps = given.boolean("store", True) and can_keep(items)
    included = _included(given)
    top = given.integer("top_logprobs", 0, 1024)
    namespaced: Namespaced = {}
    custom: set[str] = set()
    tools = _tools(given, namespaced, custom)
    chat: Json = {"messages": messages, **tools, **_form(given), **_reasoning(given, rules)}
    wants_logprobs = LOGPROBS in included or bool(top)
    if wants_logprobs:
        chat |= {"logprobs": True, "top_logprobs": top or 0}
    if (most := given.integer("max_output_tokens", 1, 2**31 - 1)) is not None:
        chat["max_tokens"] = most
    if given.choice("truncation", ("auto", "disabled")) == "auto":
        chat["overflow"] = "truncate"
    for name in ("prompt_cache_key", "safety_identifier", "user"):
        given.label(name)
    metadata_of(given.take("metadata"))
    given.integer("max_tool_calls", 0, 2**31 - 1)
    given.take("stream_options")
    ignored = tuple(given.ignored)
    names = {"messages": "input", "response_format": "text.format"}
    read = read_as_chat({**given.rest(), **chat}, rules, names)
    if ignored:
        read = replace(read, ignored=(*ignored, *read.ignored))
    repeated = _repeated(body, read) | {"store": keeps}
    kept = tuple(items) if keeps else None
    return ResponsesBody(read, repeated, wants_logprobs, namespaced, frozenset(custom), kept)


def _repeated(body: Mapping[str, Any], chat: ChatBody) -> Json:
    found = {name: usual if body.get(name) is None else body[name] for name, usual in _REPEATED.items()}
    text, reasoning = body.get("text") or {}, body.get("reasoning") or {}
    found["text"] = {"format": _known(text.get("format") or {"type": "text"}, _FORMAT)}
    effort = None if _EFFORT in chat.ignored else reasoning.get("effort")
    found["reasoning"] = {"effort": effort, "summary": None}
    # Clients that check types expect all fields of a function. Ignored tools are left out.
    found["tools"] = [_repeated_tool(tool) for tool in found["tools"] if tool["type"] in (*_OWN_TOOLS, NAMESPACE)]
    if isinstance(found["tool_choice"], Mapping):
        found["tool_choice"] = _known(found["tool_choice"], ("type", "name", "namespace"))
    params = chat.params
    found["temperature"], found["top_p"] = params.temperature, params.top_p
    found["frequency_penalty"], found["presence_penalty"] = params.frequency_penalty, params.presence_penalty
    return found


def _repeated_tool(tool: Mapping[str, Any]) -> Json:
    if tool["type"] == NAMESPACE:
        own = [_repeated_tool(one) for one in tool.get("tools") or () if one["type"] in _OWN_TOOLS]
        return _known(tool, ("type", "name", "description")) | {"tools": own}
    if tool["type"] == "custom":
        return _known(tool, _CUSTOM["properties"])
    return {"description": None, "parameters": None, "strict": False} | _known(tool, _TOOL["properties"])


def _known(given: Mapping[str, Any], names: Iterable[str]) -> Json:
    """Returns the known entries only. Unknown entries may be large, and a stream repeats the entries several times."""
    return {name: given[name] for name in names if name in given}


def _included(given: Body) -> list[str]:
    names = given.take("include") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise PromptError(f"include is {show(names)}; give a list of names")
    for number, name in enumerate(names):
        if name not in _INCLUDED:
            given.ignore(f"include[{number}]:{name}", name, f"known are {', '.join(_INCLUDED)}")
    return names


def _before(previous: str | None, find: Find) -> Iterable[Any]:
    """Returns the items of the previous response and of all responses before it."""
    if previous is None:
        return ()
    if (kept := find(previous)) is None:
        message = f"previous_response_id is {show(previous)}, {_NOT_KEPT}"
        raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
    return kept.conversation


def _items(sent: object, find: Find) -> Iterator[Any]:
    """Yields the items of an input. A stored item replaces each item_reference."""
    if isinstance(sent, str):
        yield {"role": "user", "content": sent}
        return
    if not isinstance(sent, list):
        raise PromptError(f"input is {show(sent)}; give a text, or a list of items")
    for index, item in enumerate(sent):
        if not isinstance(item, Mapping) or item.get("type") != "item_reference":
            yield item
            continue
        item_id = string(f"input[{index}].id", item.get("id"))
        kept = find(response_of(item_id))
        found = None if kept is None else kept.item(item_id)
        if found is None:
            message = f"input[{index}] refers to item {show(item_id)}, {_NOT_KEPT}"
            raise ApiError(404, message, code="item_not_found", param="input")
        yield found


def _conversation(items: list[Any], given: Body, n_before: int) -> list[Json]:
    """Returns the items as messages of a chat. All items of one answer become one message.

    Args:
        n_before: the number of items at the beginning that come from earlier responses.
    """
    messages: list[Json] = []
    asked = optional.behind(
        index
        for index, item in enumerate(items)
        if isinstance(item, Mapping)
        and (item.get("role") == "assistant" or item.get("type") in (*_CALLS, *_CALL_OUTPUTS))
    )
    for index, item in enumerate(items):
        _add(f"input[{index - n_before}]", item, messages, given, shown=index >= asked)
    return messages


def _add(place: str, item: object, messages: list[Json], given: Body, *, shown: bool) -> None:
    if not isinstance(item, Mapping):
        raise PromptError(f'{place} is {show(item)}; give an item, as {{"role": "user", "content": "Hello"}}')
    kind = item.get("type", "message")
    if isinstance(kind, (dict, list)):
        raise PromptError(f"{place}.type is {show(kind)}; give a text")
    if kind == "message":
        role = choice(PromptError, f"{place}.role", item.get("role"), _ROLES)
        content = "" if "content" in item and item["content"] is None else item.get("content")
        text = _content(f"{place}.content", content, given, shown=shown)
        answer = _answer(messages, before="content") if role == "assistant" else None
        if answer is None:
            messages.append({"role": role, "content": text})
        else:
            answer["content"] = text
    elif kind in _CALLS:
        name = string(f"{place}.name", item.get("name"))
        sent = item.get(_CALLS[kind])
        if isinstance(sent, Mapping) and kind == "function_call":  # some programs store arguments as objects
            sent = json.dumps(sent, ensure_ascii=False)
        arguments = "" if sent is None else string(f"{place}.{_CALLS[kind]}", sent)
        if kind == "custom_tool_call":
            arguments = json.dumps({"input": arguments}, ensure_ascii=False)
        function = {"name": offered(place, item.get("namespace"), name), "arguments": arguments}
        call = {"id": string(f"{place}.call_id", item.get("call_id")), "type": "function", "function": function}
        answer = _answer(messages, before="more")
        if answer is None:
            answer = {"role": "assistant", "content": None}
            messages.append(answer)
        answer.setdefault("tool_calls", []).append(call)
    elif kind in _CALL_OUTPUTS:
        call_id = string(f"{place}.call_id", item.get("call_id"))
        output = _content(f"{place}.output", item.get("output"), given, shown=False)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    elif kind == "reasoning":
        if thoughts := _thoughts(place, item):
            messages.append({"role": "assistant", "content": None, "reasoning_content": thoughts})
    elif isinstance(kind, str) and kind in optional.RESPONSES_ITEMS:
        given.ignore_kind(place, kind, "only a service writes such items", "unsupported_item")
    else:
        raise ApiError(
            400,
            f"{place} is of type {show(kind)}, which is not supported; known are message, function_call, "
            "function_call_output, custom_tool_call, custom_tool_call_output and reasoning",
            code="unsupported_item",
            param="input",
        )


def _answer(messages: list[Json], before: str) -> Json | None:
    """Returns the assistant message that the next item continues; None: the item begins a new message.

    Args:
        before: "content": the message must have neither text nor calls yet; "more": any message will do.
    """
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant":
        return None
    if before == "content" and (last["content"] is not None or "tool_calls" in last):
        return None
    return last


def _thoughts(place: str, item: Mapping[str, Any]) -> str:
    """Returns the thinking of a reasoning item, or its summary if it has no other text."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise PromptError(f"{place}.{name} is {show(parts)}; give a list")
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
        if texts:
            return "\n".join(string(f"{place}.{name}.text", text) for text in texts)
    return ""


def _content(where: str, content: object, given: Body, *, shown: bool) -> str | list[Json]:
    """Returns a content as text, or as parts if it has media that the model can read.

    Args:
        shown: True: the caller asks about this content, so media that the model cannot read are refused. False: the
            content is history or a tool result, which programs send again each time, so a text replaces such media.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PromptError(f"{where} is {show(content)}; give a text, or a list of parts")
    parts: list[str | Json] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "refusal":
            parts.append(string(f"{where}[{number}].refusal", part.get("refusal")))
        elif kind in _TEXTS:
            parts.append(string(f"{where}[{number}].text", part.get("text")))
        elif media_kind(part) in given.reads:
            parts.append(media_part(f"{where}[{number}]", part, given))
        elif kind in _MEDIA and not shown:
            parts.append(optional.media_text(given, f"{where}[{number}]", kind))
        else:
            raise ApiError(
                400,
                f"{where}[{number}] is {show(part if kind is None else kind)}, which is not supported; "
                "give parts of type input_text",
                code="unsupported_content_part",
                param="input",
            )
    return content_of(parts)


def _tools(given: Body, namespaced: Namespaced, custom: set[str]) -> Json:
    """Returns tools, tool_choice and parallel_tool_calls as fields of a chat.

    Args:
        namespaced: the functions of namespaces are added to it.
        custom: the names of custom tools are added to it.
    """
    found: Json = {}
    tools, chosen = given.take("tools"), given.take("tool_choice")
    if tools is not None:
        if not isinstance(tools, list):
            raise PromptError(f"tools is {show(tools)}; give a list of tools")
        own = functools.partial(_function, custom=custom)
        found["tools"] = []
        for place, tool in optional.own_tools(given, tools, (*_OWN_TOOLS, NAMESPACE)):
            if isinstance(tool, Mapping) and tool.get("type") == NAMESPACE:
                found["tools"] += functions_in(place, tool, given, _OWN_TOOLS, own, namespaced)
            else:
                found["tools"].append({"type": "function", "function": own(place, tool, None)[1]})
    choice_of = functools.partial(_choice, tools=found.get("tools", ()), namespaced=namespaced)
    if isinstance(chosen, Mapping) and chosen.get("type") == "allowed_tools":
        allowed = chosen.get("tools")
        if not isinstance(allowed, list):
            raise PromptError(f"tool_choice.tools is {show(allowed)}; give a list of functions")
        places = ((f"tool_choice.tools[{number}]", each) for number, each in enumerate(allowed))
        inner = {"mode": chosen.get("mode"), "tools": [choice_of(place, each) for place, each in places]}
        chosen = {"type": "allowed_tools", "allowed_tools": inner}
    elif isinstance(chosen, Mapping):
        chosen = choice_of("tool_choice", chosen)
    if chosen is not None:
        found["tool_choice"] = chosen
    if (parallel := given.take("parallel_tool_calls")) is not None:
        found["parallel_tool_calls"] = parallel
    return found


def _choice(place: str, chosen: object, tools: Iterable[Json], namespaced: Namespaced) -> Json:
    """Returns the choice of a function in the format of a chat."""
    if not isinstance(chosen, Mapping) or chosen.get("type") not in _OWN_TOOLS:
        raise PromptError(f'{place} is {show(chosen)}; give {{"type": "function", "name": …}}')
    namespace, name = chosen.get("namespace"), string(f"{place}.name", chosen.get("name"))
    if namespace is None:
        name = chosen_name(place, name, tools, namespaced)
    else:
        name = offered(place, namespace, name)
    return {"type": "function", "function": {"name": name}}


def _function(where: str, tool: object, namespace: str | None, custom: set[str]) -> tuple[Any, Json]:
    """Returns the plain name of a tool, and the tool as a function under the name that the model knows.

    Args:
        namespace: the namespace of the tool; None: the tool has none.
        custom: the name of a custom tool is added to it.
    """
    if not isinstance(tool, Mapping) or tool.get("type") not in _OWN_TOOLS:
        raise PromptError(f"{where} is {show(tool)}; give an object of type function, custom or namespace")
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    if namespace is not None:
        function["name"] = offered(where, namespace, string(f"{where}.name", tool.get("name")))
    if tool["type"] == "custom":
        function["name"] = name = string(f"{where}.name", function.get("name"))
        custom.add(name)
        text = _one_text(f"{where}.format", tool.get("format"))
        own = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
        function |= {"parameters": own, "strict": len(text) > 1 or None}  # strict if the text has a pattern or grammar
    return tool.get("name"), {k: v for k, v in function.items() if v is not None}


def _one_text(where: str, form: object) -> Json:
    """Returns the JSON schema of the text that a custom tool takes. `form` is the `format` of the tool."""
    if form is None:
        return {"type": "string"}
    if not isinstance(form, Mapping):
        raise PromptError(f"{where} is {show(form)}; give an object")
    if choice(PromptError, f"{where}.type", form.get("type"), ("text", "grammar")) == "text":
        return {"type": "string"}
    syntax = choice(PromptError, f"{where}.syntax", form.get("syntax"), ("lark", "regex"))
    definition = string(f"{where}.definition", form.get("definition"))
    if syntax == "regex":
        return {"type": "string", "pattern": f"^(?:{definition})$"}
    return {"type": "string", "description": f"follows {LARK}, a grammar in Lark's notation", LARK: definition}


def _form(given: Body) -> Json:
    text = given.nested("text", ("format", "verbosity"))
    if (verbosity := text.get("verbosity", "medium")) != "medium":
        given.ignore("text.verbosity", verbosity, optional.CHAT["verbosity"].advice)
    form = text.get("format")
    if form is None:
        return {}
    if not isinstance(form, Mapping):
        raise PromptError(f"text.format is {show(form)}; give an object with a type")
    check_repeated("text.format.name", form.get("name"))
    if form.get("type") == "json_schema":
        inner = {name: value for name, value in form.items() if name != "type"}
        return {"response_format": {"type": "json_schema", "json_schema": inner}}
    return {"response_format": dict(form)}


def _reasoning(given: Body, rules: Rules) -> Json:
    reasoning = given.nested("reasoning", ("effort", "summary", "generate_summary"))
    effort = reasoning.get("effort")
    if effort is not None:
        effort = choice(PromptError, _EFFORT, effort, EFFORTS)
    return {"chat_template_kwargs": effort_kwargs(given, rules, _EFFORT, effort) | template_kwargs(given, rules)}
