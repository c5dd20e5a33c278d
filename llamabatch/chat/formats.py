"""ChatFormat: the marks that a family of models sets around the parts of an answer, found from its chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from llamabatch.errors import ConfigError
from llamabatch.utils.checks import items, show, string

# White space between the end of the thinking and the answer: families write up to two line breaks.
GAP = "\n\n"
MAX_TAG = 256  # characters

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
RETURN, CALL, CONSTRAIN = "<|return|>", "<|call|>", "<|constrain|>"
CHANNEL_MARKS = (START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN)
FINAL = f"{CHANNEL}final{MESSAGE}"


class Thinking(Enum):
    """State of the thinking where a prompt ends."""

    INSIDE = auto()  # the answer goes on with thinking
    POSSIBLE = auto()  # the answer may begin with the tag that opens it
    OVER = auto()  # the prompt has closed it


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
class ChatFormat:
    """The format of a model's answers.

    Attributes:
        reasoning: marks of the thinking; None: the family does not think, or is unknown.
    """

    reasoning: ReasoningTags | None = None

    @classmethod
    def of(cls, template: str | None, reasoning_tags: tuple[str, str] | None = None) -> ChatFormat:
        """The format of a model with this chat template.

        Args:
            template: jinja2 source; None: the model has none.
            reasoning_tags: the pair around the thinking, in place of the family's.
        """
        if reasoning_tags is not None:
            start, end = (tag.strip() for tag in reasoning_tags)
            return cls(ReasoningTags("custom", start, end, _closing(template or "", end)))
        return cls(None if template is None else _reasoning_of(template))


def check_tags(given: object) -> tuple[str, str]:
    """The pair of tags that a caller gave. Raises ConfigError."""
    pair = items(given, 3) if not isinstance(given, str) else None
    tags = [text for text in map(string, pair or ()) if text is not None and text.strip()]
    if len(tags) != 2 or len(pair or ()) != 2:
        raise ConfigError(f'reasoning_tags is {show(given)}; give two texts, as ("<think>", "</think>")')
    if max(map(len, tags)) > MAX_TAG:
        raise ConfigError(f"reasoning_tags has a tag of {max(map(len, tags))} characters; allowed are 1 to {MAX_TAG}")
    start, end = (tag.strip() for tag in tags)
    if start == end:
        raise ConfigError(f"reasoning_tags is {show(given)}; the tag that ends the thinking must be another one")
    return start, end


# Name, texts that all stand in the template, and the tags. The first row that fits holds.
_FAMILIES: Sequence[tuple[str, tuple[str, ...], str, str]] = (
    ("gemma-4", ("<|channel>thought", "<channel|>"), "<|channel>thought", "<channel|>"),
    ("magistral", ("[THINK]", "[/THINK]"), "[THINK]", "[/THINK]"),
    ("seed-oss", ("<seed:think>",), "<seed:think>", "</seed:think>"),
    ("cohere", ("<|START_THINKING|>",), "<|START_THINKING|>", "<|END_THINKING|>"),
    ("apertus", ("<|inner_prefix|>",), "<|inner_prefix|>", "<|inner_suffix|>"),
    ("apriel", ("[BEGIN FINAL RESPONSE]",), "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ("minimax-m3", ("<mm:think>",), "<mm:think>", "</mm:think>"),
    ("hunyuan", ("'<think{}>'", "':opensource'"), "<think:opensource>", "</think:opensource>"),
    ("deepseek-r1", ("</think>", "<｜Assistant｜>"), "<think>", "</think>"),
    ("kimi-k2", ("</think>", "<|im_middle|>"), "<think>", "</think>"),
    ("glm-4.5", ("</think>", "<|observation|>"), "<think>", "</think>"),
    ("minimax-m2", ("</think>", "]~b]ai"), "<think>", "</think>"),
    ("granite", ("</think>", "<|start_of_role|>"), "<think>", "</think>"),
    ("qwen3", ("</think>", "<|im_start|>", "reasoning_content", "<tool_call>"), "<think>", "</think>"),
    ("think", ("</think>",), "<think>", "</think>"),
)


def _reasoning_of(template: str) -> ReasoningTags | None:
    if f"{CHANNEL}analysis" in template and MESSAGE in template:
        start, closing = f"{CHANNEL}analysis{MESSAGE}", f"{END}{START}assistant{FINAL}"
        return ReasoningTags("gpt-oss", start, FINAL, closing, channels=True)
    for family, marks, start, end in _FAMILIES:
        if all(mark in template for mark in marks):
            return ReasoningTags(family, start, end, _closing(template, end))
    return None


def _closing(template: str, end: str) -> str:
    r"""`end` with as many line breaks around it as the template writes: it has them as \n, in a string of jinja2."""
    found = re.findall(r"((?:\\n){0,2})" + re.escape(end) + r"((?:\\n){0,2})", template)
    before = max((min(len(breaks) // 2, 1) for breaks, _ in found), default=0)
    after = max((len(breaks) // 2 for _, breaks in found), default=0)
    return "\n" * before + end + "\n" * after


def reasoning_family(template: Any, reasoning_tags: tuple[str, str] | None, reasoning_format: str) -> str | None:
    """Name of the family for the plan; None: no thinking is looked for."""
    if reasoning_format == "none":
        return None
    reasoning = ChatFormat.of(template if isinstance(template, str) else None, reasoning_tags).reasoning
    return None if reasoning is None else reasoning.family
