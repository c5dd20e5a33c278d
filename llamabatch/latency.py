"""How many rows keep the time between two tokens below a limit, from what steps were measured to take. Pure Python.

A row gets a token in each step, so the time between its tokens is that of a step, and longer where the step computes
prompt tokens of others, too. Long prompts do that in one step of 30 (turns.py), short ones in every step in which one
arrives. Each sequence is taken to write OUTPUT tokens and to be followed by the next: with r rows a prompt arrives in
r / OUTPUT of the steps. Where both kinds together come in more than 5 % of the steps, a p95 counts a short prompt in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llamabatch.checks import counted
from llamabatch.errors import ConfigError
from llamabatch.profile import Stair, best_rows
from llamabatch.turns import SHORT, STEPS_BETWEEN

OUTPUT = 256  # tokens: what a request may write where it does not say
_P95 = 0.05


@dataclass(frozen=True)
class Gap:
    """With this many rows the p95 of the time between two tokens is so long, in milliseconds."""

    rows: int
    p95_ms: float


@dataclass(frozen=True)
class Latency:
    """The answer to a limit.

    Attributes:
        limit_ms: of the p95 of the time between two tokens.
        rows: the slots that make the most tokens/s within it; the fewest within 3 % of that.
        gaps: by rising number of rows.
        prompt_ms: that a prompt token takes.
    """

    limit_ms: float
    rows: int
    gaps: tuple[Gap, ...]
    prompt_ms: float

    @property
    def p95_ms(self) -> float:
        """With the rows that were chosen."""
        return next(gap.p95_ms for gap in self.gaps if gap.rows == self.rows)


def gap_of(stair: Stair, prompt_ms: float) -> Gap:
    """The p95 between two tokens of one of so many rows that write all the time."""
    step = stair.step_ms if stair.p95_ms is None else stair.p95_ms
    beside_prompts = 1 / (STEPS_BETWEEN + 1) + stair.rows / OUTPUT
    return Gap(stair.rows, step + (SHORT * prompt_ms if beside_prompts > _P95 else 0.0))


def choose_rows(stairs: Iterable[Stair], prompt_ms: float, limit_ms: float) -> Latency:
    """The number of slots for this limit. Raises ConfigError, with the least that can be had, where none keeps it."""
    stairs = sorted(stairs, key=lambda stair: stair.rows)
    gaps = tuple(gap_of(stair, prompt_ms) for stair in stairs)
    within = [stair for stair, gap in zip(stairs, gaps, strict=True) if gap.p95_ms <= limit_ms]
    rows = best_rows(within)
    if rows is None:
        least = min(gaps, key=lambda gap: gap.p95_ms)
        raise ConfigError(
            f"p95_inter_token_ms is {limit_ms:g}; the least that can be had here is {least.p95_ms:.3g}, with "
            f"{counted(least.rows, 'row')}"
        )
    return Latency(limit_ms, rows, gaps, prompt_ms)
