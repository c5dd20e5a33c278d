"""Long prompts beside people who wait for their next token: whose turn it is. Pure Python."""

from __future__ import annotations

from llamabatch.request import Sequence
from llamabatch.step import Limits

# Steps of talkers between two with a long chunk of prompts. Of the gaps between their tokens, 1 in 25 is then long, and
# the p95 is that of a plain step, however many prompts arrive.
STEPS_BETWEEN = 24
# Prompt tokens that make a step little longer: a decode step of 16 rows takes 55 ms, these 80 ms (0.5B Q8_0).
SHORT = 64


class Turns:
    """How many prompt tokens a step computes, and whose.

    Args:
        limits: n_batch holds while nobody talks, prefill_budget while somebody does.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._since = STEPS_BETWEEN

    def choose(self, prompts: list[Sequence], somebody_talks: bool) -> tuple[list[Sequence], int]:
        """Which of these sequences may compute prompt tokens in this step, and how many tokens in all."""
        if not somebody_talks:
            self._since = STEPS_BETWEEN
            return prompts, self._limits.n_batch
        budget = min(self._limits.prefill_budget, self._limits.n_batch)
        if min(budget, sum(s.num_pending for s in prompts)) <= SHORT:
            self._since += 1
            return prompts, budget
        if self._since >= STEPS_BETWEEN:
            self._since = 0
            return prompts, budget
        self._since += 1
        return [s for s in prompts if s.num_pending <= SHORT], SHORT
