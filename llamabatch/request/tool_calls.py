"""ToolCall and ToolCallDelta: a call of a function that the model wrote, whole and as it comes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A call of one of the tools.

    Attributes:
        id: names the call in the message that answers it; the same for the same prompt, seed and place.
        name: of the function.
        arguments: JSON text of an object, as the model wrote it: a part of it where the output was cut, no JSON where
            the model erred.
    """

    id: str
    name: str
    arguments: str

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
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def to_openai(self) -> dict[str, Any]:
        """As in a chunk of OpenAI's API."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}
