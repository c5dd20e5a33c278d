"""ReasoningTracker: the state of the thinking, token by token, and the tokens that close it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamabatch.chat.formats import ChatFormat
from llamabatch.request.reasoning import Reasoning, ReasoningTags, Thinking
from llamabatch.sampling.reasoning import Phase, ReasoningTokens, ReasoningTracker, spelled, within_character

SPECIAL = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "[THINK]", "[/THINK]"]
PIECES = ["</think>", "<think>", ">\n\n", ">{", "\n\n", "\n", "</th", "ink"]


class Letters:
    """A vocabulary of bytes, the names above, and some pieces of tags. It tokenizes a text greedily."""

    def __init__(self, *without: str, spaces: bool = False) -> None:
        self.pieces = [piece for piece in PIECES if piece not in without]
        self.spaces = spaces  # puts a space before each text, as some vocabularies do
        self.names = {name: 256 + at for at, name in enumerate(SPECIAL)}
        self.ids = {piece: 300 + at for at, piece in enumerate(self.pieces)}

    def tokenize(self, text, *, add_special=True, parse_special=False):
        known = {**self.ids, **(self.names if parse_special else {})}
        text, ids = " " + text if self.spaces else text, []
        while text:
            piece = max((each for each in known if text.startswith(each)), key=len, default=None)
            if piece is None:
                ids += text[0].encode()
                text = text[1:]
            else:
                ids.append(known[piece])
                text = text[len(piece) :]
        return ids

    def all_bytes(self, token_id):
        named = {token_id: name for name, token_id in {**self.names, **self.ids}.items()}
        return named[token_id].encode() if token_id in named else bytes([token_id])

    def token_bytes(self, token_id):
        return b"" if token_id in self.names.values() else self.all_bytes(token_id)


QWEN = ReasoningTags("qwen3", "<think>", "</think>", "\n</think>\n\n")
MISTRAL = ReasoningTags("magistral", "[THINK]", "[/THINK]", "[/THINK]")
GPT_OSS = ChatFormat.of("<|channel|>analysis<|message|>").reasoning


def tracker(tags=QWEN, thinking=Thinking.POSSIBLE, budget=None, model=None, **options):
    return ReasoningTracker(ReasoningTokens(tags, model or Letters()), Reasoning(tags, thinking, **options), budget)


def generate(following, text, model=None):
    """Returns the output tokens of a model that wants to write `text`, with the dictated tokens in between."""
    wanted, ids = (model or Letters()).tokenize(text, parse_special=True), [7]
    while True:
        dictated = following.dictated(len(ids) - 1, ids)
        if dictated is None and not wanted:
            return ids[1:]
        ids.append(wanted.pop(0) if dictated is None else dictated)


def text_of(ids, model=None):
    return b"".join(map((model or Letters()).all_bytes, ids)).decode()


def answer_begins(following, text, model=None):
    """Returns the state after a text, and the number of its tokens."""
    ids = (model or Letters()).tokenize(text, parse_special=True)
    return following.at(len(ids), [7, *ids]), len(ids)


def test_the_answer_begins_behind_the_tag_however_it_is_cut_into_tokens():
    for model in (Letters(), Letters("</think>"), Letters(*PIECES)):
        following = tracker(thinking=Thinking.INSIDE, model=model)
        state, n = answer_begins(following, "ab</think>", model)
        assert (state.phase, state.begin, state.rest, state.gap) == (Phase.ANSWER, n, b"", 2)


def test_a_token_may_hold_the_end_of_the_tag_and_the_beginning_of_the_answer():
    model = Letters("</think>")
    state, n = answer_begins(tracker(thinking=Thinking.INSIDE, model=model), "a</think>{", model)
    assert (state.phase, state.begin, state.rest, state.gap) == (Phase.ANSWER, n, b"{", 0)
    state, n = answer_begins(tracker(thinking=Thinking.INSIDE, model=model), "a</think>\n\n", model)
    assert (state.begin, state.rest, state.gap) == (n, b"", 0)


@pytest.mark.parametrize(("text", "behind", "gap"), [("\n", 0, 1), ("\n\nb", 1, 0), ("b\n\n", 2, 0), ("\n\n\n", 1, 0)])
def test_line_breaks_behind_the_tag_are_no_part_of_the_answer(text, behind, gap):
    state, n = answer_begins(tracker(thinking=Thinking.INSIDE), "a</think>" + text)
    assert (state.begin, state.gap) == (n - behind, gap)


@pytest.mark.parametrize(
    ("thinking", "text", "phase", "begin"),
    [
        (Thinking.POSSIBLE, "", Phase.BEFORE, 0),
        (Thinking.POSSIBLE, "\n<think>", Phase.THINKING, 0),
        (Thinking.POSSIBLE, "<thi", Phase.BEFORE, 0),
        (Thinking.POSSIBLE, "<thus", Phase.ANSWER, 0),
        (Thinking.POSSIBLE, "{", Phase.ANSWER, 0),
        (Thinking.POSSIBLE, "</think>x", Phase.ANSWER, 1),
        (Thinking.POSSIBLE, "<think></think>x", Phase.ANSWER, 2),
        (Thinking.OVER, "<think>", Phase.ANSWER, 0),
    ],
)
def test_the_phase_behind_a_text(thinking, text, phase, begin):
    state, _ = answer_begins(tracker(thinking=thinking), text)
    assert (state.phase, state.begin) == (phase, begin)


def test_after_a_prompt_that_is_no_chat_no_line_break_is_dropped():
    assert tracker(thinking=Thinking.OVER).at(0, [7]).gap == 2
    assert tracker(thinking=Thinking.OVER, parsed=False).at(0, [7]).gap == 0


@pytest.mark.parametrize("budget", [0, 1, 5, 6])
def test_a_budget_closes_the_thinking_with_the_familys_text(budget):
    inside = generate(tracker(thinking=Thinking.INSIDE, budget=budget), "abcdefgh")
    assert text_of(inside) == "abcdefgh"[:budget] + "\n</think>\n\n" + "abcdefgh"[budget:]
    opened = generate(tracker(budget=budget), "<think>abcdefgh")
    assert text_of(opened) == "<think>" + "abcdefgh"[:budget] + "\n</think>\n\n" + "abcdefgh"[budget:]


def test_a_thinking_within_its_budget_ends_as_the_model_wants():
    assert text_of(generate(tracker(budget=5), "<think>abc</think>defghijk")) == "<think>abc</think>defghijk"
    assert text_of(generate(tracker(budget=2), "no thinking at all")) == "no thinking at all"
    assert text_of(generate(tracker(thinking=Thinking.OVER, budget=0), "abc")) == "abc"


def test_a_budget_does_not_end_within_a_character():
    text = "a😀bc"
    for budget, kept in ((1, "a"), (2, "a😀"), (4, "a😀"), (5, "a😀"), (6, "a😀b")):
        closed = text_of(generate(tracker(thinking=Thinking.INSIDE, budget=budget), text))
        assert closed == kept + "\n</think>\n\n" + text[len(kept) :]


def test_bytes_that_never_become_a_character_do_not_hold_the_budget_up():
    following, ids = tracker(thinking=Thinking.INSIDE, budget=1), [7]
    while following.dictated(len(ids) - 1, ids) is None:
        ids.append(0xE2)
    assert len(ids) - 1 <= 4


def test_channels_bind_behind_the_header_of_the_final_one():
    text = "<|channel|>analysis<|message|>ab<|end|><|start|>assistant<|channel|>final<|message|>"
    state, n = answer_begins(tracker(GPT_OSS), text)
    assert (state.phase, state.begin, state.gap) == (Phase.ANSWER, n, 0)
    state, _ = answer_begins(tracker(GPT_OSS), "<|channel|>commentary to=functions.f<|message|>ab")
    assert state.phase is Phase.ELSEWHERE
    state, n = answer_begins(tracker(GPT_OSS), "<|channel|>final <|constrain|>json<|message|>")
    assert (state.phase, state.begin) == (Phase.ANSWER, n)


def test_a_budget_of_channels_counts_the_analysis_alone():
    begun = "<|channel|>commentary<|message|>abcdef<|end|><|start|>assistant<|channel|>analysis<|message|>"
    closed = text_of(generate(tracker(GPT_OSS, budget=3), begun + "ghijk"))
    assert closed == begun + "ghi<|end|><|start|>assistant<|channel|>final<|message|>jk"
    two = "<|channel|>analysis<|message|>ab<|end|><|start|>assistant<|channel|>analysis<|message|>"
    closed = text_of(generate(tracker(GPT_OSS, budget=2 + 1 + 2), two + "cdefg"))
    assert closed == two + "cd<|end|><|start|>assistant<|channel|>final<|message|>efg"


def test_a_special_tag_opens_the_thinking_again_with_what_is_left_of_the_budget():
    closed = text_of(generate(tracker(MISTRAL, budget=4), "[THINK]ab[/THINK]c[THINK]defg"))
    assert closed == "[THINK]ab[/THINK]c[THINK]d[/THINK]efg"


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12))
def test_any_order_of_questions_gives_the_same_states(places):
    """Draft tokens are dropped, and preempted sequences begin again. The state depends on the tokens alone."""
    ids = generate(tracker(budget=6), "<think>abc\U0001f600defghijklmno</think> and more and more")
    following = tracker(budget=6)
    for place in places:
        place %= len(ids) + 1
        assert following.at(place, [7, *ids[:place]]) == tracker(budget=6).at(place, [7, *ids[:place]])


def test_long_texts_keep_few_states_and_can_still_go_back():
    ids = Letters().tokenize("<think>" + "a" * 1000, parse_special=True)
    following = tracker()
    end = following.at(len(ids), [7, *ids])
    assert len(following._states) <= 256 + 1 or following._from
    assert following.at(3, [7, *ids[:3]]).n_thinking == 2
    assert following.at(len(ids), [7, *ids]) == end


def test_a_vocabulary_that_puts_a_space_first_spells_the_tag_without_it():
    model = Letters(*PIECES, spaces=True)
    ids = spelled("</think>", model)
    assert text_of(ids, model) == "</think>"
    assert text_of(spelled("a", Letters())) == "a"


def test_within_a_character():
    assert within_character(b"") is False
    for character in "é€😀":
        encoded = character.encode()
        assert [within_character(b"a" + encoded[:n]) for n in range(len(encoded) + 1)] == [
            0 < n < len(encoded) for n in range(len(encoded) + 1)
        ]


def test_white_space_and_headers_that_never_end_are_not_kept():
    for tags in (QWEN, GPT_OSS):
        following, ids = tracker(tags), [32] * 5000
        assert max(len(following.at(index, ids[:index]).tail) for index in range(len(ids))) < 2200
    assert following.at(len(ids), ids).phase is Phase.ANSWER


@pytest.mark.parametrize(
    ("tags", "tail", "following"),
    [
        (QWEN, "", "<think>"),
        (QWEN, "\n", "<think>"),
        (QWEN, "x", None),
        (GPT_OSS, "<|start|>assistant", "<|channel|>"),
        (GPT_OSS, "<|start|>assistant<|channel|>", "af"),
        (GPT_OSS, "<|channel|>anal", "y"),
        (GPT_OSS, "<|start|>assistant<|channel|>final", "<|message|>"),
        (GPT_OSS, "", "<|start|>"),
        (GPT_OSS, "<|start|>ass", "i"),
        (GPT_OSS, "<|channel|>commentary", None),
    ],
)
def test_the_tokens_that_go_on_with_a_tag_or_a_header(tags, tail, following):
    model = Letters()
    found = ReasoningTokens(tags, model).next_of_tag(tail.encode())
    assert [model.all_bytes(each).decode() for each in found] in (
        [[following]] if following and len(following) > 2 else [list(following or "")]
    )
