"""The common part of all peers: a session that runs jobs, and the measurement of a session."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.process import PeerFailure, neighbour
from benchmarks.workloads import N_SLOTS, Job, Workload
from llamabatch.monitor.host import MachineSampler
from llamabatch.tools.processes import PeakMemory

SAMPLING = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.0}
LOAD_TIMEOUT_S = 120.0
_LEAST_TOKENS = 0.99  # share of the requested tokens; a peer with fewer tokens ended early and is not comparable


@dataclass(frozen=True)
class Model:
    """A model file. n_vocab: ids run from 0 to n_vocab - 1; eog: ids that end a generation."""

    path: Path
    n_vocab: int
    eog: tuple[int, ...]


@dataclass(frozen=True)
class Setup:
    """The common part of all measurements of a run.

    Attributes:
        env: the environment that programs start with.
        python: the interpreter with llamabatch; its llama-cpp-python is also the loop's.
        bench_python: the interpreter with the peers' packages; None: the packages are not installed.
        programs: folder of llama-server and llama-batched-bench; None: not built.
        stock: folder of both programs without our patches; None: not built.
        lcp_server: examples/server/server.py of llama-cpp-python; None: not unpacked.
        logs: folder for the standard error of programs.
        threads: number of threads of every peer, for single rows and for batches.
        timeout_s: time limit of one peer on one workload.
    """

    models: Mapping[str, Model]
    env: Mapping[str, str]
    python: Path
    bench_python: Path | None
    programs: Path | None
    lcp_server: Path | None
    logs: Path
    threads: int
    timeout_s: float
    stock: Path | None = None

    def program(self, name: str, *, stock: bool = False) -> Path:
        folder = self.stock if stock else self.programs
        if folder is None:
            raise PeerFailure(f"{name} is not built" + (" without our patches" if stock else ""))
        return folder / name


@dataclass(frozen=True)
class Result:
    """The outcome of one measurement.

    Attributes:
        wall_s: seconds from the start to the last token.
        tokens: number of generated tokens of each job.
        gaps_s: seconds between the tokens of the talkers, if tokens were streamed.
        peak_memory_bytes: peak of the resident memory of all the peer's processes, load and warm-up included.
        client_cpu_s: processor time of the benchmark itself while it waited.
        facts: what the peer reports: options, load time, counts.
        times_s: for each job, the seconds from the start to each of its tokens, if tokens were streamed.
        began_s: for each job, the seconds from the start to its request, if tokens were streamed.
        first_token_s: mean seconds from a request to its first token, as the function of this name counts them.
        others_cpu_percent: share of the CPU that other processes used meanwhile, the workload's neighbour included.
    """

    wall_s: float
    tokens: list[int]
    gaps_s: list[float] = field(default_factory=list)
    peak_memory_bytes: int | None = None
    client_cpu_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    times_s: list[list[float]] = field(default_factory=list)
    began_s: list[float] = field(default_factory=list)
    first_token_s: float | None = None
    others_cpu_percent: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / self.wall_s

    @property
    def p95_gap_s(self) -> float | None:
        """The gap that 95 % of the gaps do not exceed."""
        return percentile(self.gaps_s, 0.95) if self.gaps_s else None


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least `share` of the values do not exceed (nearest rank)."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


class Session(Protocol):
    """A peer that has loaded its model."""

    facts: dict[str, Any]

    @property
    def pids(self) -> list[int]: ...

    def run(self, jobs: list[Job], *, streamed: bool, timeout_s: float) -> Result: ...

    def close(self) -> None: ...


class Peer(Protocol):
    """A program to measure."""

    @property
    def name(self) -> str: ...

    def applies(self, workload: Workload) -> bool: ...

    def measure(self, setup: Setup, workload: Workload, rng: random.Random) -> Result: ...


class Opens(Protocol):
    """A peer that is measured through a session."""

    @property
    def name(self) -> str: ...

    def open(self, setup: Setup, workload: Workload) -> Session: ...


def measure(
    peer: Opens, setup: Setup, workload: Workload, rng: random.Random, *, n_warm_up: int = N_SLOTS, runs: int = 1
) -> Result:
    """Starts a peer, warms it up, runs the workload `runs` times and ends the peer. Raises PeerFailure.

    Returns the run with the median time, of an even number the slower one of the two in the middle.
    """
    session = open_warm(peer, setup, workload, rng, n_warm_up=n_warm_up)
    try:
        found = [measure_once(session, setup, workload, rng) for _ in range(runs)]
    finally:
        session.close()
    return sorted(found, key=lambda result: result.wall_s)[runs // 2]


def open_warm(
    peer: Opens, setup: Setup, workload: Workload, rng: random.Random, *, n_warm_up: int = N_SLOTS
) -> Session:
    """Returns the session of a peer that has loaded its model and used its weights and slots. Raises PeerFailure."""
    session = peer.open(setup, workload)
    try:
        warm_up = workload.warm_up(rng, setup.models[workload.model].n_vocab, n_warm_up)
        session.run(warm_up, streamed=False, timeout_s=LOAD_TIMEOUT_S)
    except BaseException:
        session.close()
        raise
    return session


def measure_once(session: Session, setup: Setup, workload: Workload, rng: random.Random) -> Result:
    """Runs the workload once, with token ids that `rng` draws. Raises PeerFailure."""
    n_vocab = setup.models[workload.model].n_vocab
    jobs = workload.jobs(rng, n_vocab)
    if earlier := workload.earlier(jobs, rng, n_vocab):
        session.run(earlier, streamed=False, timeout_s=setup.timeout_s)
    with neighbour(workload.neighbour, setup.env), PeakMemory(session.pids) as memory:
        machine, cpu = MachineSampler(lambda: session.pids), time.process_time()
        try:
            result = session.run(jobs, streamed=workload.streamed, timeout_s=setup.timeout_s)
            cpu = time.process_time() - cpu
            peak, others = memory.read(), machine.sample().others_cpu_percent
        finally:
            machine.close()
    check_tokens(result.tokens, jobs)
    return dataclasses.replace(
        result, peak_memory_bytes=peak, client_cpu_s=cpu, facts={**session.facts, **result.facts},
        first_token_s=first_token_s(result, jobs), others_cpu_percent=others,
    )  # fmt: skip


def check_tokens(tokens: list[int], jobs: list[Job]) -> None:
    """Raises PeerFailure if a peer generated too few of the tokens that its jobs request. Endless jobs do not count."""
    wanted = sum(job.generate for job in jobs if not job.endless)
    found = sum(n for n, job in zip(tokens, jobs, strict=True) if not job.endless)
    if found < _LEAST_TOKENS * wanted:
        raise PeerFailure(f"it generated {found} of {wanted} tokens")


def first_token_s(result: Result, jobs: list[Job]) -> float | None:
    """Returns the mean seconds from a request to its first token, of the requests that are not talkers.

    If all requests are talkers, all count. Returns None if tokens were not streamed.
    """
    chosen = [not job.talker for job in jobs] if any(not job.talker for job in jobs) else [True] * len(jobs)
    pairs = zip(result.times_s, result.began_s, chosen, strict=False)
    found = [times[0] - began for times, began, wanted in pairs if wanted and times]
    return statistics.mean(found) if found else None


def gaps(times: list[list[float]], jobs: list[Job]) -> list[float]:
    """Returns the seconds between consecutive tokens of the talkers."""
    return [
        later - earlier
        for seen, job in zip(times, jobs, strict=True)
        if job.talker
        for earlier, later in itertools.pairwise(seen)
    ]
