"""The thinking of an answer: its marks, and its state where a prompt ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
RETURN, CALL, CONSTRAIN = "<|return|>", "<|call|>", "<|constrain|>"
CHANNEL_MARKS = (START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN)
FINAL = f"{CHANNEL}final{MESSAGE}"

# White space between the end of the thinking and the answer: families write up to two line breaks.
GAP = "\n\n"


class Thinking(str, Enum):
    """State of the thinking where a prompt ends."""

    INSIDE = "inside"  # the answer goes on with thinking
    POSSIBLE = "possible"  # the answer may begin with the tag that opens it
    OVER = "over"  # the prompt has closed it


@dataclass(frozen=True)
class ReasoningTags:
    """The marks around the thinking of a family.

    Attributes:
        family: its name, for the plan and for messages.
        start, end: text that begins the thinking, and that ends it; no white space around them.
        closing: text that ends the thinking when its budget is spent: `end` with the line breaks of the family.
        channels: messages in channels, as gpt-oss has them; `end` is then the header of the final one.
    """

    family: str
    start: str
    end: str
    closing: str
    channels: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that the parser of an answer must see, also where they are special tokens."""
        return CHANNEL_MARKS if self.channels else (self.start, self.end)

    def at_end_of(self, prompt: str, continued: str = "") -> Thinking:
        """State of the thinking where the answer begins.

        Args:
            prompt: the whole text that the model reads.
            continued: text of the last message, if the answer goes on with it.
        """
        if continued:
            opened, closed = continued.rfind(self.start), continued.rfind(self.end)
            return Thinking.INSIDE if opened > closed else Thinking.OVER
        tail = prompt.rstrip()
        if self.channels:
            header = tail[tail.rfind(START) :] if tail.endswith(MESSAGE) else ""
            if CHANNEL in header:
                return Thinking.INSIDE if f"{CHANNEL}analysis" in header else Thinking.OVER
            return Thinking.POSSIBLE
        if tail.endswith(self.start):
            return Thinking.INSIDE
        return Thinking.OVER if tail.endswith(self.end) else Thinking.POSSIBLE


@dataclass(frozen=True)
class Reasoning:
    """The thinking of one request, as its engine needs it.

    Attributes:
        thinking: its state where the prompt ends.
        parsed: the answer is taken apart: line breaks between thinking and answer are no part of the answer.
    """

    tags: ReasoningTags
    thinking: Thinking
    parsed: bool = True
