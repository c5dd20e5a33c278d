"""Items of /v1/responses: converts the items of an input and of earlier responses to messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from llamabatch.chat.messages import media_kind
from llamabatch.errors import PromptError
from llamabatch.server.http.errors import ApiError
from llamabatch.server.openai.kept_responses import Kept, response_of
from llamabatch.server.request import optional
from llamabatch.server.request.body import Body, Json, null_as_empty, string, text_in
from llamabatch.server.request.media import content_of, media_part
from llamabatch.server.request.namespaces import offered
from llamabatch.utils.checks import choice, show

Find = Callable[[str], Kept | None]  # finds a stored response by its id
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")
_MEDIA = ("input_image", "input_file", "input_audio")
_CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}  # type of call -> the field with the arguments

ITEM: Json = {"type": "object", "properties": {"type": {"type": "string"}, "role": {"enum": [*_ROLES]}}}
_NOT_KEPT = (
    'which is not stored: a response with "store": false is never stored, a restart drops all responses, and new ones '
    "replace the oldest (--max-responses-bytes); send the items themselves "
    "(AI SDK: providerOptions: {openai: {store: false}})"
)


def items_before(previous: str | None, find: Find) -> Iterable[Any]:
    """Returns the items of the previous response and of all responses before that. Raises ApiError."""
    if previous is None:
        return ()
    if (kept := find(previous)) is None:
        message = f"previous_response_id is {show(previous)}, {_NOT_KEPT}"
        raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
    return kept.conversation


def items_of(sent: object, find: Find) -> Iterator[Any]:
    """Yields the items of an input. In place of each item_reference, yields the stored item."""
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


def conversation(items: list[Any], given: Body, n_before: int) -> list[Json]:
    """Returns the items as messages of a chat. Items of thinking, text and calls, in this order, become one message.

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
        text = _content(f"{place}.content", null_as_empty(item, "content"), given, shown=shown)
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
        output = _content(f"{place}.output", null_as_empty(item, "output"), given, shown=False)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    elif kind == "reasoning":
        if thoughts := _thoughts(place, item):
            messages.append({"role": "assistant", "content": None, "reasoning_content": thoughts})
    elif isinstance(kind, str) and kind in optional.RESPONSES_ITEMS:
        given.ignore_kind(place, kind, "such items are for a service and its tools", "unsupported_item")
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
        before: the kind of the next item, "content" for a text or "more" for a call. A text continues a message only if
            the message has neither text nor calls. A call continues any assistant message.
    """
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant":
        return None
    if before == "content" and (last["content"] is not None or "tool_calls" in last):
        return None
    return last


def _thoughts(place: str, item: Mapping[str, Any]) -> str:
    """Returns the thinking of a reasoning item, or its summary if the item has no thinking."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise PromptError(f"{place}.{name} is {show(parts)}; give a list")
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
        if texts:
            return "\n".join(string(f"{place}.{name}.text", text) for text in texts)
    return ""


def _content(where: str, content: object, given: Body, *, shown: bool) -> str | list[Json]:
    """Returns content as text, or as parts if it has readable media.

    Args:
        shown: True: the content is the caller's question, so unreadable media are refused. False: the content is
            history or the result of a tool. Programs send history again with each request, so unreadable media become
            texts.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PromptError(f"{where} is {show(content)}; give a text, or a list of parts")
    parts: list[str | Json] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "refusal":
            parts.append(text_in(f"{where}[{number}]", part, "refusal"))
        elif kind in _TEXTS:
            parts.append(text_in(f"{where}[{number}]", part))
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
