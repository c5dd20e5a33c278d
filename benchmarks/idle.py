"""Measures a single request on an idle engine and the time to load, ours beside `llama_cpp.Llama`."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.base import LOAD_TIMEOUT_S, Setup
from benchmarks.peers.child import LlamaLoop, Ours
from benchmarks.process import PeerFailure
from benchmarks.report import MOST_FIRST_TOKEN, MOST_MORE_LOAD_S
from benchmarks.workloads import Shape, Workload

SINGLE = Workload("idle", "synth", (Shape(64, 8),), n_ctx=256, streamed=True)
_REQUESTS = 5
# The least number of starts of each peer: a start takes a second or two, but sometimes twice as long.
_STARTS = 5


@dataclass(frozen=True)
class Idle:
    """The times of one start of one peer.

    Attributes:
        import_s: seconds to import the package.
        load_s: seconds of the constructor.
        first_s: seconds from the first request after loading to its first token.
        ttft_s: seconds from a later request to its first token, the median of five requests.
    """

    import_s: float
    load_s: float
    first_s: float
    ttft_s: float


def measure(setup: Setup, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures both peers in turn, each start in a new process. A failure is printed and replaces the figures.

    The first start of each peer does not count, since it reads files that are not in the system's cache yet.
    """
    peers = (Ours(), LlamaLoop())
    found: dict[str, list[Idle]] = {peer.name: [] for peer in peers}
    try:
        for peer in peers:
            _start(peer, setup, random.Random("idle"))
        for number in range(max(rounds, _STARTS)):
            for peer in peers if number % 2 == 0 else peers[::-1]:
                found[peer.name].append(_start(peer, setup, random.Random(f"idle-{number}")))
                say(f"idle, round {number + 1}, {peer.name}: {found[peer.name][-1]}")
    except PeerFailure as failure:
        say(f"idle: failed, {failure}")
        return {"failure": str(failure)}
    return document(found[peers[0].name], found[peers[1].name])


def _start(peer: Ours | LlamaLoop, setup: Setup, rng: random.Random) -> Idle:
    n_vocab = setup.models[SINGLE.model].n_vocab
    session = peer.open(setup, SINGLE)
    try:
        first, *others = (
            session.run(SINGLE.jobs(rng, n_vocab), streamed=True, timeout_s=LOAD_TIMEOUT_S).facts["first_token_s"][0]
            for _ in range(1 + _REQUESTS)
        )
    finally:
        session.close()
    return Idle(session.facts["import_s"], session.facts["load_s"], first, statistics.median(others))


def document(ours: list[Idle], loop: list[Idle]) -> dict[str, Any]:
    """Returns the medians of both peers, the two figures that have targets, and every round."""
    mine, theirs = median(ours), median(loop)
    ratio, more = mine.ttft_s / theirs.ttft_s, mine.load_s - theirs.load_s
    return {
        "median": {"ours": vars(mine), "Llama loop": vars(theirs)},
        "ttft_ratio": {"value": round(ratio, 4), "at_most": MOST_FIRST_TOKEN, "met": ratio <= MOST_FIRST_TOKEN},
        "more_load_s": {"value": round(more, 4), "at_most": MOST_MORE_LOAD_S, "met": more <= MOST_MORE_LOAD_S},
        "rounds": {"ours": [vars(i) for i in ours], "Llama loop": [vars(i) for i in loop]},
    }


def median(starts: list[Idle]) -> Idle:
    return Idle(
        **{name: statistics.median(getattr(start, name) for start in starts) for name in vars(starts[0])},
    )
