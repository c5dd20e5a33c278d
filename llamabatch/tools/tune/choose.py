"""Chooses the best candidate, and the number of slots for a latency limit, from measurements. Pure Python."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llamabatch.errors import ConfigError
from llamabatch.planning.profile import MARGIN, Stair, best_rows
from llamabatch.scheduler.chunked_prefill import SHORT
from llamabatch.utils.checks import counted

Figures = Mapping[str, float]
"""Milliseconds by workload; less is better."""

LEAST_ROUNDS = 2
OUTPUT = 256  # assumed number of output tokens of a request
_P95 = 0.05


@dataclass(frozen=True)
class Choice:
    """The chosen candidate, with all measurements.

    Attributes:
        default: label of the candidate that is chosen by the rules, without measurements.
        chosen: label of the chosen candidate.
        gains: for each label the median of the rounds' gains (see `choose`); None: not measured.
        noise: for each label the median distance of a round's gain from the median gain.
        rounds: for each label the figures of each round.
    """

    default: str
    chosen: str
    gains: Mapping[str, float | None]
    noise: Mapping[str, float]
    rounds: Mapping[str, tuple[Figures, ...]]

    @property
    def changed(self) -> bool:
        """True if the chosen candidate is not the default."""
        return self.chosen != self.default

    def median(self, label: str) -> dict[str, float]:
        """Returns the median figures of a candidate; empty if it was not measured."""
        return medians(self.rounds[label])


def choose(rounds: Mapping[str, tuple[Figures, ...]], default: str) -> Choice:
    """Chooses a candidate. The default stays unless another candidate gains more than the margin and twice the noise.

    For each round and workload, the default's time is divided by the candidate's time. The gain of the round is the
    geometric mean over the workloads. So a disturbance that slows down default and candidate cancels out, and all
    workloads count alike. Of the candidates that beat the default, the first within the margin of the best gain is
    chosen. A candidate with only one round, or with fewer rounds than the default, is never chosen.

    Args:
        rounds: for each label the figures of each round. Preferred candidates come first. A round measures all
            candidates.
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
            and gain - 1 > max(MARGIN, 2 * noise[label])
        ):
            better.append(label)
    chosen = default
    if better:
        best = max(gains[label] or 0.0 for label in better)
        chosen = next(label for label in better if (gains[label] or 0.0) >= best * (1 - MARGIN))
    return Choice(default, chosen, gains, noise, dict(rounds))


def medians(rounds: tuple[Figures, ...]) -> dict[str, float]:
    """Returns the median of each workload over the rounds that measured the workload."""
    names = dict.fromkeys(name for figures in rounds for name in figures)
    return {name: statistics.median(figures[name] for figures in rounds if name in figures) for name in names}


def _gain(before: Figures, after: Figures) -> float:
    names = [name for name in before if name in after]
    return math.exp(statistics.fmean(math.log(before[name] / after[name]) for name in names))


@dataclass(frozen=True)
class Gap:
    """The p95 of the time between two tokens, in milliseconds, if `rows` sequences decode at once."""

    rows: int
    p95_ms: float


@dataclass(frozen=True)
class Latency:
    """The number of slots that keeps a latency limit.

    Attributes:
        limit_ms: limit of the p95 of the time between two tokens, in milliseconds.
        rows: the chosen number of slots: of all numbers within the limit, the smallest with at least 97 % of the
            highest tokens/s.
        gaps: the p95 for each measured number of rows, the smallest number first.
        prompt_ms: time of one prompt token, in milliseconds.
    """

    limit_ms: float
    rows: int
    gaps: tuple[Gap, ...]
    prompt_ms: float

    @property
    def p95_ms(self) -> float:
        """The p95 with the chosen rows, in milliseconds."""
        return next(gap.p95_ms for gap in self.gaps if gap.rows == self.rows)


def gap_of(stair: Stair, prompt_ms: float) -> Gap:
    """Returns the p95 of the time between two tokens of a sequence if `stair.rows` sequences decode all the time."""
    step = stair.step_ms if stair.p95_ms is None else stair.p95_ms
    # Each row gets a new request every OUTPUT steps, and one step computes the new prompt. If more than 5 % of the
    # steps compute a prompt, the p95 includes the prompt's time. The prompt is assumed to have SHORT tokens.
    return Gap(stair.rows, step + (SHORT * prompt_ms if stair.rows / OUTPUT > _P95 else 0.0))


def choose_rows(stairs: Iterable[Stair], prompt_ms: float, limit_ms: float) -> Latency:
    """Returns the number of slots for a latency limit. Raises ConfigError if no number of slots keeps the limit. The
    message names the lowest possible latency."""
    stairs = sorted(stairs, key=lambda stair: stair.rows)
    gaps = tuple(gap_of(stair, prompt_ms) for stair in stairs)
    within = [stair for stair, gap in zip(stairs, gaps, strict=True) if gap.p95_ms <= limit_ms]
    rows = best_rows(within)
    if rows is None:
        least = min(gaps, key=lambda gap: gap.p95_ms)
        raise ConfigError(
            f"p95_inter_token_ms is {limit_ms:g}; the least that is possible here is {least.p95_ms:.3g}, with "
            f"{counted(least.rows, 'row')}"
        )
    return Latency(limit_ms, rows, gaps, prompt_ms)
