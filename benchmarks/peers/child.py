"""The peers that are libraries: ours and the loop over llama_cpp.Llama, each in a child program (programs/lines.py)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.base import LOAD_TIMEOUT_S, SAMPLING, Result, Setup, gaps, measure
from benchmarks.process import Program
from benchmarks.workloads import N_SLOTS, Job, Workload
from llamabatch.planning.machine import Machine

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"


class ChildSession:
    """A library in its child program."""

    def __init__(
        self, name: str, program: Path, start: Mapping[str, Any], setup: Setup, *, python: Path | None = None,
        env: Mapping[str, str] | None = None, load_s: float = LOAD_TIMEOUT_S,
    ) -> None:  # fmt: skip
        log = setup.logs / f"{name}.log"
        self._program = Program(name, [python or setup.python, program], env or setup.env, log, lines=True)
        try:
            self.facts = self._program.ask(start, load_s)
            del self.facts["ready"]
        except BaseException:
            self._program.close()
            raise

    @property
    def pids(self) -> list[int]:
        return self._program.pids

    def run(self, jobs: list[Job], *, streamed: bool, timeout_s: float) -> Result:
        message = {"jobs": [dataclasses.asdict(job) for job in jobs], "streamed": streamed}
        answer = self._program.ask(message, timeout_s)
        seen = gaps(answer["times"], jobs) if streamed else []
        facts = {"counts": answer["counts"]} if "counts" in answer else {}
        if "times" in answer:
            facts["first_token_s"] = [times[0] for times in answer["times"] if times]
        times, began = answer.get("times", []), answer.get("began", [])
        return Result(answer["wall_s"], answer["tokens"], seen, facts=facts, times_s=times, began_s=began)

    def close(self) -> None:
        self._program.close()


@dataclass(frozen=True)
class Ours:
    """`LLM` with the benchmark's slots and context. Its threads are set only if they differ from the number of cores.

    Attributes:
        options: more options of LLM.
    """

    name: str = "ours"
    options: Mapping[str, Any] = field(default_factory=dict)

    def applies(self, workload: Workload) -> bool:
        return True

    def open(self, setup: Setup, workload: Workload) -> ChildSession:
        engine: dict[str, Any] = {"n_slots": N_SLOTS, "n_ctx": workload.n_ctx}
        if setup.threads != Machine.here().cores:
            engine |= {"n_threads": setup.threads, "n_threads_batch": setup.threads}
        engine |= self.options
        start = {"model": str(setup.models[workload.model].path), "engine": engine, "sampling": SAMPLING}
        return ChildSession(self.name, PROGRAMS / "ours.py", start, setup)

    def measure(self, setup: Setup, workload: Workload, rng: random.Random) -> Result:
        return measure(self, setup, workload, rng)


@dataclass(frozen=True)
class LlamaLoop:
    """`llama_cpp.Llama`, which runs every n-th request of the workload, one after another."""

    name: str = "Llama loop"
    more: int = 1
    """Runs only every `more`-th of the requests that a full run measures; for quick runs."""

    def applies(self, workload: Workload) -> bool:
        return not workload.streamed  # one request at a time: nobody would talk beside it

    def open(self, setup: Setup, workload: Workload) -> ChildSession:
        engine = {"n_ctx": workload.n_ctx, "n_threads": setup.threads, "n_threads_batch": setup.threads}
        sampling = {"temp" if name == "temperature" else name: value for name, value in SAMPLING.items()}
        start = {"model": str(setup.models[workload.model].path), "engine": engine, "sampling": sampling}
        return ChildSession(self.name, PROGRAMS / "llama_loop.py", start, setup)

    def measure(self, setup: Setup, workload: Workload, rng: random.Random) -> Result:
        return measure(self, setup, workload.every(workload.loop_every * self.more), rng, n_warm_up=2)
