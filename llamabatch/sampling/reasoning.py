"""Follows the thinking of a sequence token by token. Finds the end of the thinking, or forces it when the budget is
spent.

A tag may be one token or several, and a token may contain the end of a tag and the text after it. So the code searches
for tags in the bytes of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

from llamabatch.request.reasoning import CHANNEL, END, FINAL, GAP, MESSAGE, START, Reasoning, ReasoningTags, Thinking

_KEPT = 128  # number of last tokens whose states are kept; a step has fewer guesses
_MOST_PIECES = 3  # up to this many tokens after the budget may complete a character
_SPACE = b" \t\r\n"
_MOST_HEADER = 2048  # maximum bytes of a message's header; a longer header counts as text
ASSISTANT = f"{START}assistant"


class Tokenizer(Protocol):
    """The part of a Model that this module uses."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def all_bytes(self, token_id: int) -> bytes: ...


class Phase(Enum):
    """The part of the output to which the next token belongs."""

    BEFORE = auto()  # the thinking may begin; for formats with channels: inside the header of a message
    THINKING = auto()
    ELSEWHERE = auto()  # for formats with channels: inside a message that is neither thinking nor the answer
    ANSWER = auto()


class State(NamedTuple):
    """The state after some tokens.

    Attributes:
        begin: in ANSWER, the number of output tokens before the answer.
        rest: the last bytes of output token `begin - 1`, if they belong to the answer.
        gap: number of line breaks that may still come between thinking and answer.
        forced: number of tokens of the closing text so far; None: the closing text is not being written.
        n_thinking: number of tokens of thinking so far.
        tail: last bytes of the text, in which a tag may have begun.
    """

    phase: Phase
    begin: int = 0
    rest: bytes = b""
    gap: int = 0
    forced: int | None = None
    n_thinking: int = 0
    tail: bytes = b""


class ReasoningTokens:
    """The reasoning tags of a model family, as tokens of one model. Any number of sequences share this object.

    Attributes:
        closing: tokens of the text that ends the thinking.
        start: tokens of the tag that begins the thinking.
        openings: for formats with channels, the tokens of two headers after "<|start|>assistant": the thinking's and
            the answer's.
        sender: for formats with channels, the tokens of "<|start|>assistant".
    """

    def __init__(self, tags: ReasoningTags, model: Tokenizer) -> None:
        self.tags = tags
        self.model = model
        self.start_bytes, self.end_bytes = tags.start.encode(), tags.end.encode()
        self.closing = spelled(tags.closing, model)
        self.start = spelled(tags.start, model)
        self.openings = (self.start, spelled(FINAL, model)) if tags.channels else ()
        self.sender = spelled(ASSISTANT, model) if tags.channels else ()
        self.gap = 0 if tags.channels else len(GAP)
        # if the tag is one special token, it begins thinking even within the answer
        special = len(self.start) == 1 and not model.token_bytes(self.start[0])
        self.reopens_at = self.start[0] if special and not tags.channels else None

    def next_of_tag(self, tail: bytes) -> list[int]:
        """Returns the tokens that may follow `tail` in the tag before the thinking, or in the header of a message."""
        if not self.tags.channels:
            return self._next(tail.lstrip(), self.start)
        sender = ASSISTANT.encode()
        if tail.startswith((sender, CHANNEL.encode())):
            return self._next(tail.removeprefix(sender), *self.openings)
        return self._next(tail, self.sender)

    def _next(self, begun: bytes, *sequences: Sequence[int]) -> list[int]:
        found = {
            token_id
            for sequence in sequences
            for at, token_id in enumerate(sequence)
            if b"".join(map(self.model.all_bytes, sequence[:at])) == begun
        }
        return sorted(found)


class ReasoningTracker:
    """Follows the thinking of one sequence. It stores no tokens, so preemption and dropped tokens need no extra code.

    Args:
        budget: number of thinking tokens after which the closing text is forced; None: no limit.
    """

    def __init__(self, tokens: ReasoningTokens, reasoning: Reasoning, budget: int | None = None) -> None:
        self.tokens = tokens
        self._budget = budget
        self._first = self._begun(reasoning)
        self._from = 0  # number of output tokens before the first of _states
        self._states = [self._first]

    def at(self, index: int, token_ids: Sequence[int]) -> State:
        """Returns the state before output token `index`.

        Args:
            token_ids: prompt and output, up to output token index - 1.
        """
        if index < self._from:
            self._from, self._states = 0, [self._first]
        del self._states[index - self._from + 1 :]
        known = self._from + len(self._states) - 1
        for token_id in token_ids[len(token_ids) - (index - known) :] if index > known else ():
            self._states.append(self._after(self._states[-1], token_id, known))
            known += 1
        if len(self._states) > 2 * _KEPT:
            del self._states[:_KEPT]
            self._from += _KEPT
        return self._states[-1]

    def dictated(self, index: int, token_ids: Sequence[int]) -> int | None:
        """Returns the token that must come as output token `index`; None if the sampler chooses."""
        state = self.at(index, token_ids)
        return None if state.forced is None else self.tokens.closing[state.forced]

    def _begun(self, reasoning: Reasoning) -> State:
        if reasoning.thinking is Thinking.OVER:
            return State(Phase.ANSWER, gap=self.tokens.gap if reasoning.parsed else 0)
        if reasoning.thinking is Thinking.INSIDE:
            return self._bounded(State(Phase.THINKING), b"")
        return State(Phase.BEFORE, tail=ASSISTANT.encode() if self.tokens.tags.channels else b"")

    def _after(self, state: State, token_id: int, index: int) -> State:
        text = self.tokens.model.all_bytes(token_id)
        if state.forced is not None and token_id == self.tokens.closing[state.forced]:
            return self._forced(state, index)
        if state.phase is Phase.ANSWER:
            return self._in_answer(state, token_id, text, index)
        if self.tokens.tags.channels:
            return self._in_channels(state, text, index)
        if state.phase is Phase.BEFORE:
            return self._before(state, text, index)
        return self._thinking(state, text, index)

    def _forced(self, state: State, index: int) -> State:
        assert state.forced is not None
        if state.forced + 1 < len(self.tokens.closing):
            return state._replace(forced=state.forced + 1)
        closing = self.tokens.tags.closing.encode()
        breaks = len(closing) - len(closing.rstrip(_SPACE))
        return self._answer(state, index, b"", max(0, self.tokens.gap - breaks))

    def _answer(self, state: State, index: int, rest: bytes, gap: int) -> State:
        """Returns the state of an answer after output token `index`. The answer begins with `rest`, the last bytes of
        this token."""
        while gap and rest[:1] == b"\n":
            rest, gap = rest[1:], gap - 1
        return State(Phase.ANSWER, index + 1, rest, 0 if rest else gap, n_thinking=state.n_thinking)

    def _in_answer(self, state: State, token_id: int, text: bytes, index: int) -> State:
        if token_id == self.tokens.reopens_at:
            return self._bounded(State(Phase.THINKING, n_thinking=state.n_thinking), b"")
        if not state.gap:
            return state
        if text and len(text) <= state.gap and not text.strip(b"\n"):
            return state._replace(begin=index + 1, gap=state.gap - len(text))
        return state._replace(gap=0)

    def _before(self, state: State, text: bytes, index: int) -> State:
        tail = state.tail + text
        begun, tokens = tail.lstrip(_SPACE), self.tokens
        if begun.startswith(tokens.start_bytes):
            return self._thinking(State(Phase.THINKING, n_thinking=-1), begun[len(tokens.start_bytes) :], index)
        if begun.startswith(tokens.end_bytes):
            return self._answer(state, index, begun[len(tokens.end_bytes) :], tokens.gap)
        if tokens.start_bytes.startswith(begun) or tokens.end_bytes.startswith(begun):
            return state._replace(tail=begun)
        return State(Phase.ANSWER)  # no thinking: the answer begins with the first token

    def _thinking(self, state: State, text: bytes, index: int) -> State:
        tail, end = state.tail + text, self.tokens.end_bytes
        _, found, rest = tail.partition(end)
        state = state._replace(n_thinking=state.n_thinking + 1, forced=None)
        if found:
            return self._answer(state, index, rest, self.tokens.gap)
        return self._bounded(state, tail[max(0, len(tail) - len(end) - 3) :])

    def _in_channels(self, state: State, text: bytes, index: int) -> State:
        tail = state.tail + text
        if state.phase is Phase.BEFORE:
            header, found, rest = tail.partition(MESSAGE.encode())
            if not found:
                return state._replace(tail=tail) if len(tail) <= _MOST_HEADER else State(Phase.ANSWER)
            if b"to=" not in header and f"{CHANNEL}analysis".encode() in header:
                return self._in_channels(State(Phase.THINKING, n_thinking=state.n_thinking - 1), rest, index)
            if b"to=" not in header and f"{CHANNEL}final".encode() in header:
                return self._answer(state, index, rest, 0)
            return State(Phase.ELSEWHERE, n_thinking=state.n_thinking, tail=rest)
        state = state._replace(n_thinking=state.n_thinking + (state.phase is Phase.THINKING), forced=None)
        places = [(at, mark) for mark in (END, START, CHANNEL) if (at := tail.find(mark.encode())) >= 0]
        if places:
            at, mark = min(places)
            return State(Phase.BEFORE, n_thinking=state.n_thinking, tail=tail[at:] if mark != END else b"")
        tail = tail[-len(CHANNEL) - 3 :]
        return self._bounded(state, tail) if state.phase is Phase.THINKING else state._replace(tail=tail)

    def _bounded(self, state: State, tail: bytes) -> State:
        """Returns the next state of thinking. Forces the closing text if the budget is spent, but not within a
        character."""
        n_over = -1 if self._budget is None else state.n_thinking - self._budget
        closes = n_over >= 0 and (n_over >= _MOST_PIECES or not within_character(tail))
        return state._replace(tail=tail, forced=0 if closes else None)


def spelled(text: str, model: Tokenizer) -> tuple[int, ...]:
    """Tokenizes a text as if it were within a longer text. Names of special tokens become the special tokens."""
    tokens = model.tokenize(text, add_special=False, parse_special=True)
    if b"".join(map(model.all_bytes, tokens)) != text.encode():
        tokens = behind_break(text, model) or tokens
    return tuple(tokens)


def behind_break(text: str, model: Tokenizer, *, parse_special: bool = True) -> list[int]:
    """Tokenizes a text after a line break. Returns the text's tokens, without the line break; [] if one token contains
    the break and a part of the text.

    Some vocabularies add a space, but only at the start of a text.
    """
    before, tokens = (
        model.tokenize(each, add_special=False, parse_special=parse_special) for each in ("\n", f"\n{text}")
    )
    return tokens[len(before) :] if tokens[: len(before)] == before else []


def within_character(text: bytes) -> bool:
    """Returns True if UTF-8 text ends within a character."""
    for length in range(1, min(3, len(text)) + 1):
        byte = text[-length]
        if byte & 0xC0 != 0x80:  # the first byte of a character
            needed = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 1
            return length < needed
    return False
