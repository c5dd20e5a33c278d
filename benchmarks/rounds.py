"""Alternating rounds: every peer runs once, then every peer again, so that a drift of the machine affects all alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.base import Peer, Result, Setup
from benchmarks.process import PeerFailure
from benchmarks.workloads import Workload


@dataclass
class Series:
    """The results of one peer on one workload, round by round. A peer that failed is not measured again."""

    peer: str
    workload: str
    results: list[Result] = field(default_factory=list)
    failure: str | None = None


def run(
    setup: Setup,
    workloads: Sequence[Workload],
    peers: Sequence[Peer],
    rounds: int,
    *,
    say: Callable[[str], None],
    after_round: Callable[[list[Series]], None],
    seed: int = 0,
) -> list[Series]:
    """Measures all peers on all workloads in `rounds` rounds. All peers get the same token ids in a round.

    Args:
        after_round: gets the results so far, after each round of a workload.
    """
    series: list[Series] = []
    for workload in workloads:
        rows = [Series(peer.name, workload.name) for peer in peers if peer.applies(workload)]
        measured = [peer for peer in peers if peer.applies(workload)]
        series += rows
        for number in range(rounds):
            # each round begins with another peer, since the first one finds a colder machine
            for at in turned(len(rows), number):
                if rows[at].failure is None:
                    _measure(setup, workload, measured[at], rows[at], f"{seed}-{workload.name}-{number}", say)
            after_round(series)
    return series


def turned(n: int, by: int) -> list[int]:
    """Returns the numbers below n in order, from `by` on and then again from 0."""
    return [(i + by) % n for i in range(n)]


def _measure(setup: Setup, workload: Workload, peer: Peer, row: Series, seed: str, say: Callable[[str], None]) -> None:
    where = f"{workload.name}, round {len(row.results) + 1}, {peer.name}"
    try:
        result = peer.measure(setup, workload, random.Random(seed))
    except PeerFailure as failure:
        row.failure = str(failure)
        say(f"{where}: failed, {failure}")
        return
    row.results.append(result)
    gap = result.p95_gap_s
    say(f"{where}: {result.tokens_per_s:,.1f} tokens/s" + (f", p95 gap {gap * 1000:,.0f} ms" if gap else ""))
