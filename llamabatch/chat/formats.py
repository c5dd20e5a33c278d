"""ChatFormat: the tags that a family of models writes around its thinking. The chat template identifies the family."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from llamabatch.errors import ConfigError
from llamabatch.request.reasoning import CHANNEL, END, FINAL, MESSAGE, START, ReasoningTags
from llamabatch.utils.checks import items, show, string

MAX_TAG = 256  # maximum number of characters in a tag


@dataclass(frozen=True)
class ChatFormat:
    """The format of a model's answers.

    Attributes:
        reasoning: tags of the thinking; None: the family does not think, or is unknown.
    """

    reasoning: ReasoningTags | None = None

    @classmethod
    @functools.lru_cache(16)
    def of(cls, template: str | None, reasoning_tags: tuple[str, str] | None = None) -> ChatFormat:
        """Returns the format of a model with this chat template.

        Args:
            template: jinja2 source; None: the model has none.
            reasoning_tags: start tag and end tag of the thinking. They replace the tags of the model's family; None:
                the family's tags.
        """
        if reasoning_tags is not None:
            start, end = (tag.strip() for tag in reasoning_tags)
            return cls(ReasoningTags("custom", start, end, _closing(template or "", end)))
        return cls(None if template is None else _reasoning_of(template))


def check_tags(given: object) -> tuple[str, str]:
    """Returns the pair of tags that a caller gave, without white space around them. Raises ConfigError."""
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


# Families of models that think between tags. Each row: name; texts that must all be in the template; start tag; end
# tag. The first row that fits is used.
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
    r"""Returns `end` with the line breaks that surround it in the template. The template's source writes them as \n."""
    found = re.findall(r"((?:\\n){0,2})" + re.escape(end) + r"((?:\\n){0,2})", template)
    before = max((min(len(breaks) // 2, 1) for breaks, _ in found), default=0)
    after = max((len(breaks) // 2 for _, breaks in found), default=0)
    return "\n" * before + end + "\n" * after


def reasoning_of(
    template: str | None, reasoning_tags: tuple[str, str] | None, reasoning_format: str
) -> ReasoningTags | None:
    """Returns the tags of the thinking for these engine options; None: answers are not searched for thinking."""
    return None if reasoning_format == "none" else ChatFormat.of(template, reasoning_tags).reasoning
