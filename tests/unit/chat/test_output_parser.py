"""OutputParser returns the same thinking, answer and calls however the text is cut, and shows no part of a mark."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch.chat.formats import ChatFormat
from llamabatch.chat.output_parser import OutputParser, held_length, joined_calls
from llamabatch.request.delta import Delta
from llamabatch.request.reasoning import ReasoningTags, Thinking
from llamabatch.request.tool_calls import ToolCall, ToolCallDelta

CHATML = "<|im_start|> reasoning_content <tool_call> "
TEMPLATES = {
    "qwen3": CHATML + r"'<think>\n' '\n</think>\n\n'",
    "deepseek-r1": "<｜Assistant｜> </think>",
    "gpt-oss": "<|channel|>analysis<|message|>",
    "magistral": "[THINK] [/THINK]",
    "glm-4.5": "<|observation|> <think></think>",
    "kimi-k2": "<|im_middle|> <think></think>",
    "seed-oss": "<seed:think>",
    "cohere": "<|START_THINKING|>",
    "apriel": "[BEGIN FINAL RESPONSE]",
}
FORMATS = {family: ChatFormat.of(template) for family, template in TEMPLATES.items()}
FORMATS["custom"] = ChatFormat.of(None, ("<<", ">>"))
SPECIAL = ("magistral", "cohere")  # families whose tags are special tokens

THOUGHT = "First <th a</b> [/TH, <| 2 < 3 & ünïcode 😀.\n\n  Then > done"
ANSWER = 'Yes: <b>x</b> {"a": [1]} 😀 — </thin'


def tagged(family: str, thought: str = THOUGHT, answer: str = ANSWER) -> str:
    tags = FORMATS[family].reasoning
    assert tags is not None
    if tags.channels:
        return (
            f"<|channel|>analysis<|message|>{thought}<|end|>"
            f"<|start|>assistant<|channel|>final<|message|>{answer}<|return|>"
        )
    return f"{tags.start}\n{thought}\n{tags.end}\n\n{answer}"


def make(family: str, thinking: Thinking = Thinking.POSSIBLE, **options) -> OutputParser:
    chat_format = FORMATS[family]
    tags = chat_format.reasoning
    special = tags.marks if tags is not None and family in SPECIAL else ()
    return OutputParser(chat_format, thinking=thinking, special=special, **options)


@dataclass
class Read:
    """Everything that a parser returned for a text."""

    reasoning: str = ""
    text: str = ""
    has_reasoned: bool = False
    calls: list[ToolCallDelta] = field(default_factory=list)


def read(parser: OutputParser, pieces: list[str]) -> Read:
    found = Read()
    for delta in [*map(parser.feed, pieces), parser.finish()]:
        found.reasoning += delta.reasoning
        found.text += delta.text
        found.calls += delta.tool_calls
    found.has_reasoned = parser.has_reasoned
    return found


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


CUTS = st.lists(st.integers(0, 10_000), max_size=40)
THOUSAND = settings(max_examples=1000, derandomize=True, deadline=None)
HUNDRED = settings(THOUSAND, max_examples=100)


@pytest.mark.parametrize("family", FORMATS)
@THOUSAND
@given(places=CUTS)
def test_any_cut_gives_the_same_and_no_part_of_a_mark(family, places):
    text = tagged(family)
    tags = FORMATS[family].reasoning
    parser, shown, thought = make(family), "", ""
    for piece in cut(text, places):
        delta = parser.feed(piece)
        shown, thought = shown + delta.text, thought + delta.reasoning
        assert ANSWER.startswith(shown)
        assert THOUGHT.startswith(thought)
        assert not any(mark in shown + thought for mark in tags.marks)
    rest = parser.finish()
    assert (thought + rest.reasoning, shown + rest.text) == (THOUGHT, ANSWER)
    assert parser.has_reasoned


@st.composite
def hostile(draw, family):
    """Draws a text of marks, parts of marks, white space and letters, and places to cut it."""
    marks = FORMATS[family].reasoning.marks
    parts = [mark[a:b] for mark in marks for a in (0, 1) for b in (len(mark), len(mark) // 2, len(mark) - 1)]
    pieces = draw(st.lists(st.sampled_from([*parts, *marks, "\n", " ", "a", "to=f", "final", "<"]), max_size=12))
    return "".join(pieces), draw(CUTS)


@pytest.mark.parametrize("family", FORMATS)
@pytest.mark.parametrize("thinking", Thinking)
@HUNDRED
@given(data=st.data())
def test_hostile_texts_read_the_same_however_they_are_cut(family, thinking, data):
    text, places = data.draw(hostile(family))
    assert read(make(family, thinking), cut(text, places)) == read(make(family, thinking), [text])


@pytest.mark.parametrize("family", FORMATS)
def test_a_cut_before_each_character(family):
    found = read(make(family), list(tagged(family)))
    assert (found.reasoning, found.text) == (THOUGHT, ANSWER)


QWEN = [
    (Thinking.INSIDE, "a\n</think>\n\nb", (True, "a", "b")),  # the template has opened the thinking
    (Thinking.INSIDE, "\n<think>\na</think>b", (True, "a", "b")),  # the model opens it a second time
    (Thinking.INSIDE, "<thin", (True, "<thin", "")),
    (Thinking.INSIDE, "cut off", (True, "cut off", "")),
    (Thinking.INSIDE, "cut off </thi", (True, "cut off </thi", "")),
    (Thinking.INSIDE, "</think>b", (True, "", "b")),
    (Thinking.POSSIBLE, "b", (False, "", "b")),
    (Thinking.POSSIBLE, " \n b", (False, "", " \n b")),
    (Thinking.POSSIBLE, "\n<think>\n\n</think>\n\nb", (True, "", "b")),
    (Thinking.POSSIBLE, "<think>a</think>\n\n\n b", (True, "a", "\n b")),  # the third line break belongs to the answer
    (Thinking.POSSIBLE, "</think>\n\nb", (True, "", "b")),
    (Thinking.POSSIBLE, "<thin", (False, "", "<thin")),
    (Thinking.POSSIBLE, "say <think>a</think>", (False, "", "say <think>a</think>")),
    (Thinking.POSSIBLE, "<think>a</think>b</think>c", (True, "a", "b</think>c")),
    (Thinking.OVER, "\n\nb <think>", (False, "", "b <think>")),
    (Thinking.OVER, "<think>a", (False, "", "<think>a")),
]


@pytest.mark.parametrize(("thinking", "text", "expected"), QWEN)
def test_tags_of_plain_text_count_at_the_beginning(thinking, text, expected):
    found = read(make("qwen3", thinking), [text])
    assert (found.has_reasoned, found.reasoning, found.text) == expected


def test_tags_of_special_tokens_count_anywhere():
    found = read(make("magistral"), ["a[THINK] b [/THINK]\n\nc[/THINK]d[THINK]e"])
    assert (found.reasoning, found.text) == ("b\ne", "acd")


GPT_OSS = [
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", ("a", "b")),
    ("<|channel|>final<|message|>b<|return|>", ("", "b")),
    ("<|channel|>final <|constrain|>json<|message|>{}", ("", "{}")),
    (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>c<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>d<|end|><|start|>assistant<|channel|>final<|message|>e",
        ("a\nc", "d\ne"),
    ),
    ("plain text", ("", "plain text")),
    ("to you", ("", "to you")),
    ("to", ("", "to")),
    ("<|channel|>fin", ("", "")),
    ("<|channel|>analysis<|message|>a<|en", ("a<|en", "")),
    ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", ("", "{}")),
]


@pytest.mark.parametrize(("text", "expected"), GPT_OSS)
def test_channels(text, expected):
    found = read(make("gpt-oss"), [text])
    assert (found.reasoning, found.text) == expected


class Calls:
    """A tool parser for tests: a word in brackets is a call."""

    def __init__(self) -> None:
        self.held = ""
        self.n = 0

    def feed(self, text: str) -> Delta:
        self.held += text
        before, bracket, rest = self.held.partition("[")
        if not bracket or "]" not in rest:
            self.held = bracket + rest
            return Delta(text=before)
        name, _, self.held = rest.partition("]")
        self.n += 1
        begun = ToolCallDelta(self.n - 1, f"id-{self.n}", name, "{")
        return Delta(text=before, tool_calls=(begun, ToolCallDelta(self.n - 1, arguments="}")))

    def finish(self, text: str = "") -> Delta:
        return Delta(text=self.held + text)


@pytest.mark.parametrize("begin", ["", "<|start|>", "<|channel|>analysis", "<|start|>assistant<|channel|>"])
@pytest.mark.parametrize("size", [100, 509, 512, 513, 520, 900])
def test_a_header_is_short_however_it_is_cut(begin, size):
    mark = ["<|message|>", "<|channel|>final<|message|>", ""][(size + len(begin)) % 3]  # each with each size and begin
    text = f"{begin}{' ' * size}{mark}rest"
    expected = read(make("gpt-oss"), [text])
    for cuts in ([], range(1, len(text)), range(3, len(text), 7), [len(text) - 5]):
        assert read(make("gpt-oss"), cut(text, list(cuts))) == expected
    if size > 520 or (mark and size < 509):
        assert (expected.text + expected.reasoning).endswith("rest")


def test_a_text_of_white_space_is_not_read_again_with_each_piece():
    parser, start = make("gpt-oss"), time.thread_time()
    for _ in range(20_000):
        parser.feed(" " * 256)
    assert time.thread_time() - start < 6  # 0.6 s; 34 s if each piece caused a look at the whole text


def test_the_text_behind_the_thinking_goes_through_the_tool_parser():
    found = read(make("qwen3", make_tool_parser=Calls), ["<think>[no]</think>", "\n\nx[fun]", "y[z"])
    assert (found.reasoning, found.text) == ("[no]", "xy[z")
    assert joined_calls(found.calls) == (ToolCall("id-1", "fun", "{}"),)


def test_calls_of_channels_reach_the_tool_parser_with_their_marks():
    seen = []

    class Noting(Calls):
        def feed(self, text: str) -> Delta:
            seen.append(text)
            return Delta()

    call = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
    read(make("gpt-oss", make_tool_parser=Noting), ["<|channel|>analysis<|message|>a<|end|>" + call])
    assert "".join(seen) == call


@given(st.text("ab<", max_size=8))
def test_held_length_is_the_longest_end_that_begins_a_mark(text):
    marks = ("<ab", "ab", "<<")
    expected = max(
        n for n in range(len(text) + 1) if n == 0 or any(m != text[-n:] and m.startswith(text[-n:]) for m in marks)
    )
    assert held_length(text, marks) == expected


def test_a_format_without_thinking_passes_all_on():
    parser = OutputParser(ChatFormat())
    assert parser.feed("<think>a") == Delta(text="<think>a")
    assert parser.finish("b") == Delta(text="b")
    assert not parser.has_reasoned
    assert isinstance(FORMATS["qwen3"].reasoning, ReasoningTags)
