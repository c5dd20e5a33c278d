"""Delta: the parts of an answer in a piece of generated text, and the protocol of parsers that find these parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llamabatch.request.tool_calls import ToolCallDelta


@dataclass(frozen=True)
class Delta:
    """The parts of a piece of generated text.

    Attributes:
        reasoning: thinking.
        text: the answer proper.
        tool_calls: parts of tool calls.
    """

    reasoning: str = ""
    text: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class TextParser(Protocol):
    """Splits text into parts as it comes. The joined deltas are the same however the text is cut. No delta holds a part
    of a mark: text that may still become a mark is held back until more text comes."""

    def feed(self, text: str) -> Delta:
        """Takes the next piece of text."""

    def finish(self, text: str = "") -> Delta:
        """Takes the last piece, and returns all text that was held back. Nothing may be fed after it."""


class AnswerParser(TextParser, Protocol):
    """A TextParser of one whole continuation."""

    @property
    def has_reasoned(self) -> bool:
        """True if the text so far has a thinking part, even an empty one."""

    @property
    def has_called(self) -> bool:
        """True if the text so far has a call of a tool."""
