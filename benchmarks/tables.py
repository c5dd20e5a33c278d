"""Fills the tables of README.md and docs/benchmarks.md from the JSON files of `make bench`.

python -m benchmarks.tables [FILE.json]...

Each table names its files in benchmarks/results. FILES replace the files of the table that names one of them, or of a
page's only table. All other tables are filled from the files that they name. README's columns are llamabatch, the stock
llama-server, OpenVINO GenAI, the loop and the limit; docs/benchmarks.md has all peers. If the files have no stock
llama-server, README shows the patched one and says so. The tables leave out a peer that failed, and a workload whose
run was stopped: a peer has fewer rounds than another one, and no failure.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks import report
from benchmarks.workloads import PEER_WORKLOADS, WORKLOADS
from llamabatch.utils.format import seconds, significant

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_WIDTH = 120
_BEGIN, _END = "<!-- measured:begin", "<!-- measured:end -->"
_BLOCK = re.compile(re.escape(_BEGIN) + r"(?P<files>[^>]*)-->\n(?P<body>.*?)" + re.escape(_END), re.DOTALL)

_STOCK = (report.STOCK, report.STOCK_BEST)
_OPENVINO = (report.OPENVINO, report.OPENVINO_BEST)
_README_PEERS = (report.OURS, *_STOCK, report.OPENVINO_BEST, report.LOOP, report.LIMIT)
_ALL_PEERS = (
    report.OURS, *report.SERVERS, report.OPENVINO_BEST, report.VLLM, "xllamacpp", "llama-cpp-python server",
    report.LOOP, report.LIMIT,
)  # fmt: skip
PAGES: Mapping[str, tuple[str, ...]] = {"README.md": _README_PEERS, "docs/benchmarks.md": _ALL_PEERS}

# Label of a row -> workload, figure
ROWS = {
    "burst: 32 x (64 + 64)": ("burst", "tokens_per_s"),
    "burst, 1B at Q4_K_M": ("burst, 1B Q4_K_M", "tokens_per_s"),
    "ragged: 96 x (16..256 + 8..256)": ("ragged", "tokens_per_s"),
    "shared prefix: 32 x (512 + 32 + 64)": ("shared prefix", "tokens_per_s"),
    "the same, prefix in the cache": ("shared prefix, warm", "tokens_per_s"),
    "one request: 64 + 128": ("one request", "tokens_per_s"),
    "one request, first token of 1,500": ("one long prompt", "first_token_s"),
    "4 prompts of 2,000 tokens among 16 talkers": ("long prompt among talkers", "tokens_per_s"),
    "the same, p95 between a talker's tokens": ("long prompt among talkers", "p95_gap_s"),
    "burst beside a busy process": ("busy laptop", "tokens_per_s"),
    "tiny: 256 x (16..256 + 8..256)": ("tiny", "tokens_per_s"),
    "ragged: 32 x (16..256 + 8..256)": ("ragged, 32 requests", "tokens_per_s"),
    "SmolLM2-135M at Q4_1, burst": ("burst, SmolLM2 Q4_1", "tokens_per_s"),
    "the same, ragged": ("ragged, 32 requests, SmolLM2 Q4_1", "tokens_per_s"),
    "the same, shared prefix": ("shared prefix, SmolLM2 Q4_1", "tokens_per_s"),
    "the same, shared prefix in the cache": ("shared prefix, warm, SmolLM2 Q4_1", "tokens_per_s"),
    "the same, one request": ("one request, SmolLM2 Q4_1", "tokens_per_s"),
    "the same, first token of 1,500": ("one long prompt, SmolLM2 Q4_1", "first_token_s"),
    "0.5B in BF16, burst": ("burst, BF16", "tokens_per_s"),
    "BF16, ragged": ("ragged, 32 requests, BF16", "tokens_per_s"),
    "BF16, shared prefix": ("shared prefix, BF16", "tokens_per_s"),
    "BF16, one request": ("one request, BF16", "tokens_per_s"),
    "BF16, first token of 1,500": ("one long prompt, BF16", "first_token_s"),
}
# the best instructions first
_INSTRUCTIONS = (("amx_int8", "AMX"), ("avx512_bf16", "AVX-512 BF16"), ("avx512_vnni", "AVX-512 VNNI"))
_NAMES = {report.OURS: "llamabatch", report.LOOP: "loop over `llama_cpp.Llama`"}
_IS_STOCK = (
    "The stock llama-server comes from the same source with the same compiler flags, without our patches except a fix "
    "of a crash on AMX."
)
_MEANINGS = {
    report.STOCK: f"{_IS_STOCK} It has its defaults with `-np 32`.",
    report.PATCHED: "The patched llama-server has our kernels, and its defaults with `-np 32`.",
    report.VLLM: "In vLLM's rows both have BF16.",
    report.LIMIT: "The limit is llama-batched-bench of the patched tree, which samples nothing.",
}
# whether the best flags and settings were searched -> peer -> meaning
_BEST = {
    True: {
        report.STOCK_BEST: "Best flags are the best of its defaults and eight combinations.",
        report.OPENVINO_BEST: "Best settings of OpenVINO GenAI are the best that a search found.",
    },
    False: {
        report.STOCK_BEST: "Best flags are its defaults or `-no-kvu -fa on --cache-ram 0 -ub 512`.",
        report.OPENVINO_BEST: "Best settings of OpenVINO GenAI are its defaults or 2,048 tokens in a batch with the "
        "prefix cache; its KV cache has 8 bits.",
    },
}
_NO_STOCK = "The stock llama-server was not measured."
_OLDER = (
    "The talkers were measured before long prompts had their even share of the time (`prefill_share`), which makes the "
    "usual gap longer and the longest one short."
)


@dataclass(frozen=True)
class Figures:
    """The figures of some files.

    Attributes:
        names: names of the files.
        medians: (workload, peer) -> figure -> value.
        rounds: the numbers of rounds of the files, in ascending order.
        searched: a search has found the best flags and settings of other programs.
        notes: sentences about figures that are older than a change, or that other processes disturbed.
    """

    names: tuple[str, ...]
    medians: Mapping[tuple[str, str], Mapping[str, float | None]]
    rounds: tuple[int, ...]
    machine: str
    searched: bool = False
    notes: tuple[str, ...] = ()

    @property
    def peers(self) -> set[str]:
        return {peer for (_, peer), median in self.medians.items() if median["tokens_per_s"]}


def read(names: Sequence[str], folder: Path = RESULTS) -> Figures:
    """Returns the figures of files of `make bench`.

    Args:
        names: names of files in `folder`, without .json.

    Raises:
        click.ClickException: a file is missing, comes from a cut run, or from another machine than the first file.
    """
    medians: dict[tuple[str, str], Mapping[str, float | None]] = {}
    rounds: set[int] = set()
    machines: list[str] = []
    notes: list[str] = []
    searched = False
    for name in names:
        path = folder / f"{name}.json"
        if not path.is_file():
            raise click.ClickException(f"{path} does not exist; the files of the tables lie in {folder}")
        document = json.loads(path.read_text(encoding="utf-8"))
        _check(path, document)
        about = document["machine"]
        cpu = about["cpu"].replace("(R)", "").removesuffix(" Processor")
        machines.append(f"{about['cores']} cores of {cpu}{_best_instructions(document)}")
        searched |= "llama_server_grid" in document or any(document.get("grid", {}).values())
        stopped = _stopped(document)
        for row in document["series"]:
            if row["workload"] in stopped or row.get("failure") is not None:
                continue
            medians[row["workload"], row["peer"]] = row["median"]
            rounds |= {len(row["rounds"])} - {0}
            options = row["facts"].get("options", {})
            if row["peer"] == report.OURS and row["workload"] in report.GAPS and "prefill_share" not in options:
                notes = [_OLDER, *notes]
            if row["workload"] in PEER_WORKLOADS and _disturbed(row):
                notes.append(f"Other processes disturbed {row['peer']} on {row['workload']}.")
    if len(set(machines)) > 1:
        raise click.ClickException(f"{', '.join(names)} are of more than one machine: {'; '.join(machines)}")
    return Figures(tuple(names), medians, tuple(sorted(rounds)), machines[0], searched, tuple(notes))


def _best_instructions(document: Mapping[str, Any]) -> str:
    """Returns the best instructions of the machine, such as " with AMX"; "" if the file names none of them. The name of
    a CPU does not tell, because a virtual machine may hide instructions."""
    flags = document.get("cpu_flags", ())
    return next((f" with {name}" for flag, name in _INSTRUCTIONS if flag in flags), "")


def _stopped(document: Mapping[str, Any]) -> set[str]:
    """Returns the workloads whose run was stopped: a peer has fewer rounds than another one, and no failure."""
    most: dict[str, int] = {}
    for row in document["series"]:
        most[row["workload"]] = max(most.get(row["workload"], 1), len(row["rounds"]))
    return {
        row["workload"] for row in document["series"]
        if len(row["rounds"]) < most[row["workload"]] and row.get("failure") is None
    }  # fmt: skip


def _disturbed(row: Mapping[str, Any]) -> bool:
    """Returns True if other processes took too much of the CPU in at least half of the rounds, so that the median is
    unreliable."""
    disturbed = [(each.get("others_cpu_percent") or 0.0) > report.MOST_OTHERS for each in row["rounds"]]
    return any(disturbed) and 2 * sum(disturbed) >= len(disturbed)


def _check(path: Path, document: Mapping[str, Any]) -> None:
    options = document.get("options", {})
    if "series" not in document or "quick" not in options:
        raise click.ClickException(f"{path} is no file of python -m benchmarks.bench or bench_peers")
    shortened = [name for name in ("quick", "cut") if options[name]]
    if shortened:
        raise click.ClickException(f"{path} is of a run with --{shortened[0]}; the tables hold whole runs alone")
    unknown = {row["workload"] for row in document["series"]} - WORKLOADS.keys() - PEER_WORKLOADS.keys()
    if unknown:
        raise click.ClickException(f"{path} has the workload {min(unknown)!r}, of which no row is known")


def block(figures: Figures, peers: Sequence[str], results: str) -> str:
    """Returns the caption and the table of the peers that have figures.

    Args:
        results: path from the page to the folder of results.
    """
    stock = figures.peers & {*_STOCK}
    wanted = peers if stock or report.PATCHED in peers else (peers[0], report.PATCHED, *peers[1:])
    columns = [peer for peer in wanted if peer in figures.peers]
    known = {**_MEANINGS, **_BEST[figures.searched]}
    meanings = [known[peer] for peer in columns if peer in known]
    if report.STOCK_BEST in columns and report.STOCK not in columns:
        meanings = [_IS_STOCK, *meanings]
    sentences = [*meanings, *([] if stock else [_NO_STOCK]), *figures.notes]
    links = ", ".join(f"[{number}]({results}/{name}.json)" for number, name in enumerate(figures.names, 1))
    counted = " to ".join(map(str, sorted({figures.rounds[0], figures.rounds[-1]})))
    caption = (
        f"Medians of {counted} rounds on {figures.machine}; in brackets, how many times as fast llamabatch is (JSON: "
        f"{links}). {' '.join(sentences)}"
    )
    lines = textwrap.wrap(caption, _WIDTH, break_long_words=False, break_on_hyphens=False)
    header = ["workload", *(_NAMES.get(peer, peer) for peer in columns)]
    table = [header, ["---"] * len(header)]
    for label, (workload, figure) in ROWS.items():
        values = [_value(figures, workload, peer, figure) for peer in columns]
        if any(values):
            table.append([label, *map(_cell, [figure] * len(values), columns, values, [values[0]] * len(values))])
    text = "\n".join(f"| {' | '.join(cells)} |".replace("|  ", "| ") for cells in table).replace("| --- ", "|---")
    return "\n".join(lines) + "\n\n" + text.replace("--- |", "---|") + "\n"


def _value(figures: Figures, workload: str, peer: str, figure: str) -> float | None:
    """Returns the median of a peer. For best settings, it is the better median of best settings and defaults."""
    pair = next((each for each in (_STOCK, _OPENVINO) if each[1] == peer), (peer,))
    found = [figures.medians.get((workload, name), {}).get(figure) for name in pair]
    measured = [value for value in found if value]
    if not found[-1] or not measured:
        return None
    return max(measured) if figure == "tokens_per_s" else min(measured)


def _cell(figure: str, peer: str, value: float | None, ours: float | None) -> str:
    if not value:
        return ""
    if figure == "p95_gap_s":
        return f"{value * 1000:,.0f} ms"
    if figure == "first_token_s":
        return seconds(value) if peer == report.OURS or not ours else f"{seconds(value)} ({value / ours:.2f} x)"
    if peer == report.OURS or not ours:
        return significant(value)
    if peer == report.LIMIT:
        return f"{significant(value)} ({ours / value:.2f})"
    ratio = ours / value
    return f"{significant(value)} ({ratio:.2f} x)" if ratio < 3 else f"{significant(value)} ({ratio:.1f} x)"


def fill(text: str, peers: Sequence[str], results: str, names: Sequence[str] = ()) -> str:
    """Returns a page with its tables filled from the files `names`, or from the files that each table names."""
    tables = [set(found["files"].split()) for found in _BLOCK.finditer(text)]
    if not tables:
        raise click.ClickException(f"the page has no pair of lines {_BEGIN} FILE... --> and {_END}")
    if names and len(tables) > 1 and sum(bool(each & set(names)) for each in tables) != 1:
        raise click.ClickException(f"not exactly one table of the page names one of {', '.join(names)}")

    def anew(found: re.Match[str]) -> str:
        files = found["files"].split()
        if names and (len(tables) == 1 or set(files) & set(names)):
            files = list(names)
        return f"{_BEGIN} {' '.join(files)} -->\n{block(read(files), peers, results)}{_END}"

    return _BLOCK.sub(anew, text)


def pages(names: Sequence[str] = ()) -> dict[Path, str]:
    """Returns the text of each page with its tables filled again."""
    return {
        ROOT / page: fill((ROOT / page).read_text(encoding="utf-8"), peers, _results_from(page), names)
        for page, peers in PAGES.items()
    }


def _results_from(page: str) -> str:
    return "../" * page.count("/") + "benchmarks/results"


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
def main(files: tuple[Path, ...]) -> None:
    """Fill the tables of README.md and docs/benchmarks.md from FILES of `make bench`."""
    for file in files:
        if file.resolve().parent != RESULTS:
            raise click.ClickException(f"{file} does not lie in {RESULTS}, from where the pages link to it")
    for path, text in pages([file.stem for file in files]).items():
        path.write_text(text, encoding="utf-8")
        click.echo(f"{path.relative_to(ROOT)}: filled", err=True)


if __name__ == "__main__":
    main()
