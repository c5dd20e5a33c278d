"""Long prompts and background work beside people who wait for their next token: whose turn it is. Pure Python."""

from __future__ import annotations

from llamabatch.request import Sequence
from llamabatch.step import Limits

# Steps of talkers between two with a chunk of long prompts. Of the gaps between their tokens, 1 in 30 is then long, and
# the p95 is that of a plain step, however many long prompts arrive.
STEPS_BETWEEN = 29
# Prompts up to this length never wait for a turn, nor does anyone if prefill_budget is no larger: a decode step of 16
# rows takes 45 ms, 64 prompt tokens 80 ms (0.5B Q8_0).
SHORT = 64
# Prompt tokens of background sequences in a step that they share with others.
BACKGROUND_CHUNK = 128


class Turns:
    """How many prompt tokens a step computes, and whose.

    Args:
        limits: n_batch holds while nobody talks, prefill_budget while somebody does.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._since = STEPS_BETWEEN  # steps since one with a long prompt or background sequences in it
        self._aside = STEPS_BETWEEN  # steps since background sequences had theirs
        self._beside = self._joined = False  # this step: do they run beside others, do they compute

    def background_joins(self, beside: bool) -> bool:
        """Asked first in each step: do background sequences compute, too? The steps in which they do are those in which
        long prompts have their turn.

        Args:
            beside: background sequences run, and others do.
        """
        self._beside = beside
        self._joined = beside and min(self._since, self._aside) >= STEPS_BETWEEN
        self._aside = 0 if self._joined else self._aside + 1
        return self._joined

    def choose(self, prompts: list[Sequence], somebody_talks: bool) -> tuple[list[Sequence], int]:
        """Which of these sequences may compute prompt tokens in this step, and how many tokens in all.

        Args:
            somebody_talks: somebody waits for the next token.
        """
        if not somebody_talks:
            self._pass() if self._beside else self._rest()
            return prompts, self._limits.n_batch
        budget = min(self._limits.prefill_budget, self._limits.n_batch)
        short = [s for s in prompts if s.num_pending <= SHORT]
        if len(short) < len(prompts) and budget > SHORT and (self._joined or self._since >= STEPS_BETWEEN):
            self._since = 0
            return prompts, budget
        self._pass()
        return (short if budget > SHORT else prompts), budget

    def _pass(self) -> None:
        self._since = 0 if self._joined else self._since + 1

    def _rest(self) -> None:
        self._since = STEPS_BETWEEN
