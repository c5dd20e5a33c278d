"""Measures llamabatch and its peers in turn on one machine: `make bench` and `make bench-quick`; docs/benchmarks.md.

python -m benchmarks.bench [--quick] [--workload NAME]... [--peer NAME]... [--rounds N] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks import facts, grid, idle, places, report, rounds
from benchmarks.limit import Limit
from benchmarks.peers.base import Peer, Setup
from benchmarks.peers.child import LlamaLoop, Ours
from benchmarks.peers.servers import LcpServer, LlamaServer, XLlamaCpp, remembered, search_flags
from benchmarks.process import ended_by_signals, environment
from benchmarks.workloads import WORKLOADS, Workload
from llamabatch.planning.machine import Machine

PEERS = (report.OURS, *report.SERVERS, "xllamacpp", "llama-cpp-python server", report.LOOP, report.LIMIT)
QUICK_PEERS = (report.OURS, report.STOCK_BEST, report.PATCHED_BEST, report.LOOP)
RESULTS = Path(__file__).resolve().parent / "results"
_WIDTH = 120  # columns of a table that goes to a file


def make_peers(names: Sequence[str], best: Mapping[str, grid.Remembered], quick: bool) -> list[Peer]:
    known: dict[str, Peer] = {
        report.OURS: Ours(),
        report.STOCK: LlamaServer(report.STOCK, stock=True),
        report.STOCK_BEST: LlamaServer(report.STOCK_BEST, best[report.STOCK_BEST], stock=True),
        report.PATCHED: LlamaServer(report.PATCHED),
        report.PATCHED_BEST: LlamaServer(report.PATCHED_BEST, best[report.PATCHED_BEST]),
        "xllamacpp": XLlamaCpp(),
        "llama-cpp-python server": LcpServer(),
        report.LOOP: LlamaLoop(more=4 if quick else 1),
        report.LIMIT: Limit(),
    }
    return [known[name] for name in names]


def quick_workloads() -> list[Workload]:
    return [WORKLOADS["burst"], WORKLOADS["ragged"].cut(), WORKLOADS["tiny"]]


def make_setup(
    env: dict[str, str], workloads: Sequence[Workload], peers: Sequence[str], threads: int, timeout_s: float
) -> Setup:
    """Makes the missing models, programs and environments. A peer whose program cannot be made fails in its rounds."""
    others = {"xllamacpp", "llama-cpp-python server"} & set(peers)
    native = {report.PATCHED, report.PATCHED_BEST, report.LIMIT} & set(peers)
    stock = {report.STOCK, report.STOCK_BEST} & set(peers)
    return Setup(
        models=places.models({workload.model for workload in workloads} | {"synth"}, say),
        env=env,
        python=places.ROOT / ".venv" / "bin" / "python",
        bench_python=places.bench_python(say) if others else None,
        programs=places.built_programs(say) if native else None,
        lcp_server=places.lcp_server(say) if "llama-cpp-python server" in peers else None,
        logs=places.log_folder(),
        threads=threads,
        timeout_s=timeout_s,
        stock=places.stock_programs(say) if stock else None,
    )


def say(text: str) -> None:
    click.echo(text, err=True)


@click.command()
@click.option("--quick", is_flag=True, help="Fewer workloads and peers, cut short: under five minutes.")
@click.option("--workload", "names", multiple=True, type=click.Choice(list(WORKLOADS)), help="Only this; repeatable.")
@click.option("--peer", "peers", multiple=True, type=click.Choice(PEERS), help="Only this; repeatable.")
@click.option("--rounds", "n_rounds", type=click.IntRange(min=1), help="Default: 3, quick 2.")
@click.option("--cut", is_flag=True, help="Cut the workloads to about a fifth.")
@click.option("--threads", type=click.IntRange(min=1), help="Of every peer; default: the cores of this machine.")
@click.option("--timeout", default=900.0, show_default=True, help="Seconds that one peer may take for one workload.")
@click.option("--grid", "again", is_flag=True, help="Look for llama-server's best flags again.")
@click.option("--seed", default=0, show_default=True, help="Of the token ids.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Where the figures go.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path, dir_okay=False), help="Where the picture goes.")
def main(
    quick: bool, names: tuple[str, ...], peers: tuple[str, ...], n_rounds: int | None, cut: bool, threads: int | None,
    timeout: float, again: bool, seed: int, json_file: Path | None, plot_file: Path | None,
) -> None:  # fmt: skip
    """Measure ours and its peers, alternating, and print medians, ratios and targets."""
    env = environment(os.environ)  # read first, since loading llama_cpp may add variables
    workloads = [WORKLOADS[name] for name in names] or (quick_workloads() if quick else list(WORKLOADS.values()))
    workloads = [workload.cut() for workload in workloads] if cut else workloads
    peers = peers or (QUICK_PEERS if quick else PEERS)
    n_rounds = n_rounds or (2 if quick else 3)
    name = "bench-quick" if quick else "bench"
    json_file = json_file or RESULTS / f"{name}.json"
    plot_file = plot_file or json_file.with_suffix(".png")
    with ended_by_signals():
        setup = make_setup(env, workloads, peers, threads or Machine.here().cores, timeout)
        best = {
            report.STOCK_BEST: remembered(setup, stock=True),
            report.PATCHED_BEST: remembered(setup, stock=False),
        }
        for peer, found in best.items():
            if peer in peers and (again or not quick):
                search_flags(setup, workloads, found, say, stock=peer == report.STOCK_BEST, again=again)
        about = facts.facts(facts.command_line("python -m benchmarks.bench"))
        about["peer_versions"] = places.peer_versions(setup.bench_python)
        options = {
            "quick": quick, "cut": cut, "rounds": n_rounds, "threads": setup.threads, "seed": seed,
            "timeout_s": timeout, "workloads": {workload.name: workload.outline() for workload in workloads},
        }  # fmt: skip
        more: dict[str, Any] = {"llama_server_grid": {peer: each.found for peer, each in best.items() if peer in peers}}
        write = partial(_write, json_file, about, options, more)
        series = rounds.run(
            setup, workloads, make_peers(peers, best, quick), n_rounds, say=say, after_round=write, seed=seed
        )
        if not names and report.OURS in peers and report.LOOP in peers:
            more["idle"] = idle.measure(setup, n_rounds, say)
    write(series)
    show(series, more.get("idle"))
    from benchmarks.plot import draw  # takes a second to import

    machine = about["machine"]
    title = f"{machine['cpu']}, {machine['cores']} cores\nllamabatch {about['revision']}, {about['created'][:10]}"
    draw(series, title, plot_file)
    say(f"Figures: {json_file}, picture: {plot_file}")


def _write(
    path: Path, about: dict[str, Any], options: dict[str, Any], more: dict[str, Any], series: list[rounds.Series]
) -> None:
    text = json.dumps(report.document(about, options, series, more), indent=1, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def show(series: list[rounds.Series], single: dict[str, Any] | None) -> None:
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=_WIDTH)
    comparisons = report.compare(series)
    for workload in dict.fromkeys(row.workload for row in series):
        console.print(report.table(series, comparisons, workload))
    if single and "failure" not in single:
        console.print(report.idle_table(single))


if __name__ == "__main__":
    main()
