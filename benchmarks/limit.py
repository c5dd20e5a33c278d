"""The limit of llama.cpp itself: the requests' tokens over the prefill and decode times of llama-batched-bench.

If all requests have one shape, llama-batched-bench runs that shape. If lengths differ, its step times for 1 to 32
sequences serve to compute the time of an ideal scheduler. That scheduler has 32 slots, runs the longest requests first,
computes each step in one pass over all running sequences, computes all prompts at the speed of long prefill, and loses
no time between steps. The KV cache is split. llama-batched-bench runs with flash attention on and off; the better
result counts.
"""

from __future__ import annotations

import heapq
import json
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.base import Result, Setup
from benchmarks.process import PeerFailure
from benchmarks.workloads import N_SLOTS, Shape, Workload

_ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)
_STAIRCASE_TOKENS = 16
_ATTENTION = ("on", "off")
_ATTEMPTS = 4  # llama-batched-bench prints in a thread, and sometimes ends before the last row is printed


@dataclass(frozen=True)
class Limit:
    """llama-batched-bench as a peer."""

    name: str = "limit"

    def applies(self, workload: Workload) -> bool:
        """Returns False for streams, a single request, a busy machine and a warm cache: the bench has no such case."""
        return not (workload.streamed or workload.neighbour or workload.warm or len(workload.shapes) == 1)

    def measure(self, setup: Setup, workload: Workload, rng: random.Random) -> Result:
        """Returns the faster result of flash attention on and off. Its tokens are the workload's, its time computed."""
        times = {attention: _seconds(setup, workload, attention) for attention in _ATTENTION}
        best = min(times, key=lambda attention: times[attention])
        facts = {"flags": ["-fa", best], "seconds": times}
        return Result(times[best], [shape.generated for shape in workload.shapes], facts=facts)


def _seconds(setup: Setup, workload: Workload, attention: str) -> float:
    alike = len(set(workload.shapes)) == 1 and len(workload.shapes) == N_SLOTS
    if workload.shared:
        return _shared_seconds(setup, workload, attention)
    if alike:
        shape = workload.shapes[0]
        [row] = bench(setup, workload, attention, shape.prompt, shape.generated, [N_SLOTS])
        return float(row["t_pp"] + row["t_tg"])
    prompt = round(sum(s.prompt + s.generated / 2 for s in workload.shapes) / len(workload.shapes))
    rows = bench(setup, workload, attention, prompt, _STAIRCASE_TOKENS, _ROWS)
    prefill_tps = max(row["speed_pp"] for row in rows)
    steps = {int(row["pl"]): row["t_tg"] / row["tg"] for row in rows}
    return staircase_seconds(workload.shapes, prefill_tps, steps, N_SLOTS)


def _shared_seconds(setup: Setup, workload: Workload, attention: str) -> float:
    """Returns the seconds of one prefill of the shared part, of all own parts, and of decode at the full length.

    The own parts are measured without the shared part before them, so the limit is a little too fast.
    """
    shape = workload.shapes[0]
    [whole] = bench(setup, workload, attention, shape.prompt, shape.generated, [N_SLOTS], "-pps")
    [own] = bench(setup, workload, attention, shape.prompt - workload.shared, 1, [N_SLOTS])
    return float(whole["t_pp"] * workload.shared / shape.prompt + own["t_pp"] + whole["t_tg"])


def staircase_seconds(shapes: Sequence[Shape], prefill_tps: float, steps: dict[int, float], n_slots: int) -> float:
    """Returns the seconds that an ideal scheduler takes for the shapes.

    Args:
        prefill_tps: prompt tokens a second.
        steps: seconds of one decode step by number of rows; other numbers of rows are interpolated.
    """
    prefill = sum(shape.prompt for shape in shapes) / prefill_tps
    counts = rows_of_steps([shape.generated for shape in shapes], n_slots)
    return prefill + sum(step_seconds(rows, steps) * count for rows, count in counts.items())


def rows_of_steps(generated: Sequence[int], n_slots: int) -> dict[int, int]:
    """Returns number of rows -> number of steps with that many rows.

    The longest requests begin first, and a waiting request begins when another ends. The first token of a request comes
    from its prompt, so a request takes one step fewer than it has tokens.
    """
    steps = sorted((tokens - 1 for tokens in generated if tokens > 1), reverse=True)
    ends = steps[:n_slots]
    heapq.heapify(ends)
    for length in steps[n_slots:]:
        heapq.heappush(ends, heapq.heappop(ends) + length)
    counts: dict[int, int] = {}
    now, rows = 0, len(ends)
    for end in sorted(ends):  # all slots are busy until the first one stays empty
        if end > now:
            counts[rows] = counts.get(rows, 0) + end - now
        now, rows = end, rows - 1
    return counts


def step_seconds(rows: int, steps: dict[int, float]) -> float:
    """Returns the seconds of a step, linearly interpolated between the measured numbers of rows."""
    if rows in steps:
        return steps[rows]
    low = max(n for n in steps if n < rows)
    high = min(n for n in steps if n > rows)
    share = (rows - low) / (high - low)
    return steps[low] + share * (steps[high] - steps[low])


def bench(
    setup: Setup, workload: Workload, attention: str, prompt: int, generated: int, rows: Sequence[int], *more: str
) -> list[dict[str, Any]]:
    """Returns the output of llama-batched-bench, one entry for each number of sequences. Raises PeerFailure."""
    threads = str(setup.threads)
    cells = -(-(prompt + generated + 1) // 256) * 256  # llama.cpp rounds each sequence's part up to 256
    command = [
        str(setup.program("llama-batched-bench")), "-m", str(setup.models[workload.model].path), "-fa", attention,
        "-c", str(max(rows) * cells), "-b", "2048", "-ub", "512", "-t", threads, "-tb", threads, "-npp", str(prompt),
        "-ntg", str(generated), "-npl", ",".join(map(str, rows)), "--output-format", "jsonl", *more,
    ]  # fmt: skip
    for _ in range(_ATTEMPTS):
        try:
            done = subprocess.run(
                command, env=dict(setup.env), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=setup.timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise PeerFailure(f"llama-batched-bench took longer than {setup.timeout_s:g} s") from error
        if done.returncode != 0:
            raise PeerFailure(f"llama-batched-bench ended with {done.returncode}: {done.stderr[-300:].strip()}")
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if len(found) == len(rows):
            return found
    raise PeerFailure(f"llama-batched-bench printed {len(found)} of {len(rows)} rows")
