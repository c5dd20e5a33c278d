"""Fields, tools and history items without effect on the answer. They ask or allow a service to do something else.

All these parts of a body are ignored and named in a header, or refused if the server is strict. A field with an effect
on the answer is declared without `optional`, so its unsupported values are always refused."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from llamabatch.config.other_servers import SETTINGS
from llamabatch.server.request.body import Body, Field, Fields

BETA_HEADER = "anthropic-beta"
# Some programs put this line before the system prompt, for a service. The line contains a number that changes with each
# request. If the line stayed, the prefix cache would never match.
_FOR_A_SERVICE = re.compile(r"(x-anthropic-billing-header):[^\n]*\n*")


def _allows(advice: str, *usual: object) -> Field:
    """Returns a field without effect. A header names the field if its value is not one of `usual`."""
    return Field({}, f"without effect: {advice}", usual, advice, optional=True)


def _settings(*names: str) -> Fields:
    """Returns the fields `names`, made from SETTINGS. Flags of the command line use the same SETTINGS."""
    return {
        name: _allows(each.advice, *each.usual) if each.optional else Field({}, "", each.usual, each.advice)
        for name, each in SETTINGS.items()
        if name in names
    }


_NO_EDITS = "the messages of a body are read as they are"

_ONLY_CHATS = ("mm_processor_kwargs", "media_io_kwargs")

GENERATION: Fields = {
    **_settings(*(name for name in SETTINGS if name not in _ONLY_CHATS)),
    "n_indent": _allows("the output may have any indentation", 0),
    "response_fields": _allows("the answer is whole; /completion has it", []),
}
CHAT: Fields = {
    **_settings(*_ONLY_CHATS),
    "prediction": _allows("speculation is an option of the server"),
    "verbosity": _allows("ask for it in a message", "medium"),
    "web_search_options": _allows("there is no search"),
}
RESPONSES: Fields = {"context_management": _allows(_NO_EDITS, [])}
MESSAGES: Fields = {
    "context_management": _allows(_NO_EDITS, {}, {"edits": []}),
    "container": _allows("there are no containers"),
    "mcp_servers": _allows("call tools from your program", []),
}

# Items and blocks about tools and contexts of a service. Other models do not read them.
RESPONSES_ITEMS = frozenset(
    (
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("tool_search_call", "tool_search_output", "local_shell_call", "local_shell_call_output"),
        *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output"),
        *("computer_call", "computer_call_output", "ghost_snapshot"),
        *("compaction", "compaction_summary", "compaction_trigger", "context_compaction"),
        *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
    )
)
MESSAGES_BLOCKS = frozenset(
    (
        *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "tool_search_tool_result"),
        *("code_execution_tool_result", "bash_code_execution_tool_result", "container_upload"),
        *("text_editor_code_execution_tool_result", "mcp_tool_use", "mcp_tool_result"),
    )
)


def own_tools(
    given: Body, tools: Iterable[Any], kinds: Container[str], where: str = "tools"
) -> Iterator[tuple[str, Any]]:
    """Yields the caller's own tools, each with its path. Tools of other types belong to services that this server does
    not have. They are ignored and named in a header. Raises ApiError if the server is strict.

    Args:
        kinds: types of the caller's own tools.
        where: the path of the list, for the header and error messages.
    """
    for number, tool in enumerate(tools):
        place, kind = f"{where}[{number}]", tool.get("type") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and kind not in kinds:
            why = "tools that a service runs are not there, only functions of your own"
            given.ignore_kind(place, kind, why, "unsupported_tool")
        else:
            yield place, tool


def ignore_betas(given: Body, headers: Iterable[str]) -> None:
    """Ignores all requested betas, and names them in a header. The fields of this server need no betas.

    Args:
        headers: values of BETA_HEADER.

    Raises:
        ApiError: the server is strict.
    """
    for name in (each.strip() for header in headers for each in header.split(",")):
        if name:
            given.ignore(f"{BETA_HEADER}:{name}", name, "no field needs a beta here")


def without_service_line(given: Body, text: str) -> str:
    """Returns a system prompt without its first line if this line is for a service. A header names the removed line.
    Raises ApiError if the server is strict."""
    line = _FOR_A_SERVICE.match(text)
    if line is None:
        return text
    given.ignore(f"system[0]:{line[1]}", line[0].rstrip(), "it is for a service, and no part of the prompt")
    return text[line.end() :]


def behind(answers: Iterable[int]) -> int:
    """Returns the index after the last answer of a history. The caller's question begins at this index.

    Args:
        answers: indexes of the model's answers, in any order.
    """
    return max(answers, default=-1) + 1


def media_text(given: Body, place: str, kind: str) -> str:
    """Returns a replacement text for an image or audio in the history. A header names the image or audio. Raises
    ApiError if the server is strict."""
    given.ignore_kind(place, kind, "messages are text", "unsupported_content_part")
    return f"[{kind}: not shown, as this model reads text alone]"
