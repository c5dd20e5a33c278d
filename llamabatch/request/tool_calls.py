"""ToolCall and ToolCallDelta: a call of a function that the model wrote, whole and as it comes, and its place."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

NO_OBJECT = "INVALID_JSON"  # the name that Anthropic's programs have for such a text


def object_of(arguments: str) -> dict[str, Any]:
    """The arguments of a call by name: none in an empty text; a text that is no JSON object, as of a call that was cut,
    is the value of NO_OBJECT. Line breaks within a string are read, too."""
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {NO_OBJECT: arguments}


@dataclass(frozen=True)
class ToolCall:
    """A call of one of the tools.

    Attributes:
        id: names the call in the message that answers it; the same for the same prompt, seed and place.
        name: of the function.
        arguments: JSON text of an object, as the model wrote it: a part of it where the output was cut, no JSON where
            the model erred.
        text_offset: characters of the answer's text before the call; None: all of them. Calls are equal without it.
    """

    id: str
    name: str
    arguments: str
    text_offset: int | None = field(default=None, compare=False)

    @property
    def parsed(self) -> dict[str, Any] | None:
        """The arguments by name; None: `arguments` is no JSON object, since it was cut or the model erred."""
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    def to_openai(self) -> dict[str, Any]:
        """As in a message of OpenAI's API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ToolCallDelta:
    """The part of a call that one step brings.

    Attributes:
        index: number of the call among those of its continuation.
        id, name: of the call, in its first delta; None in the others.
        arguments: the JSON text that is new. All of a call joined are its `arguments`.
        text_offset: in the first delta, as that of the call.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    text_offset: int | None = field(default=None, compare=False)

    def to_openai(self) -> dict[str, Any]:
        """As in a chunk of OpenAI's API."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


AnyCall = TypeVar("AnyCall", ToolCall, ToolCallDelta)


def in_order(text: str, calls: Iterable[AnyCall], start: int = 0) -> Iterator[str | AnyCall]:
    """Text and calls as the model wrote them: each call between the text before it and the text behind it.

    Args:
        text: of the answer, or of a piece of it; no part of it is given empty.
        calls: in their order; a delta that goes on with a call stands before any text of its piece that follows.
        start: characters of the answer's text before this piece.
    """
    at = 0
    for call in calls:
        if isinstance(call, ToolCall) or call.id is not None:
            cut = len(text) if call.text_offset is None else call.text_offset - start
            if cut > at:
                yield text[at:cut]
                at = cut
        yield call
    if at < len(text):
        yield text[at:]
