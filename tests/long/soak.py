"""An hour of mixed load with cancels, on an engine in this process, an engine in a child, and an AsyncLLM."""

from __future__ import annotations

import faulthandler
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from llamabatch import LLM
from tests.long.soak_load import LORA, AsyncCaller, Caller, Count
from tests.model.adapter_files import write_lora
from tests.waiting import until

HOLDS = (
    "over one hour of mixed load with cancels memory, file descriptors and threads stay flat, and every request asked "
    "ended as ok, error or aborted, by the callers' count and by the engines'"
)
TOTAL = 1
QUICK = 1  # the test suite runs ten seconds
SECONDS = 3600.0
TIMEOUT_S = 2 * SECONDS

SAMPLE_S = 10.0
STUCK_S = 120.0
LAST_S = 60.0  # the last cancelled request must end within this time
WARM_UP = 0.2  # share of the time in which caches fill, the context grows, and the allocator settles
# Limits for the growth of the median, from the first to the last third of the time after the warm-up. In an hour, 16 MB
# are 9 KB a second, or some 100 bytes for each request.
MOST_GROWTH_BYTES = 16 * 2**20
MOST_GROWTH_HANDLES = 2

_OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_slots": 8, "n_threads": 1, "strategy": "batched"}
_CALLERS = 3  # threads for each LLM


def case(number: int, folder: Path, seconds: float = SECONDS) -> None:
    """Runs the load. A run of fewer seconds checks its counts, and what is left behind, in the same way."""
    lora = write_lora(folder / "lora.gguf")
    _soak(1.0, folder / "first.jsonl", lora, seed=number)  # makes everything that a process makes once and keeps
    process = psutil.Process()
    before = _handles(process)
    samples = _soak(seconds, folder / "samples.jsonl", lora, seed=number)

    def is_as_before() -> bool:
        after = _handles(process)
        # "<=": children and threads of other tests may have ended
        few = all(after[name] <= before[name] for name in ("children", "threads"))
        return few and after["fds"] <= before["fds"] + MOST_GROWTH_HANDLES

    # a thread that watched an ended child may need a moment to end
    until(is_as_before, lambda: (before, _handles(process), threading.enumerate()))
    if seconds >= 60:
        check_flat(samples)


def check_flat(samples: list[dict[str, float]]) -> None:
    """Checks that no figure grew too much from the first to the last third of the samples after the warm-up."""
    steady = samples[int(len(samples) * WARM_UP) :]
    third = len(steady) // 3
    for name in steady[0]:
        first, last = (statistics.median(s[name] for s in part) for part in (steady[:third], steady[-third:]))
        most = MOST_GROWTH_BYTES if name.endswith("rss") else MOST_GROWTH_HANDLES
        assert name == "t" or last - first <= most, f"{name} grew from {first:.0f} to {last:.0f}"


def _soak(seconds: float, log: Path, lora: Path, seed: int) -> list[dict[str, float]]:
    """Runs the load. Returns the samples, and writes each one to `log` when it is taken."""
    counts = {"here": Count(), "child": Count(), "asyncio": Count()}
    options = {**_OPTIONS, "adapters": {LORA: str(lora)}}
    with LLM("tiny", **options) as here, LLM("tiny", **options, isolate=True) as child:
        until = time.monotonic() + seconds
        work: list[Callable[[float], None]] = [AsyncCaller(seed, counts["asyncio"], _OPTIONS).run]
        for name, llm in (("here", here), ("child", child)):
            work += [Caller(llm, seed + 10 * i, counts[name], lora, loads=i == 0).run for i in range(_CALLERS)]
        threads = [threading.Thread(target=run, args=(until,), daemon=True) for run in work]
        for thread in threads:
            thread.start()
        samples = _watch(threads, counts, log)
        for thread in threads:  # an AsyncCaller closes its engine and its event loop after its last count
            thread.join(STUCK_S)
            assert not thread.is_alive(), f"a caller has not ended within {STUCK_S:.0f} s of the end"
        for name, count in counts.items():
            assert not count.failures, (name, count.failures)
        for name, llm in (("here", here), ("child", child)):
            _check_engine(llm, counts[name])
    for count in counts.values():
        assert count.submitted == sum(count.ended.values()), count.ended
    return samples


def _watch(threads: list[threading.Thread], counts: dict[str, Count], log: Path) -> list[dict[str, float]]:
    """Takes samples until the first caller has ended."""
    start, samples = time.monotonic(), []
    with log.open("w") as file:
        while any(thread.is_alive() for thread in threads):
            due = start + len(samples) * SAMPLE_S
            while any(thread.is_alive() for thread in threads) and time.monotonic() < due:
                threads[0].join(0.05)
                time.sleep(0.05)
            if not all(thread.is_alive() for thread in threads):
                break  # a caller has ended, so this is no longer the full load
            samples.append({"t": round(time.monotonic() - start, 1), **_sample()})
            told = {
                name: {"submitted": c.submitted, **c.ended, "calls": sum(c.calls.values())}
                for name, c in counts.items()
            }
            file.write(json.dumps({**samples[-1], **told}) + "\n")
            file.flush()
            for name, count in counts.items():
                assert not count.failures, (name, count.failures)
                assert time.monotonic() - count.last_call_s < STUCK_S, f"{name}: no call has ended for {STUCK_S} s"
    return samples


def _check_engine(llm: LLM, count: Count) -> None:
    """Checks that the engine's counts are those of the callers, and that all of its requests have ended."""
    deadline = time.monotonic() + LAST_S
    while (stats := llm.stats()).in_flight and time.monotonic() < deadline:
        time.sleep(0.05)
    if stats.in_flight:
        faulthandler.dump_traceback(all_threads=True)  # shows where the engine hangs
    assert stats.submitted == stats.ok + stats.errors + stats.aborted, stats
    assert (stats.running, stats.waiting) == (0, 0), stats
    assert stats.submitted == count.submitted, (stats.submitted, count.submitted, count.ended)
    # if a caller leaves a stream, its requests may end before the engine gets the abort
    assert stats.ok >= count.ended["ok"], (stats.ok, count.ended)
    assert stats.aborted <= count.ended["aborted"], (stats.aborted, count.ended)
    assert stats.errors >= count.ended["error"], (stats.errors, count.ended)


def _handles(process: psutil.Process) -> dict[str, int]:
    return {
        "threads": process.num_threads(),
        "fds": process.num_fds() if hasattr(process, "num_fds") else 0,
        "children": len(process.children(recursive=True)),
    }


def _sample() -> dict[str, float]:
    """Returns figures of this process, and of its largest child. That has the engine; smaller ones try out grammars."""
    here = psutil.Process()
    children = []
    for process in here.children():
        try:
            children.append((process.memory_info().rss, process.num_threads(), process.num_fds()))
        except psutil.Error:  # the child ended meanwhile
            continue
    rss, threads, fds = max(children, default=(0, 0, 0))
    handles = _handles(here)
    return {
        "rss": here.memory_info().rss, "threads": handles["threads"], "fds": handles["fds"],
        "child_rss": rss, "child_threads": threads, "child_fds": fds,
    }  # fmt: skip


if __name__ == "__main__":  # python -m tests.long.soak SECONDS FOLDER: writes the samples to FOLDER
    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    case(0, target, float(sys.argv[1]))
    print("flat")
