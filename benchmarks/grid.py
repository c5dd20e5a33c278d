"""The best flags of llama-server or of another peer for a workload, out of a fixed grid, and their record in a file.

Each combination runs a shortened workload three times, and the median counts. A file in the user's cache stores the
best flags for the build, the model and the number of threads. The flags are used until one of these three changes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.base import Result
from benchmarks.process import PeerFailure
from benchmarks.workloads import Workload

GRID: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("-kvu",), ("-no-kvu",)),
    (("-fa", "on"), ("-fa", "off")),
    (("--cache-ram", "0"),),
    (("-ub", "512"), ("-ub", "2048")),
)
# The most frequent winner on CPUs. Runs without time for the grid use it until a full run has found other flags.
USUAL = ("-no-kvu", "-fa", "on", "--cache-ram", "0", "-ub", "512")
# A combination that takes this many times as long as the best so far is stopped. Without flash attention some
# combinations take fifteen times as long.
_GIVE_UP = 1.5
_LEAST_S = 20.0
RUNS = 3  # of a combination: single runs differ by a tenth and more, so the best of many would be the luckiest

Flags = tuple[str, ...]
Stage = Callable[[Flags], Sequence[Flags]]


def combinations() -> list[Flags]:
    """Returns no flags (llama-server's defaults), and every combination of the grid."""
    return [(), *(tuple(itertools.chain(*chosen)) for chosen in itertools.product(*GRID))]


def choose(workload: Workload, figures: Mapping[Flags, Result]) -> Flags:
    """Returns the best flags.

    In streamed workloads of talkers alone these have the earliest first token, in other streamed workloads the smallest
    p95 gap, otherwise the most tokens/s.
    """
    if workload.streamed and all(shape.talker for shape in workload.shapes):
        return min(figures, key=lambda flags: figures[flags].first_token_s or float("inf"))
    if workload.streamed:
        return min(figures, key=lambda flags: figures[flags].p95_gap_s or float("inf"))
    return max(figures, key=lambda flags: figures[flags].tokens_per_s)


class Remembered:
    """Best flags by workload, in a file.

    Args:
        key: build, model and threads that the flags were measured with; flags of another key are not used.
        usual: flags for workloads that have not been searched.
        stages: functions from the best flags so far to the combinations to try next.
    """

    def __init__(
        self, path: Path, key: str, usual: Flags = USUAL, stages: Sequence[Stage] = (lambda best: combinations(),)
    ) -> None:
        self._path, self._key, self._usual, self._stages = path, key, usual, stages
        self.found: dict[str, dict[str, Any]] = {}
        if path.is_file():
            self.found = json.loads(path.read_text(encoding="utf-8")).get(key, {})

    def flags(self, name: str) -> Flags:
        """Returns the best flags of a workload, or the usual ones if the workload has not been searched."""
        return tuple(self.found[name]["flags"]) if name in self.found else self._usual

    def search(
        self, workload: Workload, run: Callable[[Flags, Workload, float], Result], say: Callable[[str], None]
    ) -> None:
        """Runs the grid for a workload and stores the best flags. A combination that fails drops out.

        Args:
            run: (flags, workload, seconds at most) -> the measurement; raises PeerFailure.
        """
        figures: dict[Flags, Result] = {}
        failures: dict[Flags, str] = {}
        for flags in self._combinations(workload, figures, failures):
            try:
                best = min((figure.wall_s for figure in figures.values()), default=float("inf"))
                figures[flags] = run(flags, workload.cut(), max(_LEAST_S, best * _GIVE_UP))
                say(f"  {workload.name}, {text(flags)}: {figures[flags].tokens_per_s:,.0f} tokens/s")
            except PeerFailure as failure:
                failures[flags] = str(failure)
                say(f"  {workload.name}, {text(flags)}: failed, {failure}")
        if not figures:
            return
        measured = [
            {
                "flags": list(flags), "tokens_per_s": result.tokens_per_s, "p95_gap_s": result.p95_gap_s,
                "first_token_s": result.first_token_s,
            }
            for flags, result in figures.items()
        ]  # fmt: skip
        failed = [{"flags": list(flags), "failure": why} for flags, why in failures.items()]
        self.found[workload.name] = {"flags": list(choose(workload, figures)), "measured": measured, "failed": failed}
        known = json.loads(self._path.read_text(encoding="utf-8")) if self._path.is_file() else {}
        self._path.write_text(json.dumps({**known, self._key: self.found}, indent=1) + "\n", encoding="utf-8")

    def _combinations(
        self, workload: Workload, figures: Mapping[Flags, Result], failures: Mapping[Flags, str]
    ) -> Iterator[Flags]:
        for stage in self._stages:
            for flags in stage(choose(workload, figures) if figures else ()):
                if flags not in figures and flags not in failures:
                    yield flags


def text(flags: Flags) -> str:
    return " ".join(flags) or "defaults"
