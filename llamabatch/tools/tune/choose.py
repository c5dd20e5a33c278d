"""Which of several ways is the best, from repeated measurements that took turns. Figures in, a choice out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from llamabatch.planning.profile import MARGIN

Figures = Mapping[str, float]
"""Milliseconds by workload: less is better."""

LEAST_ROUNDS = 2


@dataclass(frozen=True)
class Choice:
    """What was measured, and what follows from it.

    Attributes:
        default: label of the candidate that the rule would take. chosen: label of the one to take.
        gains: for each candidate, how many times as fast as the default it is: the median over the rounds. None where
            it was not measured.
        noise: for each candidate, how far the rounds' gains lie from their median, as a median.
        rounds: for each candidate, its figures in each round.
    """

    default: str
    chosen: str
    gains: Mapping[str, float | None]
    noise: Mapping[str, float]
    rounds: Mapping[str, tuple[Figures, ...]]

    @property
    def changed(self) -> bool:
        return self.chosen != self.default

    def median(self, label: str) -> dict[str, float]:
        """The figures of a candidate; empty where it was not measured."""
        return medians(self.rounds[label])


def choose(rounds: Mapping[str, tuple[Figures, ...]], default: str, margin: float = MARGIN) -> Choice:
    """Takes the fastest candidate, if it beats the default by more than the margin and by more than twice the noise.

    The gain of a candidate in a round is the geometric mean, over the workloads, of the default's time over its own in
    that round: what slows both down for a while falls out, and each workload counts alike, however long it takes.
    Of candidates whose gains lie within the margin of the best, the first that was given wins. A candidate without as
    many rounds as the default, or with a single one, is not taken.

    Args:
        rounds: figures by label, in the order of preference; figures of the same place were measured one after another.
    """
    gains: dict[str, float | None] = {}
    noise: dict[str, float] = {}
    better: list[str] = []
    base = rounds[default]
    for label, figures in rounds.items():
        ratios = [_gain(before, after) for before, after in zip(base, figures, strict=False)]
        if not ratios:
            gains[label], noise[label] = None, 0.0
            continue
        gain = gains[label] = statistics.median(ratios)
        noise[label] = statistics.median(abs(ratio - gain) for ratio in ratios)
        if (
            label != default
            and len(ratios) >= max(LEAST_ROUNDS, len(base))
            and gain - 1 > max(margin, 2 * noise[label])
        ):
            better.append(label)
    chosen = default
    if better:
        best = max(gains[label] or 0.0 for label in better)
        chosen = next(label for label in better if (gains[label] or 0.0) >= best * (1 - margin))
    return Choice(default, chosen, gains, noise, dict(rounds))


def medians(rounds: tuple[Figures, ...]) -> dict[str, float]:
    """The median of each workload over the rounds that have it."""
    names = dict.fromkeys(name for figures in rounds for name in figures)
    return {name: statistics.median(figures[name] for figures in rounds if name in figures) for name in names}


def _gain(before: Figures, after: Figures) -> float:
    names = [name for name in before if name in after]
    return math.exp(statistics.fmean(math.log(before[name] / after[name]) for name in names))
