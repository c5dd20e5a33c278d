"""Measures llamabatch beside other engines, loaded together and run in turn: `make bench-peers`; docs/benchmarks.md.

    python -m benchmarks.bench_peers [--model NAME]... [--workload NAME]... [--rounds N] [--minutes N] [--json FILE]

All engines of a workload are loaded at once. In each round every engine runs the workload with new token ids; the
engine that runs first changes from round to round. Each figure names the share of the CPU that other processes used
meanwhile. With more than 2 % the program measures again, up to three times in all (`--attempts`), and counts the least
disturbed measurement. If a peer cannot read a model's file, it reads a file of the nearest type that it supports, and
the figures name that file.

The program writes the file of figures after each measurement. A later call of the same revision continues the run, so
that `--minutes` can cut a run into pieces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import facts, places, report, trained, type_files
from benchmarks.bench import RESULTS, show
from benchmarks.grid import Remembered
from benchmarks.peers import openvino
from benchmarks.peers.base import Model, Opens, Result, Session, Setup, measure_once, open_warm
from benchmarks.peers.child import Ours
from benchmarks.peers.openvino import OpenVino
from benchmarks.peers.servers import LlamaServer, remembered, search_flags
from benchmarks.peers.vllm import VLlm
from benchmarks.process import PeerFailure, ended_by_signals, environment
from benchmarks.rounds import Series, turned
from benchmarks.workloads import PEER_MODELS, PEER_WORKLOADS, Workload
from llamabatch.native_build.tools import main_guard
from llamabatch.planning.machine import Machine

PEERS = (report.OURS, report.STOCK_BEST, report.OPENVINO, report.OPENVINO_BEST)
BF16 = "synth BF16"  # for vLLM, which has no other type: measured if vLLM is there, or if somebody names it
NEAREST = ("Q4_0", "Q8_0")  # types that OpenVINO reads, the nearest to Q4_K_M first


def say(text: str) -> None:
    click.echo(text, err=True)


FILES: dict[str, Callable[[contextlib.ExitStack], Path]] = {
    "synth": lambda _: places.synth_model(say),
    BF16: lambda stack: stack.enter_context(type_files.model(places.SHAPE, "BF16", say)),
    "synth 1B": lambda _: places.synth_model(say, *places.LARGER),
    "smollm2": lambda _: trained.model("smollm2"),
}
"""The files of PEER_MODELS. A call fetches or writes a file that is not in the cache; the stack's end may remove it."""


def nearest(model: str) -> Iterator[Path]:
    """Yields files of the same model in types that OpenVINO reads; writes each when the caller asks for it.

    It yields nothing for the other models, since OpenVINO reads their types.
    """
    if model == "synth 1B":
        for kind in NEAREST:
            yield places.synth_model(say, kind, places.LARGER[1])


class Engines:
    """The engines of a workload, loaded and warm. `failures` names the reason for each engine that did not load."""

    def __init__(
        self, peers: Sequence[Opens], setup: Setup, workload: Workload, rng: random.Random, attempts: int
    ) -> None:
        self.sessions: dict[str, Session] = {}
        self.setups: dict[str, Setup] = {}
        self.failures: dict[str, str] = {}
        self._workload, self._attempts = workload, attempts
        try:
            for peer in peers:
                self._open(peer, setup, rng)
        except BaseException:
            self.close()
            raise

    def _open(self, peer: Opens, setup: Setup, rng: random.Random) -> None:
        own = setup.models[self._workload.model]
        others = nearest(self._workload.model) if isinstance(peer, OpenVino) else ()
        for path in itertools.chain([own.path], others):
            tried = dataclasses.replace(setup, models={self._workload.model: dataclasses.replace(own, path=path)})
            try:
                session = open_warm(peer, tried, self._workload, rng)
            except PeerFailure as failure:
                say(f"{self._workload.name}, {peer.name}: {path.name}: {failure}")
                self.failures.setdefault(peer.name, str(failure))
                continue
            session.facts["file"] = path.name
            self.sessions[peer.name], self.setups[peer.name] = session, tried
            self.failures.pop(peer.name, None)
            return

    def measure(self, name: str, seed: str) -> Result:
        """Measures until one measurement is not disturbed; returns the least disturbed one. Raises PeerFailure."""
        found: list[Result] = []
        for attempt in range(self._attempts):
            rng = random.Random(f"{seed}-{attempt}")  # new token ids, so that no prefix is cached
            found.append(measure_once(self.sessions[name], self.setups[name], self._workload, rng))
            if (found[-1].others_cpu_percent or 0.0) <= report.MOST_OTHERS:
                break
        best = min(found, key=lambda result: result.others_cpu_percent or 0.0)
        return dataclasses.replace(best, facts={**best.facts, "attempts": len(found)})

    def close(self) -> None:
        for session in self.sessions.values():
            session.close()


def known_series(document: dict[str, Any]) -> dict[tuple[str, str], Series]:
    """Returns the series of a file by workload and peer, with the figures that its rounds record."""
    known: dict[tuple[str, str], Series] = {}
    for row in document.get("series", []):
        series = Series(row["peer"], row["workload"], failure=row["failure"])
        for each in row["rounds"]:
            gaps = [] if each["p95_gap_s"] is None else [each["p95_gap_s"]]
            same = {
                name: each[name]
                for name in ("peak_memory_bytes", "client_cpu_s", "first_token_s", "others_cpu_percent")
            }
            result = Result(each["wall_s"], [each["generated"]], gaps, facts={**row["facts"], "counts": each["counts"]})
            series.results.append(dataclasses.replace(result, **same))
        known[row["workload"], row["peer"]] = series
    return known


def run(
    setup: Setup, workload: Workload, peers: Sequence[Opens], known: dict[tuple[str, str], Series], rounds: int,
    deadline: float, keep: Callable[[], None], attempts: int = 3,
) -> None:  # fmt: skip
    """Runs the missing rounds of a workload, until `deadline` of time.monotonic()."""
    rows = [known.setdefault((workload.name, peer.name), Series(peer.name, workload.name)) for peer in peers]
    first = min((len(row.results) for row in rows if row.failure is None), default=rounds)
    if first >= rounds or time.monotonic() > deadline:
        return
    engines = Engines(peers, setup, workload, random.Random(f"warm-{workload.name}"), attempts)
    try:
        for row in rows:
            row.failure = engines.failures.get(row.peer)
        for number in range(first, rounds):
            for at in turned(len(rows), number):
                row = rows[at]
                if row.failure is not None or len(row.results) > number or time.monotonic() > deadline:
                    continue
                try:
                    result = engines.measure(row.peer, f"{workload.name}-{number}")
                except PeerFailure as failure:
                    row.failure = str(failure)
                    say(f"{workload.name}, round {number + 1}, {row.peer}: failed, {failure}")
                    continue
                row.results.append(result)
                first_s = "" if result.first_token_s is None else f", first token {result.first_token_s:.2f} s"
                say(
                    f"{workload.name}, round {number + 1}, {row.peer}: {result.tokens_per_s:,.1f} tokens/s{first_s}, "
                    f"others took {result.others_cpu_percent or 0:.1f} % of the CPU"
                )
                keep()
    finally:
        engines.close()


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(PEER_MODELS)), help="Only this; repeatable.")
@click.option("--workload", "names", multiple=True, type=click.Choice(list(PEER_WORKLOADS)), help="Only this.")
@click.option("--peer", "peers", multiple=True, type=click.Choice((*PEERS, report.VLLM)), help="Only this; repeatable.")
@click.option(
    "--vllm-python", "vllm", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Python of an environment with vLLM; adds this peer.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--attempts", type=click.IntRange(min=1), default=3, show_default=True, help="Of a measurement.")
@click.option("--minutes", type=click.FloatRange(min=0.1), help="Begin no measurement later than this.")
@click.option("--grid", is_flag=True, help="Look for the best flags of the peers before, where none are known.")
@click.option("--threads", type=click.IntRange(min=1), help="Of every engine; default: the cores of this machine.")
@click.option("--timeout", default=600.0, show_default=True, help="Seconds that one engine may take for one workload.")
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False), help="Where the figures go.")
def main(
    models: tuple[str, ...], names: tuple[str, ...], peers: tuple[str, ...], vllm: Path | None, rounds: int,
    attempts: int, minutes: float | None, grid: bool, threads: int | None, timeout: float, path: Path | None,
) -> None:  # fmt: skip
    """Measure the rounds that the file of figures does not have yet, and print medians and ratios."""
    deadline = time.monotonic() + 60 * (minutes or 1e6)
    path = path or RESULTS / "bench-peers.json"
    unasked = () if vllm or names or models else (BF16,)
    chosen = [
        workload for workload in PEER_WORKLOADS.values()
        if (not names or workload.name in names) and (not models or workload.model in models)
        and workload.model not in unasked
    ]  # fmt: skip
    with ended_by_signals(), contextlib.ExitStack() as stack:
        used = dict.fromkeys(workload.model for workload in chosen)
        setup = _setup({name: places.describe_model(FILES[name](stack)) for name in used}, threads, timeout)
        searches = {report.STOCK_BEST: remembered(setup, stock=True), report.OPENVINO_BEST: openvino.remembered(setup)}
        engines = _engines(peers or (*PEERS, *([report.VLLM] if vllm else [])), searches, vllm)
        about = facts.facts(facts.command_line("python -m benchmarks.bench_peers"))
        about["peer_versions"] = places.peer_versions(setup.bench_python)
        document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if document.get("revision", about["revision"]) != about["revision"]:
            say(f"{path.name} is of revision {document['revision']}: all is measured anew")
            document = {}
        known = known_series(document)

        def keep() -> None:
            measured = {name: PEER_WORKLOADS[name].outline() for name in dict.fromkeys(name for name, _ in known)}
            rows = list(known.values())
            most = max((len(row.results) for row in rows), default=0)
            options = {"quick": False, "cut": False, "rounds": most, "threads": setup.threads, "workloads": measured}
            found = {peer: {w.name: best.found[w.name] for w in chosen if w.name in best.found}
                     for peer, best in searches.items()}  # fmt: skip
            text = json.dumps(report.document(about, options, rows, {"grid": found}), indent=1, allow_nan=False)
            part = path.with_suffix(".part")
            part.write_text(text + "\n", encoding="utf-8")
            os.replace(part, path)

        if grid:
            _search({peer.name for peer in engines}, searches, setup, chosen)
            keep()
        for workload in chosen:
            run(setup, workload, engines, known, rounds, deadline, keep, attempts)
    if measured := [row for row in known.values() if row.results or row.failure is not None]:
        show(measured, None)
    say(f"Figures: {path}")


def _setup(models: dict[str, Model], threads: int | None, timeout_s: float) -> Setup:
    return Setup(
        models=models, env=environment(os.environ), python=places.ROOT / ".venv" / "bin" / "python",
        bench_python=places.bench_python(say), programs=None, lcp_server=None, logs=places.log_folder(),
        threads=threads or Machine.here().cores, timeout_s=timeout_s, stock=places.stock_programs(say),
    )  # fmt: skip


def _search(
    peers: Collection[str], searches: Mapping[str, Remembered], setup: Setup, workloads: Sequence[Workload]
) -> None:
    """Searches the best flags of the peers for the workloads without a record."""
    if report.STOCK_BEST in peers:
        search_flags(setup, workloads, searches[report.STOCK_BEST], say, stock=True)
    if report.OPENVINO_BEST in peers:
        openvino.search_settings(setup, workloads, searches[report.OPENVINO_BEST], say)


def _engines(peers: Sequence[str], searches: Mapping[str, Remembered], vllm: Path | None) -> list[Opens]:
    if report.VLLM in peers and vllm is None:
        raise click.UsageError(f"--peer {report.VLLM!r} needs --vllm-python")
    known: dict[str, Opens] = {
        report.OURS: Ours(),
        report.STOCK_BEST: LlamaServer(report.STOCK_BEST, searches[report.STOCK_BEST], stock=True),
        report.OPENVINO: OpenVino(report.OPENVINO),
        report.OPENVINO_BEST: OpenVino(report.OPENVINO_BEST, searches[report.OPENVINO_BEST]),
    }
    if vllm:
        known[report.VLLM] = VLlm(report.VLLM, vllm)
    return [known[name] for name in peers]


if __name__ == "__main__":
    sys.exit(main_guard(main))
