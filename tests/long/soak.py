"""An hour of mixed load with cancels, on an engine of this process, one in a child, and one of asyncio."""

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
QUICK = 1  # of ten seconds
SECONDS = 3600.0
TIMEOUT_S = 2 * SECONDS

SAMPLE_S = 10.0
STUCK_S = 120.0
LAST_S = 60.0  # in which the last cancelled request must have ended
WARM_UP = 0.2  # of the time: caches fill, the context grows, the allocator finds its shape
# Growth from the first third after that to the last, in the medians: of an hour, 9 KB a second, or some 100 bytes for
# each request of the engine.
MOST_GROWTH_BYTES = 16 * 2**20
MOST_GROWTH_HANDLES = 2

_OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_slots": 8, "n_threads": 1, "strategy": "batched"}
_CALLERS = 3  # threads for each LLM


def case(number: int, folder: Path, seconds: float = SECONDS) -> None:
    """All of it; fewer seconds hold the counts, and that nothing is left behind, to the same standard."""
    lora = write_lora(folder / "lora.gguf")
    _soak(1.0, folder / "first.jsonl", lora, seed=number)  # whatever is made once and kept is there after this
    process = psutil.Process()
    before = _handles(process)
    samples = _soak(seconds, folder / "samples.jsonl", lora, seed=number)

    def is_as_before() -> bool:
        after = _handles(process)
        few = all(after[name] <= before[name] for name in ("children", "threads"))  # of others some may have ended
        return few and after["fds"] <= before["fds"] + MOST_GROWTH_HANDLES

    # a thread that has seen a child end may still be on its way out
    until(is_as_before, lambda: (before, _handles(process), threading.enumerate()))
    if seconds >= 60:
        check_flat(samples)


def check_flat(samples: list[dict[str, float]]) -> None:
    """Holds the last third after the warm-up against the first."""
    steady = samples[int(len(samples) * WARM_UP) :]
    third = len(steady) // 3
    for name in steady[0]:
        first, last = (statistics.median(s[name] for s in part) for part in (steady[:third], steady[-third:]))
        most = MOST_GROWTH_BYTES if name.endswith("rss") else MOST_GROWTH_HANDLES
        assert name == "t" or last - first <= most, f"{name} grew from {first:.0f} to {last:.0f}"


def _soak(seconds: float, log: Path, lora: Path, seed: int) -> list[dict[str, float]]:
    """Runs the load; returns what was sampled meanwhile, and writes it to `log` as it comes."""
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
        for thread in threads:  # an AsyncCaller closes its engine and its event loop behind its last count
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
    """Samples until the first caller has ended."""
    start, samples = time.monotonic(), []
    with log.open("w") as file:
        while any(thread.is_alive() for thread in threads):
            due = start + len(samples) * SAMPLE_S
            while any(thread.is_alive() for thread in threads) and time.monotonic() < due:
                threads[0].join(0.05)
                time.sleep(0.05)
            if not all(thread.is_alive() for thread in threads):
                break  # some have ended: no longer the load
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
    """The engine was asked for what was asked, and has ended it."""
    deadline = time.monotonic() + LAST_S
    while (stats := llm.stats()).in_flight and time.monotonic() < deadline:
        time.sleep(0.05)
    if stats.in_flight:
        faulthandler.dump_traceback(all_threads=True)  # what the engine is at
    assert stats.submitted == stats.ok + stats.errors + stats.aborted, stats
    assert (stats.running, stats.waiting) == (0, 0), stats
    assert stats.submitted == count.submitted, (stats.submitted, count.submitted, count.ended)
    # a stream that is left may have ended on its own before the engine heard of it
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
    """Of this process, and of the engine's child: the largest, as grammars are tried out in small ones."""
    here = psutil.Process()
    children = []
    for process in here.children():
        try:
            children.append((process.memory_info().rss, process.num_threads(), process.num_fds()))
        except psutil.Error:  # it ended meanwhile
            continue
    rss, threads, fds = max(children, default=(0, 0, 0))
    handles = _handles(here)
    return {
        "rss": here.memory_info().rss, "threads": handles["threads"], "fds": handles["fds"],
        "child_rss": rss, "child_threads": threads, "child_fds": fds,
    }  # fmt: skip


if __name__ == "__main__":  # python -m tests.long.soak SECONDS FOLDER: the same, with the samples where one can look
    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    case(0, target, float(sys.argv[1]))
    print("flat")
