"""What the figures by batch size say: efficiency, and the size where more stop paying."""

from __future__ import annotations

import math
from collections.abc import Iterable

from llamabatch.compare.report import Row, Sweep

MIN_GAIN = 0.10  # throughput that a doubling must bring, to pay for its memory and its latency


def sweep(rows: Iterable[Row]) -> Sweep:
    """Rows of the batched strategy, one for each number of slots, in rising order."""
    ordered = tuple(sorted(rows, key=lambda row: row.n_slots))
    return Sweep(
        ordered, efficiency(ordered), knee([(row.n_slots, row.tokens_per_s) for row in ordered if row.measured])
    )


def efficiency(rows: tuple[Row, ...]) -> tuple[float | None, ...]:
    """Tokens/s per slot, relative to the smallest size that was measured: parallel efficiency, T(n) n0 / (T(n0) n).

    1 means that every slot is as fast as the first alone; 1/n that n slots are no faster than one.
    """
    first = next((row for row in rows if row.measured), None)
    if first is None:
        return tuple(None for _ in rows)
    alone = first.tokens_per_s / first.n_slots
    return tuple(row.tokens_per_s / row.n_slots / alone if row.measured else None for row in rows)


def knee(points: list[tuple[int, float]]) -> int | None:
    """The last size that still brought 10 % more throughput a doubling than the knee before it.

    From the smallest size on, a size n becomes the knee k if T(n) >= T(k) * 1.1 ** log2(n / k). The distance from the
    chord (Kneedle: Satopää et al., 2011) is not used: step time is a staircase, on which it finds the first stair,
    and a curve that still rises at its end has no such point, though its best size is then the last.

    Args:
        points: (slots, tokens/s) by rising slots.
    """
    if not points:
        return None
    best, speed = points[0]
    for slots, tokens_per_s in points[1:]:
        if tokens_per_s >= speed * (1 + MIN_GAIN) ** math.log2(slots / best):
            best, speed = slots, tokens_per_s
    return best
