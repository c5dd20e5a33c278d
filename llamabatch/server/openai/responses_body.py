"""The body of /v1/responses, read without HTTP: it becomes that of a chat, whose checks hold for it, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llamabatch.errors import PromptError
from llamabatch.server.bodies import RULES, Body, Field, Fields, Json, Rules, reads
from llamabatch.server.errors import ApiError
from llamabatch.server.openai.chat_body import EFFORTS, ChatBody, effort_kwargs, read_chat, template_kwargs
from llamabatch.server.openai.generation import GENERATION
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
_STATELESS = "this server keeps no responses; send the items before as input"
_OWN: Fields = {
    "input": Field(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM, "minItems": 1}]}, "a text, or the items so far"
    ),
    "instructions": Field(_TEXT, "the system prompt"),
    "max_output_tokens": Field({"type": ["integer", "null"], "minimum": 1}, "tokens to generate at most"),
    "tools": Field({"type": ["array", "null"], "items": _TOOL}, "functions that the model may call"),
    "tool_choice": Field({}, 'auto, none, required, or {"type": "function", "name": …}'),
    "parallel_tool_calls": Field(_BOOLEAN, "more than one call may come"),
    "max_tool_calls": Field({"type": ["integer", "null"]}, "of tools that a service runs, which are not there"),
    "text": Field({"type": ["object", "null"]}, "format: text, json_object or json_schema"),
    "reasoning": Field({"type": ["object", "null"]}, "effort: a variable of the chat template"),
    "include": Field({"type": ["array", "null"], "items": {"enum": [*_INCLUDED]}}, "logprobs of the text"),
    "top_logprobs": Field({"type": ["integer", "null"], "minimum": 0, "maximum": 1024}, "so many at each place"),
    "truncation": Field({"enum": ["auto", "disabled", None]}, "auto: an input that is too long loses its beginning"),
    "store": Field(_BOOLEAN, "without effect: nothing is kept"),
    "stream_options": Field({"type": ["object", "null"]}, "without effect"),
    "previous_response_id": Field({}, "", (), _STATELESS),
    "conversation": Field({}, "", (), _STATELESS),
    "background": Field({}, "", (False,), "give service_tier flex, or use /v1/batches"),
    "prompt": Field({}, "", (), "there are no stored prompts; give instructions and input"),
    "context_management": Field({}, "", ([],), _STATELESS),
    "chat_template_kwargs": Field({"type": ["object", "null"]}, "variables of the chat template"),
}
_NOT_HERE = ("n", "n_cmpl", "best_of", "logprobs", "response_format", "background")

RESPONSES: Fields = {**{name: each for name, each in GENERATION.items() if name not in _NOT_HERE}, **_OWN}

# Fields that the response repeats, with the values that it has where the body has none.
_REPEATED: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
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
    """A response as asked for.

    Attributes:
        chat: the same as a chat.
        repeated: fields of the response that say what was asked for.
        logprobs: the text has them.
    """

    chat: ChatBody
    repeated: Json = field(default_factory=dict)
    logprobs: bool = False


@reads
def read_responses(body: Mapping[str, Any], rules: Rules = RULES) -> ResponsesBody:
    """The ResponsesBody of a body. Raises ApiError, whose message names the field, its value and the allowed ones."""
    given = Body(body, RESPONSES, rules)
    items = given.needed("input", "a text, or a list of items")
    instructions = given.text("instructions")
    messages: list[Json] = [] if instructions is None else [{"role": "system", "content": instructions}]
    messages += _conversation(items)
    included = _included(given.take("include"))
    top = given.integer("top_logprobs", 0, 1024)
    chat: Json = {"messages": messages, **_tools(given), **_form(given), **_reasoning(given, rules)}
    wants_logprobs = LOGPROBS in included or bool(top)
    if wants_logprobs:
        chat |= {"logprobs": True, "top_logprobs": top or 0}
    if (most := given.integer("max_output_tokens", 1, 2**31 - 1)) is not None:
        chat["max_tokens"] = most
    if given.choice("truncation", ("auto", "disabled")) == "auto":
        chat["overflow"] = "truncate"
    for name in ("store", "stream_options", "max_tool_calls"):
        given.take(name)
    ignored = tuple(given.ignored)
    read = read_chat({**given.rest(), **chat}, rules)
    if ignored:
        read = replace(read, ignored=(*ignored, *read.ignored))
    return ResponsesBody(read, _repeated(body, read), wants_logprobs)


def _repeated(body: Mapping[str, Any], chat: ChatBody) -> Json:
    found = {name: usual if body.get(name) is None else body[name] for name, usual in _REPEATED.items()}
    text, reasoning = body.get("text") or {}, body.get("reasoning") or {}
    found["text"] = {"format": text.get("format") or {"type": "text"}}
    effort = None if _EFFORT in chat.ignored else reasoning.get("effort")
    found["reasoning"] = {"effort": effort, "summary": None}
    if isinstance(found["tools"], list):  # each with all of a tool's fields, as clients that check types expect
        found["tools"] = [{"description": None, "parameters": None, "strict": False} | tool for tool in found["tools"]]
    params = chat.params
    found["temperature"], found["top_p"] = params.temperature, params.top_p
    found["frequency_penalty"], found["presence_penalty"] = params.frequency_penalty, params.presence_penalty
    return found


def _included(given: object) -> list[str]:
    if given is None:
        return []
    if not isinstance(given, list):
        raise PromptError(f"include is {show(given)}; give a list of names")
    return [choice(PromptError, "include", name, _INCLUDED) for name in given]


def _conversation(items: object) -> list[Json]:
    """The messages of a chat: of an answer all items together are one message there."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise PromptError(f"input is {show(items)}; give a text, or a list of items")
    messages: list[Json] = []
    for index, item in enumerate(items):
        _add(f"input[{index}]", item, messages)
    return messages


def _add(place: str, item: object, messages: list[Json]) -> None:
    if not isinstance(item, Mapping):
        raise PromptError(f'{place} is {show(item)}; give an item, as {{"role": "user", "content": "Hello"}}')
    kind = item.get("type", "message")
    if kind == "message":
        role = choice(PromptError, f"{place}.role", item.get("role"), _ROLES)
        text = _text(f"{place}.content", item.get("content"))
        answer = _answer(messages, before="content") if role == "assistant" else None
        if answer is None:
            messages.append({"role": role, "content": text})
        else:
            answer["content"] = text
    elif kind == "function_call":
        function = {name: _string(f"{place}.{name}", item.get(name)) for name in ("name", "arguments")}
        call = {"id": _string(f"{place}.call_id", item.get("call_id")), "type": "function", "function": function}
        answer = _answer(messages, before="more")
        if answer is None:
            answer = {"role": "assistant", "content": None}
            messages.append(answer)
        answer.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        call_id = _string(f"{place}.call_id", item.get("call_id"))
        messages.append(
            {"role": "tool", "tool_call_id": call_id, "content": _text(f"{place}.output", item.get("output"))}
        )
    elif kind == "reasoning":
        if thoughts := _thoughts(place, item):
            messages.append({"role": "assistant", "content": None, "reasoning_content": thoughts})
    else:
        raise ApiError(
            400,
            f"{place} is of type {show(kind)}, which is not supported; known are message, function_call, "
            "function_call_output and reasoning",
            code="unsupported_item",
            param="input",
        )


def _answer(messages: list[Json], before: str) -> Json | None:
    """The message of the answer that an item goes on with; None: a new one begins.

    Args:
        before: "content": a message without text and calls; "more": any.
    """
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant":
        return None
    if before == "content" and (last["content"] is not None or "tool_calls" in last):
        return None
    return last


def _thoughts(place: str, item: Mapping[str, Any]) -> str:
    """The thinking of a reasoning item; its summary where it has no other text."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise PromptError(f"{place}.{name} is {show(parts)}; give a list")
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
        if texts:
            return "\n".join(_string(f"{place}.{name}.text", text) for text in texts)
    return ""


def _text(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PromptError(f"{where} is {show(content)}; give a text, or a list of parts")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "refusal":
            texts.append(_string(f"{where}[{number}].refusal", part.get("refusal")))
        elif kind in _TEXTS:
            texts.append(_string(f"{where}[{number}].text", part.get("text")))
        else:
            raise ApiError(
                400,
                f"{where}[{number}] is {show(part if kind is None else kind)}, which is not supported; "
                "give parts of type input_text",
                code="unsupported_content_part",
                param="input",
            )
    return "".join(texts)


def _string(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise PromptError(f"{where} is {show(value)}; give a text")
    return value


def _tools(given: Body) -> Json:
    found: Json = {}
    tools, chosen = given.take("tools"), given.take("tool_choice")
    if tools is not None:
        if not isinstance(tools, list):
            raise PromptError(f"tools is {show(tools)}; give a list of tools")
        found["tools"] = [_tool(f"tools[{number}]", tool) for number, tool in enumerate(tools)]
    if isinstance(chosen, Mapping):
        if chosen.get("type") != "function":
            raise PromptError(f'tool_choice is {show(chosen)}; give {{"type": "function", "name": …}}')
        chosen = {"type": "function", "function": {"name": chosen.get("name")}}
    if chosen is not None:
        found["tool_choice"] = chosen
    if (parallel := given.take("parallel_tool_calls")) is not None:
        found["parallel_tool_calls"] = parallel
    return found


def _tool(where: str, tool: object) -> Json:
    if not isinstance(tool, Mapping):
        raise PromptError(f"{where} is {show(tool)}; give an object of type function")
    if tool.get("type") != "function":
        raise ApiError(
            400,
            f"{where} is of type {show(tool.get('type'))}; tools that a service runs are not there, only those of type "
            "function",
            code="unsupported_tool",
            param="tools",
        )
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _form(given: Body) -> Json:
    text = given.nested("text", ("format", "verbosity"))
    found: Json = {} if text.get("verbosity") is None else {"verbosity": text["verbosity"]}
    asked = text.get("format")
    if asked is None:
        return found
    if not isinstance(asked, Mapping):
        raise PromptError(f"text.format is {show(asked)}; give an object with a type")
    if asked.get("type") == "json_schema":
        inner = {name: value for name, value in asked.items() if name != "type"}
        return found | {"response_format": {"type": "json_schema", "json_schema": inner}}
    return found | {"response_format": dict(asked)}


def _reasoning(given: Body, rules: Rules) -> Json:
    asked = given.nested("reasoning", ("effort", "summary", "generate_summary"))
    effort = asked.get("effort")
    if effort is not None:
        effort = choice(PromptError, _EFFORT, effort, EFFORTS)
    return {"chat_template_kwargs": effort_kwargs(given, rules, _EFFORT, effort) | template_kwargs(given)}
