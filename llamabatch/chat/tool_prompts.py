"""Describes tools in a message, for chat templates that have no place for tools."""

from __future__ import annotations

import json
from collections.abc import Sequence

from llamabatch.chat.messages import Message, Tools
from llamabatch.chat.tool_formats import ToolFormat, example


def described(messages: Sequence[Message], tools: Tools, tool_format: ToolFormat) -> list[list[Message]]:
    """Returns the messages with a description of the tools, in one or two versions.

    The description is added to the system message. Without a system message, the first version adds a new one. The
    second version, for templates that refuse a system message, adds the description to the first message.
    """
    text = description(tools, tool_format)
    first, rest = messages[0], list(messages[1:])
    with_text = {**first, "content": f"{text}\n\n{first['content'] or ''}"}
    if first["role"] == "system":
        return [[{**first, "content": f"{first['content'] or ''}\n\n{text}"}, *rest]]
    return [[{"role": "system", "content": text}, *messages], [with_text, *rest]]


def description(tools: Tools, tool_format: ToolFormat) -> str:
    """Returns a text that lists the functions with their schemas, and shows how to call one."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You may call these functions, each given with the JSON schema of its parameters:\n{functions}\n"
        f"To call one, answer with nothing but\n{example(tool_format)}"
    )
