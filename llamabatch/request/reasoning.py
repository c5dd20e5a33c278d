"""The thinking in an answer: the tags around it, and the state of the thinking at the end of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
RETURN, CALL, CONSTRAIN = "<|return|>", "<|call|>", "<|constrain|>"
CHANNEL_MARKS = (START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN)
FINAL = f"{CHANNEL}final{MESSAGE}"

# Maximum gap between thinking and answer: model families write up to two line breaks.
GAP = "\n\n"


class Thinking(str, Enum):
    """The state of the thinking at the end of a prompt."""

    INSIDE = "inside"  # the answer continues the thinking
    POSSIBLE = "possible"  # the answer may begin with the tag that opens the thinking
    OVER = "over"  # no thinking follows


@dataclass(frozen=True)
class ReasoningTags:
    """The tags that a model family writes around its thinking.

    Attributes:
        family: name of the family, for the plan and for messages.
        start, end: the tags before and after the thinking, without white space.
        closing: the text that ends the thinking when its budget is spent: `end` with the family's line breaks.
        channels: True: messages are in channels, as in gpt-oss, and `end` is the header of the final message.
    """

    family: str
    start: str
    end: str
    closing: str
    channels: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that the parser of an answer must see, even if they are special tokens."""
        return CHANNEL_MARKS if self.channels else (self.start, self.end)

    def at_end_of(self, prompt: str, continued: str = "") -> Thinking:
        """Returns the state of the thinking at the beginning of the answer.

        Args:
            prompt: the whole text that the model reads.
            continued: text of the last message, if the answer continues it.
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
        thinking: state of the thinking at the end of the prompt.
        parsed: True: the output is split into parts, and line breaks between thinking and answer belong to neither.
    """

    tags: ReasoningTags
    thinking: Thinking
    parsed: bool = True
