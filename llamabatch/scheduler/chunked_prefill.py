"""Prompt tokens and background work of a step beside sequences that wait for their next token. Pure Python.

A step with prompt tokens in it takes longer than one without, and every decoding sequence waits for it. The times of
both kinds are measured, and each chunk is sized so that prompts have their share of the time: evenly, so that no gap
between two tokens is much longer than another.
"""

from __future__ import annotations

import statistics
from collections import deque
from enum import Enum, auto

from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.output import Limits

# Tokens of the first chunk, whose cost is not known yet, and of any chunk at least: a pass over the weights costs the
# same for one token as for a few. Where a step's share pays for fewer, it is saved up for one of the next steps.
FIRST_CHUNK = 16
LEAST_CHUNK = 16
# Time that may be saved up, in plain steps: a gap is then at most three of them long, if prefill_share is no more than
# two thirds.
MOST_SAVED = 2.0
# A chunk grows to so many times the one before at most, as one measured time may be off.
MOST_GROWTH = 2.0
# A chunk takes the rest of a prompt in that is up to so many times its length.
TAIL = 1.25
# Prompts up to this length are computed at once, prefill_budget tokens a step: a decode step of 16 rows takes 45 ms, 64
# prompt tokens 80 ms (0.5B Q8_0). Longer ones have their share of the time, to their last token.
SHORT = 64
# Steps with prompt tokens between two without, which show what a decode step takes; and the change in the number of
# decoding sequences after which it is looked at again.
STEPS_BETWEEN_PLAIN = 15
ROWS_CHANGED = 0.25
# Steps between two that background sequences share, once the cost of their rows is known, so that fewer than 1 gap in
# 100 is longer for their sake. Until then they share a step more often, as their rows may turn out to be cheap.
BACKGROUND_STEPS_BETWEEN = 119
BACKGROUND_STEPS_UNTIL_KNOWN = 29
# Prompt tokens of background sequences in a step that they share with others, at most.
BACKGROUND_CHUNK = 128
# Where rows cost next to nothing, background sequences join in all steps but one in so many, which shows what a step
# without them takes. "Next to nothing": the median of the last steps with them is at most so much longer.
STEPS_WITH = 8
MOST_LONGER = 1.1
_SAMPLES = 15
_FEWEST_SAMPLES = 5
_LATEST = 5  # measured times whose median counts


class BackgroundTurn(Enum):
    """Part of a step that background sequences have beside foreground ones."""

    NONE = auto()  # they compute nothing, or run alone
    DECODE = auto()  # rows of those that decode
    PREFILL = auto()  # rows, and a chunk of their prompts


class StepTimes:
    """Measured times of steps in which a token is awaited: without prompt tokens, and of a prompt token beside it."""

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_LATEST)  # seconds of steps without prompt tokens
        self._token: deque[float] = deque(maxlen=_LATEST)  # seconds of a prompt token in the steps with some
        self._rows = 0  # decoding sequences of the last step without prompt tokens
        self.n_since_plain = 0  # steps with prompt tokens since the last one without

    def wants_plain(self, n_rows: int) -> bool:
        """True if the next step should have no prompt tokens, as the time of such a step is not known (any more)."""
        if not self._plain or self.n_since_plain >= STEPS_BETWEEN_PLAIN:
            return True
        return self.n_since_plain > 0 and abs(n_rows - self._rows) > ROWS_CHANGED * self._rows

    def observe(self, seconds: float, n_rows: int, n_prompt_tokens: int) -> None:
        """Takes the duration of a step in, by what it computed."""
        if n_prompt_tokens == 0:
            if abs(n_rows - self._rows) > ROWS_CHANGED * self._rows:
                self._plain.clear()
            self._plain.append(seconds)
            self._rows, self.n_since_plain = n_rows, 0
            return
        self.n_since_plain += 1
        if self._plain:  # a chunk that seems to cost nothing was measured beside a plain step that was too slow
            cost = max(seconds - statistics.median(self._plain), 0.05 * seconds)
            self._token.append(cost / n_prompt_tokens)

    @property
    def plain_s(self) -> float | None:
        """Seconds of a step without prompt tokens; None: not known yet."""
        return statistics.median(self._plain) if self._plain else None

    @property
    def token_s(self) -> float | None:
        """Seconds of a prompt token; None: not known yet."""
        return statistics.median(self._token) if self._token else None


class PrefillPacer:
    """Decides how many prompt tokens a step computes, and of which sequences.

    Args:
        limits: n_batch holds while no token is awaited; prefill_share and prefill_budget while one is.

    Attributes:
        is_mixed: background sequences run beside foreground ones in this step.
    """

    def __init__(self, limits: Limits) -> None:
        self.is_mixed = False
        self._limits = limits
        self._times = StepTimes()
        self._chunk = 0  # tokens of the last chunk of a long prompt
        self._n_long = 0  # of them, tokens in this step
        self._long: set[Sequence] = set()  # prompts that began as long ones
        self._saved_s = 0.0  # time that prompts have earned and not used
        self._steps_since_background = BACKGROUND_STEPS_UNTIL_KNOWN
        self._turn = BackgroundTurn.NONE
        self._without: deque[float] = deque(maxlen=_SAMPLES)  # seconds of steps without background rows, and with them
        self._with: deque[float] = deque(maxlen=_SAMPLES)

    def background_turn(self, is_mixed: bool) -> BackgroundTurn:
        """Part of this step for background sequences. Call once per step, first.

        They share some of the steps; nearly all of them, where their rows turn out to cost next to nothing.

        Args:
            is_mixed: background sequences run beside foreground ones.
        """
        self.is_mixed = is_mixed
        cost_is_known = len(self._with) >= _FEWEST_SAMPLES
        pause = BACKGROUND_STEPS_BETWEEN if cost_is_known else BACKGROUND_STEPS_UNTIL_KNOWN
        has_turn = is_mixed and self._steps_since_background >= pause
        self._steps_since_background = 0 if has_turn else self._steps_since_background + 1
        if has_turn:
            self._turn = BackgroundTurn.PREFILL
        elif is_mixed and self._steps_since_background % STEPS_WITH != 0 and self._rows_are_cheap():
            self._turn = BackgroundTurn.DECODE
        else:
            self._turn = BackgroundTurn.NONE
        return self._turn

    def _rows_are_cheap(self) -> bool:
        if min(len(self._with), len(self._without)) < _FEWEST_SAMPLES:
            return False
        without = statistics.median(self._without)
        return 0 < statistics.median(self._with) <= MOST_LONGER * without

    def observe(self, seconds: float, n_rows: int, n_prompt_tokens: int, token_was_awaited: bool) -> None:
        """Takes the duration of this step in.

        Args:
            n_rows: decoding sequences that computed.
            n_prompt_tokens: prompt tokens that were computed.
            token_was_awaited: as `choose` had it.
        """
        if self.is_mixed and n_prompt_tokens == 0:
            (self._without if self._turn is BackgroundTurn.NONE else self._with).append(seconds)
        if token_was_awaited and n_rows and self._turn is BackgroundTurn.NONE:
            self._times.observe(seconds, n_rows, n_prompt_tokens)
            plain = self._times.plain_s or 0.0
            if self._n_long and n_prompt_tokens:  # a step that something else held up must not stop prompts for long
                cost = max(0.0, seconds - plain) * min(1.0, self._n_long / n_prompt_tokens)
                self._saved_s = max(self._saved_s - cost, -MOST_SAVED * plain)

    def choose(self, prompts: list[Sequence], token_is_awaited: bool, n_rows: int = 1) -> tuple[list[Sequence], int]:
        """The sequences that may compute prompt tokens in this step, first those that go first, and how many tokens in
        all.

        Args:
            token_is_awaited: this step decodes, and a caller waits for its next token.
            n_rows: sequences that decode in it.
        """
        self._n_long = 0
        self._long = {s for s in prompts if s.num_pending > SHORT or s in self._long}
        if not token_is_awaited:
            return prompts, self._limits.n_batch
        most = min(self._limits.prefill_budget, self._limits.n_batch)
        if not prompts or self._limits.prefill_share >= 1:
            return prompts, most
        short = [s for s in prompts if s not in self._long]
        long = [s for s in prompts if s in self._long]
        if not long or self._turn is BackgroundTurn.PREFILL:
            return short, most
        if self._times.wants_plain(n_rows):  # where short ones keep coming, they wait for it a step now and then
            return [] if self._times.n_since_plain >= 2 * STEPS_BETWEEN_PLAIN else short, most
        chunk = self._affordable_chunk()
        if chunk < LEAST_CHUNK:
            return short, most
        self._chunk = chunk
        if long[0].num_pending <= TAIL * chunk:
            chunk = max(chunk, long[0].num_pending)
        n_short = sum(s.num_pending for s in short)
        self._n_long = chunk
        # a second long prompt would cost a pass of its own on a split KV cache
        return [*short, *(long if self._limits.is_unified else long[:1])], min(n_short + chunk, most)

    def _affordable_chunk(self) -> int:
        """Prompt tokens that the time of prompts pays for, with what this step adds to it."""
        plain_s, token_s = self._times.plain_s, self._times.token_s
        assert plain_s is not None
        earned = self._limits.prefill_share / (1 - self._limits.prefill_share)
        self._saved_s = min(self._saved_s + earned * plain_s, max(earned, MOST_SAVED) * plain_s)
        if not token_s:
            return FIRST_CHUNK
        return int(min(self._saved_s / token_s, MOST_GROWTH * max(self._chunk, LEAST_CHUNK)))

    def background_chunk(self) -> int:
        """Prompt tokens of background sequences in a step that they share: such as take no longer than a plain step."""
        plain_s, token_s = self._times.plain_s, self._times.token_s
        affordable = max(LEAST_CHUNK, int(plain_s / token_s)) if plain_s and token_s else BACKGROUND_CHUNK
        return min(affordable, BACKGROUND_CHUNK, self._limits.n_batch)
