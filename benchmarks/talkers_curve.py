"""The curves of benchmarks/talkers.py, first token of long prompts against gaps for each setting, and the verdict."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report

FIGURES = ("p50_gap_s", "p95_gap_s", "p99_gap_s", "max_gap_s")
JUDGED = ("p99_gap_s", "max_gap_s")


@dataclass(frozen=True)
class Point:
    """One server with one setting: the medians over its rounds, seconds.

    Attributes:
        value: `prefill_share` of ours, or the tokens of `-b` and `-ub` of llama-server.
        first_s: time from the arrival of the long prompts to their first tokens, the mean of both.
        last_s: time from the arrival of the long prompts to the last of their first tokens.
        gaps: by name of FIGURES, gaps between the talkers' tokens while a long prompt has no token yet.
    """

    server: str
    value: float
    first_s: float
    last_s: float
    gaps: Mapping[str, float]


def read(path: Path) -> tuple[list[Point], str]:
    """Returns the points of a file, and the name of its machine."""
    made = json.loads(path.read_text(encoding="utf-8"))
    found = [
        Point(
            row["server"], row["value"], row["median"]["first_s"], row["median"]["last_s"],
            {name: row["median"][name] for name in FIGURES},
        )
        for row in made["curve"]
        if row["median"]
    ]  # fmt: skip
    return found, f"{made['machine']['cpu']}, {made['machine']['cores']} cores"


def gap_within(first_s: float, curve: Sequence[Point], figure: str) -> float:
    """Returns the smallest gap on a server's curve among points with first tokens within `first_s`; infinity for none.

    Between neighbouring settings the logarithms of both figures are interpolated.
    """
    found = [point.gaps[figure] for point in curve if point.first_s <= first_s]
    for left, right in itertools.pairwise(sorted(curve, key=lambda point: point.value)):
        early, late = sorted((left, right), key=lambda point: point.first_s)
        if early.first_s < first_s < late.first_s:
            share = math.log(first_s / early.first_s) / math.log(late.first_s / early.first_s)
            found.append(early.gaps[figure] * (late.gaps[figure] / early.gaps[figure]) ** share)
    return min(found, default=math.inf)


def verdict(found: Sequence[Point]) -> dict[str, Any]:
    """Judges whether our curve lies outside of the stock server's.

    A point is beaten if the other server has no larger gap at its first-token time. Our curve lies outside if all stock
    points are beaten and none of ours.

    Returns:
        For each figure of JUDGED: the values of stock points not beaten, of our points beaten, and "met".
    """
    curves = {name: [point for point in found if point.server == name] for name in (report.OURS, report.STOCK)}
    judged: dict[str, Any] = {}
    for figure in JUDGED:
        beaten = {
            name: [p.value for p in curves[name] if gap_within(p.first_s, curves[other], figure) <= p.gaps[figure]]
            for name, other in ((report.OURS, report.STOCK), (report.STOCK, report.OURS))
        }
        unbeaten = [point.value for point in curves[report.STOCK] if point.value not in beaten[report.STOCK]]
        met = all(curves.values()) and not unbeaten and not beaten[report.OURS]
        judged[figure] = {"stock_not_beaten": unbeaten, "ours_beaten": beaten[report.OURS], "met": met}
    return judged
