"""ToolCall: a whole call of a function that the model wrote. ToolCallDelta: a part of a call."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

NO_OBJECT = "INVALID_JSON"  # key that Anthropic's programs use for a text that is not a JSON object


def object_of(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call by name; {} for an empty text. For a text that is not a JSON object (a cut text,
    for example), returns {NO_OBJECT: the text}. Line breaks within a string are accepted."""
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
        id: the message with the call's result repeats this id. Equal prompt, seed and place give an equal id.
        name: name of the function.
        arguments: JSON text of an object, as the model wrote it; incomplete if the output was cut, invalid if the model
            made an error.
        text_offset: number of characters of the answer's text before the call; None: the whole text is before the call.
            Ignored in comparisons.
    """

    id: str
    name: str
    arguments: str
    text_offset: int | None = field(default=None, compare=False)

    @property
    def parsed(self) -> dict[str, Any] | None:
        """The arguments by name; None: `arguments` is not a JSON object, because it was cut or the model erred."""
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    def to_openai(self) -> dict[str, Any]:
        """Returns the call as in a message of OpenAI's API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ToolCallDelta:
    """The part of a call that one step produces.

    Attributes:
        index: position among the calls of the continuation (from 0).
        id, name: id and name of the call in its first delta; None in later deltas.
        arguments: the new JSON text. The joined texts of all deltas are the `arguments` of the call.
        text_offset: in the first delta, the text_offset of the call.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    text_offset: int | None = field(default=None, compare=False)

    def to_openai(self) -> dict[str, Any]:
        """Returns the part as in a chunk of OpenAI's API."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


AnyCall = TypeVar("AnyCall", ToolCall, ToolCallDelta)


def in_order(text: str, calls: Iterable[AnyCall], start: int = 0) -> Iterator[str | AnyCall]:
    """Yields text and calls in the order of the model's output. Skips empty text.

    Args:
        text: the text of the answer, or of a piece of the answer.
        calls: the calls in order. A delta that continues a call comes before any later text of its piece.
        start: number of characters of the answer's text before this piece.
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
