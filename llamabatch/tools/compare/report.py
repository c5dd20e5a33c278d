"""The figures of a comparison: a row per strategy, ratios between rows, and a sweep over the number of slots."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from llamabatch.engine.stats import percentile
from llamabatch.tools.compare.measure import BASELINE, Measurement, slots_of
from llamabatch.tools.machine_facts import MachineFacts
from llamabatch.tools.processes import OthersUse
from llamabatch.tools.workload import Workload
from llamabatch.utils.checks import counted

REFERENCE = "sequential"


@dataclass(frozen=True)
class Spread:
    """The p50 and p95 of a time, over requests or over tokens, in seconds; None without values."""

    p50: float | None = None
    p95: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        known = [value for value in values if value is not None]
        return cls(percentile(known, 50), percentile(known, 95))


@dataclass(frozen=True)
class Row:
    """The figures of one strategy.

    Attributes:
        strategy: name of the strategy as given, or "baseline".
        chosen: the strategy that "auto" chose, else None.
        n_slots: number of slots of one engine.
        instances: number of engines.
        error: the reason for missing figures, or the number of failed requests; None if nothing failed.
        wall_s: seconds from the submission of all prompts to the last output.
        requests_per_s: finished requests, divided by wall_s.
        tokens_per_s: generated tokens, divided by wall_s.
        ttft: seconds from the submission of a request to its first token, including the time in the queue.
        latency: seconds from the submission of a request to its last token.
        inter_token: seconds between neighbouring tokens of a request, over all requests.
        peak_memory_bytes: sum of the processes' peaks of resident memory.
        rows_per_step: mean number of sequences in a decode call.
        passes_per_step: mean number of passes over the weights in a decode call.
        equal: share of outputs with the same tokens as with "sequential", 0 to 1; None if "sequential" did not run.
        speed_up: tokens_per_s relative to the baseline, or to "sequential" without a baseline.
        rounds: tokens_per_s of each round; all other figures are from the median round.
        measurement: the measurement of the median round.
    """

    strategy: str
    chosen: str | None = None
    n_slots: int = 1
    instances: int = 1
    error: str | None = None
    wall_s: float = 0.0
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    ttft: Spread = Spread()
    inter_token: Spread = Spread()
    latency: Spread = Spread()
    peak_memory_bytes: int | None = None
    rows_per_step: float | None = None
    passes_per_step: float | None = None
    equal: float | None = None
    speed_up: float | None = None
    rounds: tuple[float, ...] = ()
    measurement: Measurement | None = None

    @property
    def name(self) -> str:
        """The name to display, such as "auto (batched)"."""
        if not self.chosen:
            return self.strategy
        several = f" × {self.instances}" if self.instances > 1 and self.chosen != "multi-instance" else ""
        return f"{self.strategy} ({self.chosen}{several})"

    @property
    def measured(self) -> bool:
        """True if there are figures."""
        return self.tokens_per_s > 0


@dataclass(frozen=True)
class Sweep:
    """The batched strategy, measured with several numbers of slots.

    Attributes:
        rows: the figures for each number of slots, the smallest number first.
        efficiency: for each row, tokens/s per slot relative to the first measured row; None for a failed row.
        knee: the best number of slots; more slots than this do not pay. None if nothing was measured.
    """

    rows: tuple[Row, ...]
    efficiency: tuple[float | None, ...]
    knee: int | None


@dataclass(frozen=True)
class Advice:
    """The advised strategy, and one sentence with the reasons."""

    strategy: str
    sentence: str


@dataclass(frozen=True)
class Report:
    """A whole comparison.

    Attributes:
        created: the time in UTC (ISO 8601).
        others: the CPU use of other processes during the comparison.
    """

    created: str
    machine: MachineFacts
    model: str
    model_bytes: int
    workload: Workload
    max_tokens: int
    rows: tuple[Row, ...]
    sweep: Sweep | None
    advice: Advice | None
    others: OthersUse = OthersUse()

    @property
    def failed(self) -> bool:
        """True if a row has an error."""
        return any(row.error is not None for row in (*self.rows, *(self.sweep.rows if self.sweep else ())))


def row(strategy: str, rounds: list[Measurement]) -> Row:
    """Returns the row of a strategy: the figures of the round with the median tokens/s. If the number of rounds is
    even, the lower of the two middle rounds counts."""
    speeds = [_tokens(measurement) / measurement.wall_s for measurement in rounds]
    measurement = sorted(zip(speeds, range(len(rounds)), rounds, strict=True))[(len(rounds) - 1) // 2][2]
    good = [output for output in measurement.outputs if output.error is None]
    bad = [output for output in measurement.outputs if output.error is not None]
    config, stats, n = measurement.plan.config, measurement.stats, len(measurement.outputs)
    return Row(
        strategy=strategy,
        chosen=config.strategy if strategy == "auto" else None,
        n_slots=1 if strategy == BASELINE else slots_of(measurement.plan),
        instances=config.instances,
        error=f"{len(bad)} of {counted(n, 'request')} failed: {bad[0].error}" if bad else None,
        wall_s=measurement.wall_s,
        requests_per_s=len(good) / measurement.wall_s,
        tokens_per_s=_tokens(measurement) / measurement.wall_s,
        ttft=Spread.of(output.timings.ttft_s for output in good),
        inter_token=Spread.of(gap for output in good for gap in output.timings.inter_token_s),
        latency=Spread.of(output.timings.total_s for output in good),
        peak_memory_bytes=measurement.peak_memory_bytes,
        rows_per_step=stats.rows_per_step if stats.decode_calls else None,
        passes_per_step=stats.passes_per_step if stats.decode_calls else None,
        rounds=tuple(speeds),
        measurement=measurement,
    )


def compared(rows: Iterable[Row], against: Iterable[Row]) -> tuple[Row, ...]:
    """Fills in `equal` and `speed_up` of the rows. `against` contains the rows of "sequential" and of the baseline."""
    by_name = {row.strategy: row for row in against if row.measured}
    reference = by_name.get(REFERENCE)
    slow = by_name.get(BASELINE) or reference
    return tuple(
        replace(
            row,
            equal=_equal(row, reference) if row.measured and reference is not None else None,
            speed_up=row.tokens_per_s / slow.tokens_per_s if row.measured and slow is not None else None,
        )
        for row in rows
    )


def _tokens(measurement: Measurement) -> int:
    return sum(len(output.token_ids) for output in measurement.outputs if output.error is None)


def _equal(row: Row, reference: Row) -> float | None:
    if row.measurement is None or reference.measurement is None:
        return None
    pairs = list(zip(row.measurement.outputs, reference.measurement.outputs, strict=True))
    return sum(a.error is None and a.token_ids == b.token_ids for a, b in pairs) / len(pairs)


MIN_GAIN = 0.10  # doubling the slots is worth its memory and latency if the throughput rises by at least this share


def sweep(rows: Iterable[Row]) -> Sweep:
    """Makes a Sweep. `rows` has a row for each number of slots, in any order."""
    ordered = tuple(sorted(rows, key=lambda row: row.n_slots))
    return Sweep(
        ordered, efficiency(ordered), knee([(row.n_slots, row.tokens_per_s) for row in ordered if row.measured])
    )


def efficiency(rows: tuple[Row, ...]) -> tuple[float | None, ...]:
    """Returns tokens/s per slot, relative to the smallest measured size.

    The result is the parallel efficiency, T(n) n0 / (T(n0) n), where T(n) is tokens/s with n slots and n0 the smallest
    size. 1 means that every slot is as fast as one slot alone. 1/n means that n slots together are no faster than one.
    """
    first = next((row for row in rows if row.measured), None)
    if first is None:
        return tuple(None for _ in rows)
    alone = first.tokens_per_s / first.n_slots
    return tuple(row.tokens_per_s / row.n_slots / alone if row.measured else None for row in rows)


def knee(points: list[tuple[int, float]]) -> int | None:
    """Returns the best number of slots; more slots than this do not pay. None if there are no points.

    The smallest size is the first knee k. A larger size n becomes the knee if T(n) >= T(k) * 1.1 ** log2(n / k), where
    T(n) is tokens/s with n slots. The distance from the chord (Kneedle: Satopää et al., 2011) is not used for two
    reasons. First, step time rises in stairs, and Kneedle would find the first stair. Second, Kneedle finds no knee if
    the curve still rises at its end.

    Args:
        points: pairs of a number of slots and tokens/s, the smallest number first.
    """
    if not points:
        return None
    best, speed = points[0]
    for slots, tokens_per_s in points[1:]:
        if tokens_per_s >= speed * (1 + MIN_GAIN) ** math.log2(slots / best):
            best, speed = slots, tokens_per_s
    return best
