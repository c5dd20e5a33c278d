"""Turns results into medians, ratios and targets, as data, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.rounds import Series
from llamabatch.utils.format import seconds, significant

OURS, LOOP, LIMIT = "ours", "Llama loop", "limit"
# llama-server as people get it, and built from our tree; each with its defaults and with its best flags.
STOCK, STOCK_BEST = "llama-server, stock", "llama-server, stock, best flags"
PATCHED, PATCHED_BEST = "llama-server, patched", "llama-server, patched, best flags"
SERVERS = (STOCK, STOCK_BEST, PATCHED, PATCHED_BEST)
OPENVINO, OPENVINO_BEST = "OpenVINO GenAI", "OpenVINO GenAI, best settings"
VLLM = "vLLM, BF16"
SCHEMA_VERSION = 1

# The least ratios of our tokens/s to the peer's, by workload.
TARGETS: Mapping[str, Mapping[str, float]] = {
    "burst": {STOCK: 2.5, STOCK_BEST: 2.5, PATCHED: 1.55, PATCHED_BEST: 1.15, LOOP: 4.5, LIMIT: 0.95},
    "burst, 1B Q4_K_M": {STOCK: 2.0, STOCK_BEST: 2.0},
    "ragged": {STOCK: 3.0, STOCK_BEST: 3.0, PATCHED: 2.0, PATCHED_BEST: 1.75, LOOP: 3.5},
    "shared prefix": {STOCK: 6.0, STOCK_BEST: 6.0, PATCHED: 6.0, PATCHED_BEST: 3.3, LOOP: 4.0},
    "shared prefix, warm": {STOCK: 2.0, STOCK_BEST: 2.0},
    "one request": {STOCK: 1.3, STOCK_BEST: 1.3},
    "one long prompt": {},
    "long prompt among talkers": dict.fromkeys(SERVERS, 1.0),
    "busy laptop": {STOCK: 5.0, STOCK_BEST: 5.0, PATCHED: 3.0, PATCHED_BEST: 1.5, LOOP: 5.0},
    "tiny": {STOCK: 3.0, STOCK_BEST: 3.0, PATCHED: 1.5, PATCHED_BEST: 1.5, LOOP: 5.0, LIMIT: 0.85},
    "burst, hybrid": {STOCK: 2.0, STOCK_BEST: 2.0},
    "one request, hybrid": {STOCK: 1.0, STOCK_BEST: 1.0},
    "shared prefix, hybrid": {STOCK: 4.0, STOCK_BEST: 4.0},
    "second turn, hybrid": {},
    "burst, window": {},
    "one request, window": {},
    "shared prefix, window": {},
    "second turn, window": {},
}
# The largest ratios of our figures to the peer's.
MOST_GAP = 0.5  # p95 gap between tokens, over any llama-server's
# Time to the first token, by workload.
FIRST_TOKENS: Mapping[str, Mapping[str, float]] = {"one long prompt": {STOCK: 1 / 1.3, STOCK_BEST: 1 / 1.3}}
MOST_MEMORY = 1.0  # peak memory, over any llama-server's
GAPS = ("long prompt among talkers",)  # workloads that MOST_GAP applies to
MOST_OTHERS = 2.0  # percent of the CPU that other processes may use in a measurement of bench_peers
MOST_FIRST_TOKEN = 1.1  # first token of a single request, over the loop's
MOST_MORE_LOAD_S = 0.3  # seconds that our load may take longer than the loop's


@dataclass(frozen=True)
class Comparison:
    """One figure of ours and of a peer: both medians, and the target of their ratio."""

    workload: str
    figure: str
    peer: str
    ours: float
    theirs: float
    target: float | None = None
    at_most: bool = False

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target


def median_tps(series: Series) -> float | None:
    return statistics.median(r.tokens_per_s for r in series.results) if series.results else None


def median_gap(series: Series) -> float | None:
    found = [r.p95_gap_s for r in series.results if r.p95_gap_s is not None]
    return statistics.median(found) if found else None


def median_first(series: Series) -> float | None:
    found = [r.first_token_s for r in series.results if r.first_token_s is not None]
    return statistics.median(found) if found else None


def median_memory(series: Series) -> float | None:
    found = [r.peak_memory_bytes for r in series.results if r.peak_memory_bytes]
    return statistics.median(found) if found else None


def compare(series: Sequence[Series]) -> list[Comparison]:
    """Returns the comparisons of ours with every other peer, for each workload and figure that both have."""
    ours = {row.workload: row for row in series if row.peer == OURS}
    found: list[Comparison] = []
    for row in series:
        if row.peer == OURS or row.workload not in ours:
            continue
        mine, server = ours[row.workload], row.peer in SERVERS
        target = TARGETS.get(row.workload, {}).get(row.peer)
        for figure, median, aim, at_most in (
            ("tokens/s", median_tps, target, False),
            ("p95 gap", median_gap, MOST_GAP if server and row.workload in GAPS else None, True),
            ("first token", median_first, FIRST_TOKENS.get(row.workload, {}).get(row.peer), True),
            ("memory", median_memory, MOST_MEMORY if server else None, True),
        ):
            left, right = median(mine), median(row)
            if left and right:
                found.append(Comparison(row.workload, figure, row.peer, left, right, aim, at_most))
    return found


def table(series: Sequence[Series], comparisons: Sequence[Comparison], workload: str) -> Table:
    """Returns the table of one workload, with a row for each peer."""
    rows = [row for row in series if row.workload == workload]
    ratios = {(c.peer, c.figure): c for c in comparisons if c.workload == workload}
    streamed = any(median_gap(row) for row in rows)
    shown = Table("peer", title=workload, title_justify="left", title_style="bold")
    timed = ("p95 gap", "ours is", "first token", "ours is") if streamed else ()
    for name in ("tokens/s", "lowest–highest", "ours is", "target", *timed, "memory", "ours is"):
        shown.add_column(name, justify="right")
    for row in rows:
        cells = [row.peer, *_speed(row, ratios.get((row.peer, "tokens/s")))]
        if streamed:
            for median, figure in ((median_gap, "p95 gap"), (median_first, "first token")):
                value = median(row)
                cells += [seconds(value) if value else "", _times(ratios.get((row.peer, figure)))]
        memory = median_memory(row)
        cells += [f"{memory / 2**20:,.0f} MiB" if memory else "", _times(ratios.get((row.peer, "memory")))]
        shown.add_row(*cells)
    return shown


def _speed(row: Series, comparison: Comparison | None) -> list[str]:
    if row.failure is not None and not row.results:
        return [f"failed: {row.failure[:60]}", "", "", ""]
    speeds = sorted(r.tokens_per_s for r in row.results)
    cells = [significant(statistics.median(speeds)), f"{significant(speeds[0])}–{significant(speeds[-1])}"]
    if comparison is None:
        return [*cells, "", ""]
    target = "" if comparison.target is None else f"{comparison.target:.2f} {_mark(comparison)}"
    return [*cells, f"{comparison.ratio:.2f}×", target]


def _times(comparison: Comparison | None) -> str:
    return "" if comparison is None else f"{comparison.ratio:.2f}× {_mark(comparison)}".rstrip()


def _mark(comparison: Comparison) -> str:
    return {None: "", True: "✓", False: "✗"}[comparison.met]


def document(
    facts: Mapping[str, Any], options: Mapping[str, Any], series: Sequence[Series], more: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the content of the JSON file, in seconds, bytes and tokens/s. docs/benchmarks.md describes the file."""
    return {
        "schema_version": SCHEMA_VERSION,
        **facts,
        "options": dict(options),
        "series": [_series(row) for row in series],
        "comparisons": [_comparison(c) for c in compare(series)],
        **more,
    }


def _series(row: Series) -> dict[str, Any]:
    return {
        "workload": row.workload,
        "peer": row.peer,
        "failure": row.failure,
        "median": {
            "tokens_per_s": _rounded(median_tps(row)),
            "p95_gap_s": _rounded(median_gap(row)),
            "first_token_s": _rounded(median_first(row)),
            "peak_memory_bytes": median_memory(row),
        },
        "facts": _facts(row),
        "rounds": [
            {
                "tokens_per_s": _rounded(r.tokens_per_s),
                "generated": sum(r.tokens),
                "wall_s": _rounded(r.wall_s),
                "p95_gap_s": _rounded(r.p95_gap_s),
                "first_token_s": _rounded(r.first_token_s),
                "peak_memory_bytes": r.peak_memory_bytes,
                "client_cpu_s": _rounded(r.client_cpu_s),
                "others_cpu_percent": _rounded(r.others_cpu_percent),
                "counts": r.facts.get("counts"),
            }
            for r in row.results
        ],
    }


def _facts(row: Series) -> dict[str, Any]:
    """Returns the facts of the peer's last round, except facts about that round only and about local folders."""
    said = row.results[-1].facts if row.results else {}
    return {name: value for name, value in said.items() if name not in ("counts", "folder", "first_token_s", "address")}


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "workload": comparison.workload, "figure": comparison.figure, "peer": comparison.peer,
        "ratio": round(comparison.ratio, 4), "target": comparison.target, "at_most": comparison.at_most,
        "met": comparison.met,
    }  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def idle_table(idle: Mapping[str, Any]) -> Table:
    """Returns a table of a single request and the load time, from the result of idle.document."""
    shown = Table("one request, nothing else running", "ours", "Llama loop", "target")
    ours, loop = idle["median"]["ours"], idle["median"]["Llama loop"]
    ratio, more = idle["ttft_ratio"], idle["more_load_s"]
    met = {True: "✓", False: "✗"}
    targets = {
        "ttft_s": f"{ratio['value']:.2f}×, at most {ratio['at_most']:.2f} {met[ratio['met']]}",
        "load_s": f"{more['value']:+.2f} s, at most {more['at_most']:+.2f} {met[more['met']]}",
    }
    titles = {"ttft_s": "first token", "first_s": "first token after the load", "load_s": "load", "import_s": "import"}
    for name, title in titles.items():
        shown.add_row(title, seconds(ours[name]), seconds(loop[name]), targets.get(name, ""))
    return shown
