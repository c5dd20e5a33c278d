"""Delta: the parts of an answer that a piece of generated text brings, and the protocol of what takes texts apart."""

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
    """Takes text apart as it comes. The joined deltas are the same however the text is cut, and none of them holds a
    part of a mark: text that may still become one waits for the text behind it.
    """

    def feed(self, text: str) -> Delta:
        """Takes the next piece of text."""

    def finish(self, text: str = "") -> Delta:
        """Takes the last piece, and gives all that was held back. Nothing may be fed after it."""


class AnswerParser(TextParser, Protocol):
    """A TextParser of one whole continuation."""

    @property
    def has_reasoned(self) -> bool:
        """True if the text so far has a thinking part, be it empty."""

    @property
    def has_called(self) -> bool:
        """True if the text so far has a call of a tool."""
