"""Delta: the thinking, answer and tool calls in a piece of text. TextParser: the protocol of parsers that find these
parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llamabatch.request.tool_calls import ToolCallDelta


@dataclass(frozen=True)
class Delta:
    """The parts of a piece of generated text.

    Attributes:
        reasoning: text of the thinking.
        text: answer text, without thinking and tool calls.
        tool_calls: parts of tool calls.
    """

    reasoning: str = ""
    text: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class TextParser(Protocol):
    """Splits text that arrives in pieces into thinking, answer and tool calls. The joined deltas do not depend on the
    size of the pieces. The parser holds back text that may be the start of a tag, so no delta has a part of a tag."""

    def feed(self, text: str) -> Delta:
        """Parses the next piece of text. Returns the parts that are complete."""

    def finish(self, text: str = "") -> Delta:
        """Parses the last piece. Returns this piece's parts and all text that was held back. No call of `feed` may
        follow."""


class AnswerParser(TextParser, Protocol):
    """A TextParser of one whole continuation."""

    @property
    def has_reasoned(self) -> bool:
        """True if the text so far has a thinking part, even an empty one."""

    @property
    def has_called(self) -> bool:
        """True if the text so far has a call of a tool."""
