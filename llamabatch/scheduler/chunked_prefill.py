"""Long prompts and background work beside people who wait for their next token: whose turn it is. Pure Python."""

from __future__ import annotations

import statistics
from collections import deque

from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.output import Limits

# Steps of talkers between two with a chunk of long prompts. Of the gaps between their tokens, 1 in 30 is then long, and
# the p95 is that of a plain step, however many long prompts arrive.
STEPS_BETWEEN = 29
# Prompts up to this length never wait for a turn, nor does anyone if prefill_budget is no larger: a decode step of 16
# rows takes 45 ms, 64 prompt tokens 80 ms (0.5B Q8_0).
SHORT = 64
# Prompt tokens of background sequences in a step that they share with others.
BACKGROUND_CHUNK = 128
# Steps between two that they share: every second turn, 1 gap in 60, which leaves room in the p95 for what else delays
# a step now and then. Each turn, until it is known what their rows cost.
BACKGROUND_STEPS_BETWEEN = 2 * STEPS_BETWEEN + 1
# Where rows cost next to nothing, background sequences join in all steps but one in so many, which shows what a step
# without them takes. "Next to nothing": the median of the last steps with them is at most so much longer.
STEPS_WITH = 8
MOST_LONGER = 1.1
_SAMPLES = 15
_FEWEST_SAMPLES = 5


class PrefillPacer:
    """How many prompt tokens a step computes, and whose.

    Args:
        limits: n_batch holds while nobody talks, prefill_budget while somebody does.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._since = STEPS_BETWEEN  # steps since one with a long prompt or background sequences in it
        self._aside = STEPS_BETWEEN  # steps since background sequences had theirs
        self.beside = False  # this step: do they run beside others?
        self.is_long = False  # is it their turn, so that they may compute prompt tokens?
        self._joined = False  # do they compute?
        self._without: deque[float] = deque(maxlen=_SAMPLES)  # seconds of steps without them, and with them
        self._with: deque[float] = deque(maxlen=_SAMPLES)

    def background_joins(self, beside: bool) -> bool:
        """Asked first in each step: do background sequences compute, too? The steps in which they do are some of those
        in which long prompts have their turn; where their rows turn out to cost next to nothing, nearly all.

        Args:
            beside: background sequences run, and others do.
        """
        self.beside = beside
        known = len(self._with) >= _FEWEST_SAMPLES
        enough = BACKGROUND_STEPS_BETWEEN if known else STEPS_BETWEEN
        self.is_long = beside and self._since >= STEPS_BETWEEN and self._aside >= enough
        self._aside = 0 if self.is_long else self._aside + 1
        self._joined = self.is_long or (beside and self._aside % STEPS_WITH != 0 and self._rows_are_cheap())
        return self._joined

    def observe(self, seconds: float) -> None:
        """How long this step took, where background sequences run beside others and nobody computed prompt tokens."""
        (self._with if self._joined else self._without).append(seconds)

    def _rows_are_cheap(self) -> bool:
        if min(len(self._with), len(self._without)) < _FEWEST_SAMPLES:
            return False
        without = statistics.median(self._without)
        return 0 < statistics.median(self._with) <= MOST_LONGER * without

    def choose(self, prompts: list[Sequence], somebody_talks: bool) -> tuple[list[Sequence], int]:
        """Which of these sequences may compute prompt tokens in this step, and how many tokens in all.

        Args:
            somebody_talks: somebody waits for the next token.
        """
        if not somebody_talks:
            self._pass() if self.beside else self._rest()
            return prompts, self._limits.n_batch
        budget = min(self._limits.prefill_budget, self._limits.n_batch)
        short = [s for s in prompts if s.num_pending <= SHORT]
        if len(short) < len(prompts) and budget > SHORT and (self.is_long or self._since >= STEPS_BETWEEN):
            self._since = 0
            return prompts, budget
        self._pass()
        return (short if budget > SHORT else prompts), budget

    def _pass(self) -> None:
        self._since = 0 if self.is_long else self._since + 1

    def _rest(self) -> None:
        self._since = STEPS_BETWEEN
