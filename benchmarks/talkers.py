"""Measures long prompts beside talkers, ours and llama-server's: the cost of an early first token for the others.

    python -m benchmarks.talkers [--quick] [--rounds N] [--json FILE] [--plot FILE]

Eight requests, the talkers, generate without an end. Then two prompts of 1,500 tokens arrive at once. The program
measures the time to the first token of the long prompts, and the gaps between the talkers' tokens meanwhile. It varies
`prefill_share` of ours and `-b` and `-ub` of the stock llama-server, in alternating rounds. See docs/benchmarks.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks import facts, places, report, rounds
from benchmarks.peers.base import Peer, Result, percentile
from benchmarks.peers.child import Ours
from benchmarks.peers.servers import LlamaServer
from benchmarks.process import ended_by_signals, environment
from benchmarks.serving import make_setup
from benchmarks.talkers_curve import FIGURES, Point, read, verdict
from benchmarks.workloads import Shape, Workload
from llamabatch.planning.machine import Machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SCHEMA_VERSION = 1
SHARES = (0.25, 0.5, 0.75, 1.0)
BATCHES = (64, 128, 256, 512, 2048)
QUICK_SHARES, QUICK_BATCHES = (0.25, 1.0), (64, 512)
_SHARES = {"p50_gap_s": 0.5, "p95_gap_s": 0.95, "p99_gap_s": 0.99, "max_gap_s": 1.0}

WORKLOAD = Workload(
    "long prompts beside talkers", "synth",
    (*[Shape(64, 1900, endless=True)] * 8, *[Shape(1500, 4, 1.0, talker=False)] * 2), n_ctx=2048, streamed=True,
)  # fmt: skip
QUICK = Workload(
    "long prompts beside talkers, quick", "tiny",
    (*[Shape(16, 1900, endless=True)] * 8, *[Shape(1500, 4, 0.05, talker=False)] * 2), n_ctx=2048, streamed=True,
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A peer with its server's name, and the value of the setting that the server's curve varies."""

    server: str
    value: float
    peer: Peer


def settings(shares: Sequence[float], batches: Sequence[int]) -> list[Setting]:
    ours: list[tuple[float, Peer]] = [
        (share, Ours(f"ours, prefill_share={share:g}", {"prefill_share": share})) for share in shares
    ]
    theirs: list[tuple[float, Peer]] = [
        (size, LlamaServer(f"{report.STOCK}, -b {size} -ub {size}", flags=_flags(size), stock=True)) for size in batches
    ]
    return [Setting(name, *each) for name, some in ((report.OURS, ours), (report.STOCK, theirs)) for each in some]


def _flags(size: int) -> tuple[str, ...]:
    return ("-b", str(size), "-ub", str(size))


def first_tokens(result: Result, workload: Workload) -> list[float]:
    """Returns the seconds from the request of each long prompt to its first token."""
    return [
        times[0] - began
        for times, began, shape in zip(result.times_s, result.began_s, workload.shapes, strict=True)
        if not shape.endless
    ]


def gaps_meanwhile(result: Result, workload: Workload) -> list[float]:
    """Returns the gaps between the talkers' tokens, from the arrival of the long prompts until all have a first token.

    A gap that lies only partly in that time counts.
    """
    pairs = list(zip(result.times_s, workload.shapes, strict=True))
    begin = min(at for at, shape in zip(result.began_s, workload.shapes, strict=True) if not shape.endless)
    end = max(times[0] for times, shape in pairs if not shape.endless)
    return [
        later - earlier
        for times, shape in pairs
        if shape.endless
        for earlier, later in itertools.pairwise(times)
        if later > begin and earlier < end
    ]


def figures(result: Result, workload: Workload) -> dict[str, Any]:
    """Returns the figures of one round, or a "failure" if a talker ended before the long prompts' first tokens."""
    first = first_tokens(result, workload)
    pairs = zip(result.times_s, workload.shapes, strict=True)
    silent = sum(shape.endless and len(times) >= shape.generated for times, shape in pairs)
    if silent:
        return {"failure": f"{silent} talkers had their last token before the long prompts had their first"}
    found = gaps_meanwhile(result, workload)
    return {
        "first_tokens_s": [round(each, 6) for each in first],
        "first_s": statistics.mean(first),
        "last_s": max(first),
        "gaps": len(found),
        **{name: percentile(found, share) for name, share in _SHARES.items()},
    }


def points(found: Mapping[str, Sequence[Mapping[str, Any]]], chosen: Sequence[Setting]) -> list[Point]:
    """Returns a point for each setting whose rounds all have figures.

    Args:
        found: figures of the rounds, by name of the peer.
    """
    made = []
    for setting in chosen:
        each = found.get(setting.peer.name, ())
        if each and not any("failure" in one for one in each):
            median = {name: statistics.median(one[name] for one in each) for name in ("first_s", "last_s", *FIGURES)}
            made.append(Point(setting.server, setting.value, median.pop("first_s"), median.pop("last_s"), median))
    return made


def document(
    about: Mapping[str, Any], options: Mapping[str, Any], series: Sequence[rounds.Series],
    chosen: Sequence[Setting], workload: Workload,
) -> dict[str, Any]:  # fmt: skip
    """Returns the content of the JSON file, with times in seconds. docs/benchmarks.md describes the file."""
    found = {row.peer: [figures(result, workload) for result in row.results] for row in series}
    made = points(found, chosen)
    rows = {row.peer: row for row in series}
    curve: list[dict[str, Any]] = []
    for setting in chosen:
        row = rows.get(setting.peer.name, rounds.Series(setting.peer.name, workload.name))
        each = found.get(row.peer, [])
        point = next((p for p in made if (p.server, p.value) == (setting.server, setting.value)), None)
        said = row.results[-1].facts if row.results else {}
        curve.append({
            "server": setting.server, "value": setting.value, "peer": row.peer,
            "failure": row.failure or next((one["failure"] for one in each if "failure" in one), None),
            "median": {"first_s": point.first_s, "last_s": point.last_s, **point.gaps} if point else None,
            "facts": {name: value for name, value in said.items() if name not in ("folder", "first_token_s")},
            "rounds": each,
        })  # fmt: skip
    return {
        "schema_version": SCHEMA_VERSION, **about, "options": dict(options), "curve": curve,
        "outside": verdict(made),
    }  # fmt: skip


def lines(made: Mapping[str, Any]) -> list[str]:
    """Returns a line for each setting, and a line for each judged figure."""
    names = ("first, s", "last, s", *(f"{name.removesuffix('_gap_s')}, ms" for name in FIGURES))
    text = [f"{'':36}" + "".join(f"{name:>10}" for name in names)]
    for row in made["curve"]:
        median = row["median"]
        if median is None:
            text.append(f"{row['peer']:36} failed: {row['failure'] or 'not measured'}")
            continue
        first = f"{median['first_s']:10.2f}{median['last_s']:10.2f}"
        text.append(f"{row['peer']:36}{first}" + "".join(f"{1000 * median[name]:10.1f}" for name in FIGURES))
    for figure, judged in made["outside"].items():
        missed = f"stock {judged['stock_not_beaten']} not beaten, ours {judged['ours_beaten']} beaten"
        said = "met" if judged["met"] else f"MISSED: {missed}"
        text.append(f"ours outside of the stock server's curve, {figure.removesuffix('_gap_s')} gap: {said}")
    return text


def say(text: str) -> None:
    click.echo(text, err=True)


@click.command()
@click.option("--quick", is_flag=True, help="The bundled model and two settings of each, one round: half a minute.")
@click.option("--rounds", "n_rounds", type=click.IntRange(min=1), help="Default: 3, quick 1.")
@click.option("--threads", type=click.IntRange(min=1), help="Of every server; default: the cores of this machine.")
@click.option("--timeout", default=600.0, show_default=True, help="Seconds that one measurement may take.")
@click.option("--seed", default=0, show_default=True, help="Of the token ids.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Where the figures go.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path, dir_okay=False), help="Where the picture goes.")
def main(
    quick: bool, n_rounds: int | None, threads: int | None, timeout: float, seed: int, json_file: Path | None,
    plot_file: Path | None,
) -> None:  # fmt: skip
    """Measure ours and the stock llama-server over their settings, alternating, and draw both curves."""
    env = environment(os.environ)  # read first, since loading llama_cpp may add variables
    workload = QUICK if quick else WORKLOAD
    n_rounds = n_rounds or (1 if quick else 3)
    json_file = json_file or RESULTS / ("talkers-quick.json" if quick else "talkers.json")
    plot_file = plot_file or (json_file.with_suffix(".png") if quick else ROOT / "docs" / "images" / "talkers.svg")
    chosen = settings(QUICK_SHARES, QUICK_BATCHES) if quick else settings(SHARES, BATCHES)
    with ended_by_signals():
        setup = make_setup(env, {workload.model}, threads or Machine.here().cores, say)
        setup = dataclasses.replace(setup, stock=places.stock_programs(say), timeout_s=timeout)
        about = facts.facts(facts.command_line("python -m benchmarks.talkers"))
        options = {
            "quick": quick, "rounds": n_rounds, "threads": setup.threads, "seed": seed, "workload": workload.outline(),
        }  # fmt: skip
        write = partial(_write, json_file, about, options, chosen, workload)
        series = rounds.run(
            setup, [workload], [each.peer for each in chosen], n_rounds, say=say, after_round=write, seed=seed
        )
    made = document(about, options, series, chosen, workload)
    for line in lines(made):
        click.echo(line)
    from benchmarks.talkers_plot import draw  # takes a second to import

    draw(*read(json_file), plot_file)
    say(f"Figures: {json_file}, picture: {plot_file}")


def _write(
    path: Path, about: dict[str, Any], options: dict[str, Any], chosen: Sequence[Setting], workload: Workload,
    series: list[rounds.Series],
) -> None:  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    made = document(about, options, series, chosen, workload)
    path.write_text(json.dumps(made, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
