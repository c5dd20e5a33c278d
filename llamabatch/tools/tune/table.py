"""Prints a tuning report as tables on a terminal, through rich."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llamabatch.tools.tune.report import CHOSEN, Report, Result
from llamabatch.utils.console import new_table, print_table, sentence
from llamabatch.utils.format import significant

_NONE = "–"
_BAR, _SHORT_BAR = 32, 4  # characters of the longest bar on a wide terminal, and on a narrow one
_BESIDE_BAR = 52


def show(report: Report, console: Console) -> None:
    """Prints the candidates, the staircase, the gain, and the file of the profile."""
    line = partial(sentence, console)
    line(f"{report.profile.model} on {report.machine.summary}")
    print_table(console, _tried(report), lead=2)
    print_table(console, _stairs(report, max(_SHORT_BAR, min(_BAR, console.width - _BESIDE_BAR))))
    if report.file is not None:  # if no profile is written, there is no gain
        print_table(console, _gain(report))
    for result in report.results:
        for label, reason in result.failures.items():
            line(f"{result.title} = {label} failed: {reason}", "red")
    if report.cut_short:
        line("The time was over before everything was measured as often as planned; the rules decide the rest.")
    if report.latency is not None:
        kept = "1 slot keeps" if report.latency.rows == 1 else f"{report.latency.rows} slots keep"
        line(
            f"{kept} {report.latency.limit_ms:g} ms between two tokens at p95 "
            f'({significant(report.latency.p95_ms)} ms are expected); the profile says so, and n_slots="auto" keeps it.'
        )
    if report.file is None:
        line(
            f"{report.others.sentence}, so no profile is kept: close them and tune again, or give --beside-load.",
            "yellow",
        )
        return
    if report.others.is_much:
        line(f"{report.others.sentence}: the profile holds for a machine with such a load.", "yellow")
    key = report.profile.key
    types = "" if (key.type_k, key.type_v) == ("f16", "f16") else f" with type_k={key.type_k!r}, type_v={key.type_v!r}"
    line(f"Engines{types} on this machine use it from now on: {report.file}", "bold")


def _tried(report: Report) -> Table:
    """Returns a table with one row for each candidate. Steps are in milliseconds, prompts in tokens/s."""
    many = f"{report.many} rows\n"
    steps = ("1 row\nms", f"{many}ms", "1 row\nbusy, ms", f"{many}busy, ms")
    table = new_table("", "tried", "prompt\ntokens/s", *steps, "gain", left=2)
    for result in report.results:
        choice = result.choice
        for number, label in enumerate(choice.rounds):
            gain = choice.gains[label]
            shown = _NONE if gain is None or label == choice.default else f"{gain:.2f} ×"
            if shown != _NONE and len(choice.rounds[label]) > 1:
                shown += f" ±{choice.noise[label]:.2f}"
            table.add_row(
                escape(result.title) if number == 0 else "",
                escape(label) + (" ◀" if label == choice.chosen else ""),
                *_cells(choice.median(label)),
                shown,
                style="bold green" if label == choice.chosen else None,
                end_section=number == len(choice.rounds) - 1,
            )
    return table


def _cells(figures: Mapping[str, float]) -> list[str]:
    prompt = figures.get("prompt", figures.get("long prompt"))
    steps = [figures.get(name) for name in ("one", "many", "busy one", "busy many")]
    return [
        _NONE if prompt is None else significant(1000 / prompt),
        *(_NONE if step is None else significant(step) for step in steps),
    ]


def _stairs(report: Report, longest: int) -> Table:
    """Returns the table of decode steps. `longest`: number of characters of the longest bar."""
    gaps = {} if report.latency is None else {gap.rows: gap.p95_ms for gap in report.latency.gaps}
    table = new_table("rows", "step\nms", *(["between\ntokens, p95"] if gaps else []), "tokens/s", left=0)
    mark = " ◀ more do not pay"
    if report.latency is not None:
        mark = f" ◀ the most within {report.latency.limit_ms:g} ms"
    table.add_column("", no_wrap=True)
    most = max(stair.tokens_per_s for stair in report.stairs)
    for stair in report.stairs:
        best = stair.rows == report.best_rows
        table.add_row(
            str(stair.rows),
            significant(stair.step_ms),
            *([significant(gaps[stair.rows])] if gaps else []),
            significant(stair.tokens_per_s),
            "█" * max(1, round(longest * stair.tokens_per_s / most)) + (mark if best else ""),
            style="bold green" if best else None,
        )
    return table


def _gain(report: Report) -> Table:
    table = new_table("tokens/s", "llama.cpp's\ndefaults", "chosen", "gain")
    gain: Result = report.gain
    rows = {"prompt": 1, "one": 1, "many": report.many, "busy one": 1, "busy many": report.many}
    for name, count in rows.items():
        before, after = (gain.choice.median(label)[name] for label in (gain.choice.default, CHOSEN))
        table.add_row(
            workload(name, report.many),
            significant(count * 1000 / before),
            significant(count * 1000 / after),
            f"{significant(before / after)} ×",
        )
    return table


def workload(name: str, many: int) -> str:
    """Returns a readable name of a measurement."""
    if name == "prompt":
        return "prompt"
    plain = "decode, 1 row" if name.endswith("one") else f"decode, {many} rows"
    return f"{plain}, beside a busy process" if name.startswith("busy ") else plain
