"""Prompt tokens and background work of a step beside sequences that wait for their next token. Pure Python."""

from __future__ import annotations

import statistics
from collections import deque
from enum import Enum, auto

from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.output import Limits

# Steps of decoding sequences between two with a chunk of long prompts. Of the gaps between their tokens, 1 in 30 is
# then long, and the p95 is that of a plain step, however many long prompts arrive.
STEPS_BETWEEN = 29
# Prompts up to this length never wait for a turn, nor does any prompt if prefill_budget is no larger: a decode step of
# 16 rows takes 45 ms, 64 prompt tokens 80 ms (0.5B Q8_0).
SHORT = 64
# Prompt tokens of background sequences in a step that they share with others.
BACKGROUND_CHUNK = 128
# Steps between two that background sequences share, once the cost of their rows is known: every second turn, so that
# 1 gap in 60 is long, which leaves room in the p95 for other delays. Until then they share every turn.
BACKGROUND_STEPS_BETWEEN = 2 * STEPS_BETWEEN + 1
# Where rows cost next to nothing, background sequences join in all steps but one in so many, which shows what a step
# without them takes. "Next to nothing": the median of the last steps with them is at most so much longer.
STEPS_WITH = 8
MOST_LONGER = 1.1
_SAMPLES = 15
_FEWEST_SAMPLES = 5


class BackgroundTurn(Enum):
    """Part of a step that background sequences have beside foreground ones."""

    NONE = auto()  # they compute nothing, or run alone
    DECODE = auto()  # rows of those that decode
    PREFILL = auto()  # rows, and a chunk of their prompts


class PrefillPacer:
    """Decides how many prompt tokens a step computes, and of which sequences.

    Args:
        limits: n_batch holds while no token is awaited, prefill_budget while one is.

    Attributes:
        is_mixed: background sequences run beside foreground ones in this step.
    """

    def __init__(self, limits: Limits) -> None:
        self.is_mixed = False
        self._limits = limits
        self._steps_since_long = STEPS_BETWEEN  # since a step with a long prompt or a background turn in it
        self._steps_since_background = STEPS_BETWEEN
        self._turn = BackgroundTurn.NONE
        self._without: deque[float] = deque(maxlen=_SAMPLES)  # seconds of steps without background rows, and with them
        self._with: deque[float] = deque(maxlen=_SAMPLES)

    def background_turn(self, is_mixed: bool) -> BackgroundTurn:
        """Part of this step for background sequences. Call once per step, first.

        They share some of the steps in which long prompts have their turn; nearly all steps, where their rows turn out
        to cost next to nothing.

        Args:
            is_mixed: background sequences run beside foreground ones.
        """
        self.is_mixed = is_mixed
        cost_is_known = len(self._with) >= _FEWEST_SAMPLES
        pause = BACKGROUND_STEPS_BETWEEN if cost_is_known else STEPS_BETWEEN
        has_turn = is_mixed and self._steps_since_long >= STEPS_BETWEEN and self._steps_since_background >= pause
        self._steps_since_background = 0 if has_turn else self._steps_since_background + 1
        if has_turn:
            self._turn = BackgroundTurn.PREFILL
        elif is_mixed and self._steps_since_background % STEPS_WITH != 0 and self._rows_are_cheap():
            self._turn = BackgroundTurn.DECODE
        else:
            self._turn = BackgroundTurn.NONE
        return self._turn

    def observe(self, seconds: float) -> None:
        """Duration of this step. Call where it is mixed and computed no prompt tokens."""
        (self._without if self._turn is BackgroundTurn.NONE else self._with).append(seconds)

    def _rows_are_cheap(self) -> bool:
        if min(len(self._with), len(self._without)) < _FEWEST_SAMPLES:
            return False
        without = statistics.median(self._without)
        return 0 < statistics.median(self._with) <= MOST_LONGER * without

    def choose(self, prompts: list[Sequence], token_is_awaited: bool) -> tuple[list[Sequence], int]:
        """The sequences that may compute prompt tokens in this step, and how many tokens in all.

        Args:
            token_is_awaited: this step decodes, and a caller waits for its next token.
        """
        has_turn = self._turn is BackgroundTurn.PREFILL
        if not token_is_awaited:
            if self.is_mixed:
                self._count_step(is_long=has_turn)
            else:
                self._steps_since_long = STEPS_BETWEEN
            return prompts, self._limits.n_batch
        budget = min(self._limits.prefill_budget, self._limits.n_batch)
        if budget <= SHORT:
            self._count_step(is_long=has_turn)
            return prompts, budget
        short = [s for s in prompts if s.num_pending <= SHORT]
        if len(short) < len(prompts) and (has_turn or self._steps_since_long >= STEPS_BETWEEN):
            self._count_step(is_long=True)
            return prompts, budget
        self._count_step(is_long=has_turn)
        return short, budget

    def _count_step(self, is_long: bool) -> None:
        self._steps_since_long = 0 if is_long else self._steps_since_long + 1
