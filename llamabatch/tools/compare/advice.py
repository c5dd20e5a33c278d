"""Chooses the strategy to advise from the figures of a comparison."""

from __future__ import annotations

from collections.abc import Iterable

from llamabatch.tools.compare.measure import BASELINE
from llamabatch.tools.compare.report import Advice, Row
from llamabatch.utils.format import seconds, significant, times

NOISE = 0.05  # two runs of the same work differ by up to this share
_FAR = 0.5  # if a row of a short run is faster than auto by more than this share, the advice is to measure longer
LEAST_ROUNDS, LEAST_S = 3, 60.0  # a row with fewer rounds and fewer seconds counts as short
EQUAL = 0.99  # the project promises this share of equal outputs

# Strategies, the simplest first: one request at a time, then several requests, then several processes. batched comes
# before static, because the requests of static wait until a batch is full, and again until the whole batch has ended.
_SIMPLEST_FIRST = ("sequential", "length-sorted", "interleaved", "batched", "static", "multi-instance")
_LOOP = "the loop over llama_cpp.Llama"


def advise(rows: Iterable[Row]) -> Advice | None:
    """Returns the advised strategy with its reasons, in one sentence; None if no row has figures.

    "auto" wins if it was measured, unless another row is more than 5 % faster and both were measured in three rounds or
    for 60 s. (Short runs differ by 5 % without a cause.) Otherwise the baseline wins if it is more than 5 % faster than
    all strategies. Otherwise only rows within 5 % of the highest tokens/s remain, and of these only rows within 5 % of
    the lowest median latency. The remaining row with the simplest strategy wins.

    Args:
        rows: the rows of one comparison; rows with errors are skipped.
    """
    measured = [row for row in rows if row.measured and row.error is None]
    auto = next((row for row in measured if row.strategy == "auto"), None)
    if auto is not None and len(measured) > 1:
        faster = [row for row in measured if row.tokens_per_s > auto.tokens_per_s * (1 + NOISE)]
        if not (_is_long(auto) and any(_is_long(row) for row in faster)):
            return Advice(auto.strategy, _for_auto(auto, faster, measured))
    ours = [row for row in measured if row.strategy != BASELINE and not _is_double(row)]
    ours = ours or [row for row in measured if row.strategy == "auto"]
    if not ours:
        return None
    best = max(ours, key=lambda row: row.tokens_per_s)
    loop = next((row for row in measured if row.strategy == BASELINE), None)
    if loop is not None and loop.tokens_per_s > best.tokens_per_s * (1 + NOISE):
        return Advice(BASELINE, _for_the_loop(loop, best))
    near = [row for row in ours if row.tokens_per_s >= best.tokens_per_s * (1 - NOISE)]
    soonest = min(_latency(row) for row in near)
    pick = min((row for row in near if _latency(row) <= soonest * (1 + NOISE)), key=_complexity)
    slow = loop or next((row for row in ours if row.strategy == "sequential" and row is not pick), None)
    others = [row for row in ours if row is not pick and row is not slow]
    why = _speed(pick, slow) + (_among_equals(pick, near, best) if len(near) > 1 else _ahead(pick, others))
    but = _memory(pick, ours) + _first_words(pick, near) + _texts(pick)
    return Advice(pick.strategy, f"For work like this use {pick.name}: {why}{but}.")


def _is_long(row: Row) -> bool:
    """Returns True if the row was measured long enough for reliable figures."""
    return len(row.rounds) >= LEAST_ROUNDS or row.wall_s * max(1, len(row.rounds)) >= LEAST_S


def _for_auto(auto: Row, faster: list[Row], measured: list[Row]) -> str:
    slow = next((row for row in measured if row.strategy == BASELINE), None)
    slow = slow or next((row for row in measured if row.strategy == "sequential"), None)
    best = max(faster, key=lambda row: row.tokens_per_s, default=None)
    if best is not None and best.tokens_per_s > auto.tokens_per_s * (1 + _FAR):
        return (
            f"So short a run says little: try --rounds 3. Here {_named(best)} was the fastest with "
            f"{significant(best.tokens_per_s)} tokens/s, and {auto.name} had {significant(auto.tokens_per_s)}."
        )
    ours = [row for row in measured if row.strategy != BASELINE]
    lead = ", and nothing is more than 5 % faster" if best is None else ""
    said = f"For work like this use {auto.name}: {_speed(auto, slow)}{lead}{_first_words(auto, ours)}{_texts(auto)}."
    if best is not None:
        more = 100 * (best.tokens_per_s / auto.tokens_per_s - 1)
        said += f" {_named(best)} was {more:.0f} % faster, which may be chance in so short a run: try --rounds 3."
    soonest = min(measured, key=_latency)
    if _latency(soonest) < _latency(auto) * (1 - NOISE):
        said += (
            f" Half of the requests are done soonest with {_named(soonest)}, in {seconds(_latency(soonest))} instead "
            f"of {seconds(_latency(auto))}."
        )
    return said


def _named(row: Row) -> str:
    return _LOOP if row.strategy == BASELINE else row.name


def _is_double(row: Row) -> bool:
    """Returns True if the row "auto" repeats the measurement of the strategy that "auto" chose. If "auto" runs several
    engines in one process, it repeats no other row."""
    return row.strategy == "auto" and (row.instances == 1 or row.chosen == "multi-instance")


def _for_the_loop(loop: Row, best: Row) -> str:
    ratio = times(loop.tokens_per_s / best.tokens_per_s)
    return (
        f"For work like this stay with {_LOOP}: its {significant(loop.tokens_per_s)} tokens/s are {ratio} times those "
        f"of {best.name}, the fastest strategy."
    )


def _speed(pick: Row, slow: Row | None) -> str:
    speed = f"{significant(pick.tokens_per_s)} tokens/s"
    if slow is None:
        return f"it makes {speed}"
    return f"its {speed} are {times(pick.tokens_per_s / slow.tokens_per_s)} times those of {_named(slow)}"


def _ahead(pick: Row, others: list[Row]) -> str:
    if not others:
        return ""
    second = max(others, key=lambda row: row.tokens_per_s)
    ratio = pick.tokens_per_s / second.tokens_per_s
    more = f"{times(ratio)} times" if ratio >= 2 else f"{100 * (ratio - 1):.0f} % more than"
    return f" and {more} those of {second.name}, the next best"


def _among_equals(pick: Row, near: list[Row], best: Row) -> str:
    latencies = [_latency(row) for row in near if row is not pick]
    if min(latencies) > _latency(pick) * (1 + NOISE):
        soonest = seconds(_latency(pick))
        return f", nothing is more than 5 % faster, and half of its requests are done soonest, in {soonest}"
    if pick is best:
        return ", and nothing simpler is faster"
    return f", {best.name} is no more than 5 % faster, and {pick.name} is simpler"


def _memory(pick: Row, ours: list[Row]) -> str:
    """Returns a remark that compares the memory of "multi-instance" with the memory of the fastest other strategy; ""
    if `pick` is not "multi-instance"."""
    single = [row for row in ours if row.strategy != "multi-instance" and row.peak_memory_bytes]
    if pick.strategy != "multi-instance" or not single or not pick.peak_memory_bytes:
        return ""
    other = max(single, key=lambda row: row.tokens_per_s)
    return (
        f"; it takes {times(pick.peak_memory_bytes / (other.peak_memory_bytes or 1))} times the memory of {other.name}"
    )


def _first_words(pick: Row, near: list[Row]) -> str:
    """Returns a remark on the row of `near` with the shortest time to first token; "" if this time is more than half of
    `pick`'s."""
    if pick.ttft.p50 is None:
        return ""
    waits = [(row.ttft.p50, row.name) for row in near if row.ttft.p50 is not None]
    soonest, name = min(waits)
    if soonest > pick.ttft.p50 / 2:
        return ""
    return (
        f"; where people wait for the first words, {name} shows them in {seconds(soonest)} instead of "
        f"{seconds(pick.ttft.p50)}"
    )


def _texts(pick: Row) -> str:
    if pick.equal is None or pick.equal >= EQUAL:
        return ""
    return f"; {100 * (1 - pick.equal):.0f} % of its texts differ from those of sequential"


def _latency(row: Row) -> float:
    return row.latency.p50 or 0.0


def _complexity(row: Row) -> int:
    name = row.chosen or row.strategy
    return _SIMPLEST_FIRST.index(name) if name in _SIMPLEST_FIRST else len(_SIMPLEST_FIRST)
