"""The body of /v1/responses and its reader, without HTTP. The body becomes a ChatBody: all checks of a chat apply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llamabatch.errors import PromptError
from llamabatch.server.batches.records import metadata_of
from llamabatch.server.openai.responses_items import ITEM, Find, conversation, items_before, items_of
from llamabatch.server.openai.responses_tools import TOOLS, known, read_tools, repeated_tools
from llamabatch.server.request import optional
from llamabatch.server.request.body import (
    BOOLEAN,
    OBJECT,
    RULES,
    TEXT,
    Body,
    Field,
    Fields,
    Json,
    Rules,
    check_repeated,
    reads,
)
from llamabatch.server.request.chat_body import EFFORTS, ChatBody, effort_kwargs, read_as_chat, template_kwargs
from llamabatch.server.request.generation_fields import GENERATION
from llamabatch.server.request.namespaces import Namespaced
from llamabatch.utils.checks import choice, show

LOGPROBS = "message.output_text.logprobs"
_EFFORT = "reasoning.effort"
_INCLUDED = (
    *(LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
    *("web_search_call.action.sources", "message.input_image.image_url"),
    *("computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)

_FORMAT = ("type", "name", "schema", "strict")
_OWN: Fields = {
    "input": Field(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": ITEM, "minItems": 1}]}, "a text, or the items so far"
    ),
    "instructions": Field(TEXT, "the system prompt"),
    "max_output_tokens": Field({"type": ["integer", "null"], "minimum": 1}, "tokens to generate at most"),
    "tools": Field(TOOLS, "functions, custom tools and namespaces of both; tools of other types are ignored"),
    "tool_choice": Field({}, 'auto, none, required, or {"type": "function", "name": …}'),
    "parallel_tool_calls": Field(BOOLEAN, "more than one call may come"),
    "max_tool_calls": Field({"type": ["integer", "null"]}, "limit for built-in tools, which this server does not have"),
    "text": Field(OBJECT, "format: text, json_object or json_schema"),
    "reasoning": Field(OBJECT, "effort: a variable of the chat template"),
    "include": Field({"type": ["array", "null"], "items": {"enum": [*_INCLUDED]}}, "logprobs of the text"),
    "top_logprobs": Field({"type": ["integer", "null"], "minimum": 0, "maximum": 1024}, "likeliest tokens a position"),
    "truncation": Field({"enum": ["auto", "disabled", None]}, "auto: an input that is too long loses its oldest turns"),
    "store": Field(BOOLEAN, "false: the response is not kept for a next one"),
    "stream_options": Field(OBJECT, "without effect"),
    "previous_response_id": Field(TEXT, "the response to continue, with all items before it"),
    "conversation": Field({}, "", (), "there are no stored conversations; give previous_response_id, or all items"),
    "background": Field({}, "", (False,), "give service_tier flex, or use /v1/batches"),
    "prompt": Field({}, "", (), "there are no stored prompts; give instructions and input"),
    "chat_template_kwargs": Field(OBJECT, "variables of the chat template"),
}
_NOT_HERE = ("n", "n_cmpl", "best_of", "logprobs", "response_format", "background")

RESPONSES: Fields = {
    **{name: each for name, each in GENERATION.items() if name not in _NOT_HERE},
    **optional.RESPONSES,
    **_OWN,
}

# Some fields of the body are repeated in the response. These are their names and defaults.
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
        repeated: fields of the request, to be repeated in the response.
        logprobs: the text of the response has logprobs.
        namespaced: the functions in namespaces. Keys: full names, as the model knows them. Values: (namespace, plain
            name).
        custom: the names of custom tools. The model sees a custom tool as a function with one text as its argument.
        items: the items of earlier responses and of the input, to be stored; None: the response is not stored.
    """

    chat: ChatBody
    repeated: Json = field(default_factory=dict)
    logprobs: bool = False
    namespaced: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    custom: frozenset[str] = frozenset()
    items: tuple[Any, ...] | None = None

    def called(self, name: str) -> Json:
        """Returns the plain name of the called function, and its namespace if any, as fields of an output item.

        Args:
            name: the full name of the function, as the model knows it.
        """
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
    items = [*items_before(given.text("previous_response_id"), find), *items_of(sent, find)]
    messages += conversation(items, given, n_before=len(items) - (len(sent) if isinstance(sent, list) else 1))
    keeps = given.boolean("store", True) and can_keep(items)
    included = _included(given)
    top = given.integer("top_logprobs", 0, 1024)
    namespaced: Namespaced = {}
    custom: set[str] = set()
    tools = read_tools(given, namespaced, custom)
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
    names = {"messages": "input", "response_format": "text.format"}
    read = read_as_chat({**given.rest(), **chat}, rules, names, given.ignored)
    repeated = _repeated(body, read) | {"store": keeps}
    kept = tuple(items) if keeps else None
    return ResponsesBody(read, repeated, wants_logprobs, namespaced, frozenset(custom), kept)


def _repeated(body: Mapping[str, Any], chat: ChatBody) -> Json:
    found = {name: usual if body.get(name) is None else body[name] for name, usual in _REPEATED.items()}
    text, reasoning = body.get("text") or {}, body.get("reasoning") or {}
    found["text"] = {"format": known(text.get("format") or {"type": "text"}, _FORMAT)}
    effort = None if _EFFORT in chat.ignored else reasoning.get("effort")
    found["reasoning"] = {"effort": effort, "summary": None}
    found["tools"] = repeated_tools(found["tools"])
    if isinstance(found["tool_choice"], Mapping):
        found["tool_choice"] = known(found["tool_choice"], ("type", "name", "namespace"))
    params = chat.params
    found["temperature"], found["top_p"] = params.temperature, params.top_p
    found["frequency_penalty"], found["presence_penalty"] = params.frequency_penalty, params.presence_penalty
    return found


def _included(given: Body) -> list[str]:
    names = given.take("include") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise PromptError(f"include is {show(names)}; give a list of names")
    for number, name in enumerate(names):
        if name not in _INCLUDED:
            given.ignore(f"include[{number}]:{name}", name, f"known are {', '.join(_INCLUDED)}")
    return names


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
