"""Tools in prompts whose chat template has no place for them: described in a message, calls and answers as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llamabatch.chat.tool_formats import ToolFormat, example, written

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


def as_text(messages: Sequence[Message], source: str) -> list[Message]:
    """The messages with calls in their text, and answers of tools as a user's, where a template knows neither.

    Args:
        source: of the template.
    """
    tool_format = ToolFormat.of(source)
    made: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls and "tool_calls" not in source:
            parts = [message["content"] or "", written(tool_format, [_named(call) for call in calls])]
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            made.append({**kept, "content": "\n".join(filter(None, parts))})
        elif message["role"] == "tool" and "tool" not in source:
            made.append({**message, "role": "user", "content": f"The function returned: {message['content'] or ''}"})
        else:
            made.append(message)
    return made


def _named(call: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    function = call["function"]
    return str(function.get("name")), function.get("arguments") or {}


def described(messages: Sequence[Message], tools: Tools, source: str) -> list[list[Message]]:
    """The messages with a description of the tools: in the system message; and, for templates that refuse one, in the
    first message."""
    text = description(tools, ToolFormat.of(source))
    first, rest = messages[0], list(messages[1:])
    with_text = {**first, "content": f"{text}\n\n{first['content'] or ''}"}
    if first["role"] == "system":
        return [[{**first, "content": f"{first['content'] or ''}\n\n{text}"}, *rest]]
    return [[{"role": "system", "content": text}, *messages], [with_text, *rest]]


def description(tools: Tools, tool_format: ToolFormat) -> str:
    """The functions with their schemas, and how to call one."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You may call these functions, each given with the JSON schema of its parameters:\n{functions}\n"
        f"To call one, answer with nothing but\n{example(tool_format)}"
    )
