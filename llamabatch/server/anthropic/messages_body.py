"""The body of /v1/messages and its reader, without HTTP. The body becomes a ChatBody: all checks of a chat apply."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from llamabatch.errors import PromptError
from llamabatch.request.media import IMAGE
from llamabatch.server.http.errors import ApiError
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
    null_as_empty,
    reads,
    string,
    text_in,
)
from llamabatch.server.request.chat_body import (
    EFFORTS,
    ChatBody,
    effort_kwargs,
    is_begun,
    read_as_chat,
    template_kwargs,
    thinking_kwargs,
)
from llamabatch.server.request.generation_fields import GENERATION
from llamabatch.server.request.media import content_of, media_part
from llamabatch.utils.checks import boolean, choice, integer, show

TIERS = {"auto": "auto", "standard_only": "default"}
_KNOWN = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
MIN_BUDGET = 1  # the smallest budget_tokens; Anthropic's own minimum is 1,024

_BLOCK: Json = {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}}
_CONTENT: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]}
_MESSAGE: Json = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _CONTENT},
}
_TOOL: Json = {
    "type": "object",
    "required": ["name", "input_schema"],
    "properties": {
        "name": {"type": "string"},
        "description": TEXT,
        "input_schema": {"type": "object"},
        "strict": BOOLEAN,
    },
}
_OWN: Fields = {
    "messages": Field({"type": "array", "items": _MESSAGE, "minItems": 1}, "the conversation"),
    "system": Field({"anyOf": [{"type": "null"}, *_CONTENT["anyOf"]]}, "the system prompt"),
    "stop_sequences": Field({"type": ["array", "null"], "items": {"type": "string"}}, "strings that end the text"),
    "tools": Field({"type": ["array", "null"], "items": _TOOL}, "functions that the model may call"),
    "tool_choice": Field(
        {
            "type": ["object", "null"],
            "properties": {
                "type": {"enum": ["auto", "any", "tool", "none"]},
                "name": {"type": "string"},
                "disable_parallel_tool_use": BOOLEAN,
            },
        },
        "whether and which tool is called",
    ),
    "thinking": Field(
        {
            "type": ["object", "null"],
            "properties": {
                "type": {"enum": ["enabled", "disabled", "adaptive"]},
                "budget_tokens": {"type": ["integer", "null"], "minimum": MIN_BUDGET},
            },
        },
        "whether the model thinks, and for how many tokens at most",
    ),
    "output_config": Field(OBJECT, "effort, and format: a JSON schema that the text follows"),
    "output_format": Field(OBJECT, "a JSON schema that the text follows"),
    "service_tier": Field({"enum": [*TIERS, None]}, "auto or standard_only"),
    "chat_template_kwargs": Field(OBJECT, "variables of the chat template"),
    "inference_geo": Field({}, "", ("not_available", "global"), "the text is made on this machine"),
    "cache_control": Field({}, "kept by other services; prefixes are cached without it"),
}

MESSAGES: Fields = {
    **{
        name: field
        for name, field in GENERATION.items()
        if name not in ("stop", "response_format", "stream_options", "n", "n_cmpl", "best_of", "logprobs")
    },
    **optional.MESSAGES,
    **_OWN,
}


@reads
def read_messages(body: Mapping[str, Any], rules: Rules = RULES, betas: Iterable[str] = ()) -> ChatBody:
    """Reads a ChatBody from a request body. Raises ApiError with the field, its value and the allowed values.

    Args:
        betas: the values of the header anthropic-beta.
    """
    given = Body(body, MESSAGES, rules)
    optional.ignore_betas(given, betas)
    messages = given.needed("messages", 'a list, as [{"role": "user", "content": "Hello"}]')
    if not isinstance(messages, list):
        raise PromptError(f"messages is {show(messages)}; give a list of messages")
    conversation = [*_system(given.take("system"), given)]
    asked = optional.behind(
        index
        for index, message in enumerate(messages)
        if isinstance(message, Mapping) and message.get("role") == "assistant"
    )
    for index, message in enumerate(messages):
        conversation += _messages(f"messages[{index}]", message, given, shown=index >= asked)
    config = given.nested("output_config", ("effort", "format"))
    chat: Json = {"messages": conversation, **_tools(given), **_form(given, config)}
    chat |= _thinking(given, rules, config.get("effort"))
    if (stops := given.take("stop_sequences")) is not None:
        if not isinstance(stops, list):
            raise PromptError(f"stop_sequences is {show(stops)}; give a list of texts")
        chat["stop"] = stops
    if (tier := given.choice("service_tier", TIERS)) is not None:
        chat["service_tier"] = TIERS[tier]
    given.take("cache_control")
    if is_begun(conversation):
        chat["continue_final_message"] = True
    names = {"stop": "stop_sequences", "response_format": "output_config.format"}
    return read_as_chat({**given.rest(), **chat}, rules, names, given.ignored)


def _system(system: object, given: Body) -> list[Json]:
    if system is None:
        return []
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else _blocks("system", system)
    texts = [_text_of(f"system[{number}]", block) for number, block in enumerate(blocks)]
    if texts:
        texts[0] = optional.without_service_line(given, texts[0])
    text = "\n".join(filter(None, texts))
    return [{"role": "system", "content": text}] if text else []


def _messages(place: str, message: object, given: Body, *, shown: bool) -> Iterator[Json]:
    """Yields the chat messages for one message of the body. In a chat, each tool result is a message of its own."""
    if not isinstance(message, Mapping):
        raise PromptError(f"{place} is {show(message)}; give an object with role and content")
    role = choice(PromptError, f"{place}.role", message.get("role"), ("user", "assistant", "system"))
    content = null_as_empty(message, "content")
    if isinstance(content, str) or role == "system":
        yield {"role": role, "content": content if isinstance(content, str) else _text(f"{place}.content", content)}
        return
    where = f"{place}.content"
    blocks = [*_own_blocks(where, _blocks(where, content), given, shown=shown)]
    yield from _of_assistant(blocks) if role == "assistant" else _of_user(blocks)


def _own_blocks(
    where: str, blocks: list[Mapping[str, Any]], given: Body, *, shown: bool
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the usable blocks for the chat, each with its path in the body.

    Blocks written by services are ignored and named in a header. Documents, search results and tool references become
    texts.

    Args:
        shown: True: the blocks are the caller's question, so unreadable media and blocks of unknown types are refused
            later. False: the blocks are history or the result of a tool. Programs send history again with each request,
            so unreadable media and unknown blocks become texts.
    """
    for number, block in enumerate(blocks):
        place, kind = f"{where}[{number}]", block["type"]
        if kind in optional.MESSAGES_BLOCKS:
            given.ignore_kind(place, kind, "only a service writes such blocks", "unsupported_content_part")
        elif kind == "tool_result" and isinstance(block.get("content"), list):
            inner = f"{place}.content"
            parts = [part for _, part in _own_blocks(inner, _blocks(inner, block["content"]), given, shown=False)]
            yield place, {**block, "content": parts}
        elif kind == "image" and IMAGE in given.reads:
            yield place, media_part(place, block, given)
        elif kind == "document" and (text := _text_of_document(place, block)) is not None:
            yield place, {"type": "text", "text": text}
        elif kind == "search_result":
            yield place, {"type": "text", "text": _text_of_search(place, block)}
        elif kind == "tool_reference":  # only the name becomes text, because the field `tools` has the tool
            yield place, {"type": "text", "text": string(f"{place}.tool_name", block.get("tool_name"))}
        elif not shown and kind not in _KNOWN:
            yield place, {"type": "text", "text": optional.media_text(given, place, kind)}
        else:
            yield place, block


def _text_of_document(place: str, block: Mapping[str, Any]) -> str | None:
    """Returns the title, context and text of a document; None: the document is not text."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in ("text", "content"):
        return None
    if kind == "text":
        text = string(f"{place}.source.data", source.get("data"))
    else:
        text = _text(f"{place}.source.content", source.get("content"))
    head = [string(f"{place}.{name}", block[name]) for name in ("title", "context") if block.get(name) is not None]
    return "\n".join((*head, text))


def _text_of_search(place: str, block: Mapping[str, Any]) -> str:
    """Returns the title, source and text of a search result."""
    head = [string(f"{place}.{name}", block[name]) for name in ("title", "source") if block.get(name) is not None]
    return "\n".join((*head, _text(f"{place}.content", block.get("content"))))


def _of_user(blocks: list[tuple[str, Mapping[str, Any]]]) -> Iterator[Json]:
    parts: list[str | Json] = []
    for where, block in blocks:
        if block["type"] == "tool_result":
            if parts:
                yield {"role": "user", "content": content_of(parts)}
                parts = []
            call = block.get("tool_use_id")
            if not isinstance(call, str) or not call:
                raise PromptError(f"{where}.tool_use_id is {show(call)}; give the id of a tool_use block")
            result = block.get("content")
            yield {"role": "tool", "tool_call_id": call, "content": "" if result is None else _result(where, result)}
        else:
            parts.append(_part_of(where, block))
    if parts or not blocks:
        yield {"role": "user", "content": content_of(parts)}


def _result(where: str, result: object) -> str | list[Json]:
    if isinstance(result, str):
        return result
    blocks = _blocks(f"{where}.content", result)
    return content_of([_part_of(f"{where}.content[{number}]", block) for number, block in enumerate(blocks)])


def _part_of(where: str, block: Mapping[str, Any]) -> str | Json:
    """Returns an image block unchanged, and any other block as a text."""
    return dict(block) if block["type"] == "image_url" else _text_of(where, block)


def _of_assistant(blocks: list[tuple[str, Mapping[str, Any]]]) -> Iterator[Json]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for where, block in blocks:
        if block["type"] == "thinking":
            thoughts.append(string(f"{where}.thinking", block.get("thinking")))
        elif block["type"] == "redacted_thinking":
            continue  # only the service that wrote the block can read it
        elif block["type"] == "tool_use":
            calls.append(_call(where, block))
        else:
            texts.append(_text_of(where, block))
    message: Json = {"role": "assistant", "content": "\n".join(texts) or (None if calls or thoughts else "")}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    yield message


def _call(where: str, block: Mapping[str, Any]) -> Json:
    name, arguments = string(f"{where}.name", block.get("name")), block.get("input")
    if not isinstance(arguments, (Mapping, str, type(None))):
        raise PromptError(f"{where}.input is {show(arguments)}; give an object")
    # After a call that was cut off, a client sends the incomplete JSON of the arguments as a text.
    text = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments or ""
    function = {"name": name, "arguments": text}
    return {"id": string(f"{where}.id", block.get("id")), "type": "function", "function": function}


def _blocks(where: str, content: object) -> list[Mapping[str, Any]]:
    if not isinstance(content, list):
        raise PromptError(f"{where} is {show(content)}; give a text or a list of blocks")
    for number, block in enumerate(content):
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise PromptError(f'{where}[{number}] is {show(block)}; give a block, as {{"type": "text", "text": "Hi"}}')
    return content


def _text(where: str, content: object) -> str:
    """Returns a text, or the joined texts of a list of blocks."""
    if isinstance(content, str):
        return content
    blocks = _blocks(where, content)
    return "\n".join(_text_of(f"{where}[{number}]", block) for number, block in enumerate(blocks))


def _text_of(where: str, block: Mapping[str, Any]) -> str:
    """Returns the text of a text block. Raises ApiError for a block of another type."""
    if block["type"] != "text":
        raise ApiError(
            400,
            f"{where} is a block of type {show(block['type'])}, which is not supported; give blocks of text",
            code="unsupported_content_part",
            param="messages",
        )
    return text_in(where, block)


def _tools(given: Body) -> Json:
    """Returns tools, tool_choice and parallel_tool_calls as fields of a chat."""
    found: Json = {}
    tools = given.take("tools")
    if tools is not None:
        if not isinstance(tools, list):
            raise PromptError(f"tools is {show(tools)}; give a list of tools")
        found["tools"] = [_tool(place, tool) for place, tool in optional.own_tools(given, tools, ("custom",))]
    chosen = given.nested("tool_choice", ("type", "name", "disable_parallel_tool_use"))
    if not chosen:
        return found
    kind = choice(PromptError, "tool_choice.type", chosen.get("type"), ("auto", "any", "tool", "none"))
    if kind == "tool":
        name = string("tool_choice.name", chosen.get("name"))
        found["tool_choice"] = {"type": "function", "function": {"name": name}}
    else:
        found["tool_choice"] = {"any": "required"}.get(kind, kind)
    if boolean(PromptError, "tool_choice.disable_parallel_tool_use", chosen.get("disable_parallel_tool_use", False)):
        found["parallel_tool_calls"] = False
    return found


def _tool(where: str, tool: object) -> Json:
    if not isinstance(tool, Mapping):
        raise PromptError(f"{where} is {show(tool)}; give an object with name and input_schema")
    if tool.get("type", "custom") not in ("custom", None):
        raise PromptError(f"{where}.type is {show(tool['type'])}; give a text, or leave it out")
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        raise PromptError(f"{where}.input_schema is {show(schema)}; give a JSON schema")
    function: Json = {"name": tool.get("name"), "parameters": schema}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _thinking(given: Body, rules: Rules, effort: object) -> Json:
    """Returns chat fields that turn thinking on or off and limit the thinking tokens. Values without effect are ignored
    and named in a header."""
    kwargs, found = {}, {}
    if effort is not None:
        known = choice(PromptError, "output_config.effort", effort, (*EFFORTS[1:], "max"))
        kwargs = effort_kwargs(given, rules, "output_config.effort", "xhigh" if known == "max" else known)
    thinking = given.nested("thinking", ("type", "budget_tokens", "display"))
    if thinking:
        kind = choice(PromptError, "thinking.type", thinking.get("type"), ("enabled", "disabled", "adaptive"))
        if kind != "adaptive":
            kwargs |= thinking_kwargs(given, rules, "thinking", kind)
        budget = thinking.get("budget_tokens")
        if kind == "enabled" and budget is not None:
            budget = integer(PromptError, "thinking.budget_tokens", budget, MIN_BUDGET, 2**31 - 1)
            if rules.thinks:
                found["thinking_token_budget"] = budget
            elif "thinking" not in given.ignored:
                given.ignore("thinking.budget_tokens", budget, "the thinking tags of this model are not known")
    return found | {"chat_template_kwargs": kwargs | template_kwargs(given, rules)}


def _form(given: Body, config: Json) -> Json:
    """Returns the response_format of a chat. `config` is the output_config of the body."""
    name, format_ = "output_format", given.take("output_format")
    if config.get("format") is not None:
        if format_ is not None:
            raise PromptError("output_format and output_config.format are both given; leave output_format out")
        name, format_ = "output_config.format", config["format"]
    if format_ is None:
        return {}
    if not isinstance(format_, Mapping) or format_.get("type") != "json_schema":
        raise PromptError(f'{name} is {show(format_)}; give {{"type": "json_schema", "schema": …}}')
    named = {"name": "output", "schema": format_.get("schema")}
    return {"response_format": {"type": "json_schema", "json_schema": named}}
