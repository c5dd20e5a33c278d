"""Prints a comparison as tables on a terminal, through rich."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llamabatch.tools.compare.measure import BASELINE
from llamabatch.tools.compare.report import REFERENCE, Report, Row, Spread
from llamabatch.utils.checks import counted
from llamabatch.utils.console import new_table, print_table, sentence
from llamabatch.utils.format import significant, times

_MIB = 2**20
_NONE = "–"


class _Column(NamedTuple):
    head: str
    cell: Callable[[Row], str]


def show(report: Report, console: Console) -> None:
    """Prints the machine, the tables, the errors and the advice."""
    workload, machine = report.workload, report.machine
    n = len(workload.prompts)
    sentence(
        console,
        f"{report.model}, {counted(n, 'prompt')} ({workload.source}), {workload.n_prompt_tokens:,} prompt "
        f"tokens, at most {report.max_tokens} generated for each, greedy\n{machine.summary}",
    )
    columns = _columns(report, report.rows)
    print_table(console, _table(columns, report.rows, lambda row: row is _fastest(report.rows)))
    if report.sweep is not None:
        sweep = report.sweep
        sentence(console, "batched, by number of slots:")
        efficiency = {id(row): value for row, value in zip(sweep.rows, sweep.efficiency, strict=True)}
        columns = _columns(report, sweep.rows)
        columns[0] = _Column("slots", lambda row: f"{row.n_slots}{' ◀ knee' if row.n_slots == sweep.knee else ''}")
        columns.insert(4, _Column("effi-\nciency", lambda row: _share(efficiency[id(row)])))
        print_table(console, _table(columns, sweep.rows, lambda row: row.n_slots == sweep.knee))
    for row in (*report.rows, *(report.sweep.rows if report.sweep else ())):
        if row.error is not None:
            sentence(console, f"{row.name}, n_slots = {row.n_slots}: {row.error}", "red")
    if parted := _parted(report):
        sentence(console, parted)
    if report.others.is_much:
        sentence(console, f"{report.others.sentence}: close them and compare again.", "yellow")
    if report.advice is not None:
        sentence(console, report.advice.sentence, "bold")


def _parted(report: Report) -> str:
    """Returns the reason why some texts differ from the texts of "sequential"; "" if no text differs."""
    rows = (*report.rows, *(report.sweep.rows if report.sweep else ()))
    names = dict.fromkeys(row.name for row in rows if row.measured and row.equal is not None and row.equal < 1)
    if not names:
        return ""
    return (
        f"Some texts of {', '.join(names)} differ from those of {REFERENCE}: other kernels computed them and round in "
        "another way, so that of two nearly equal tokens the other one may win. The line `Equal bits` of "
        "`llamabatch plan` has the reason, docs/equality.md the choices that make them equal."
    )


def _table(columns: list[_Column], rows: tuple[Row, ...], marked: Callable[[Row], bool]) -> Table:
    table = new_table(*(column.head for column in columns))
    for row in rows:
        cells = [column.cell(row) if row.measured or column is columns[0] else _NONE for column in columns]
        table.add_row(*map(escape, cells), style="bold green" if marked(row) else "red" if row.error else None)
    return table


def _columns(report: Report, rows: tuple[Row, ...]) -> list[_Column]:
    has_baseline = any(row.strategy == BASELINE and row.measured for row in report.rows)
    against = "speed-\nup" if has_baseline else f"against\n{REFERENCE}"
    return [
        _Column("strategy", lambda row: row.name),
        _Column("requests\n/s", lambda row: significant(row.requests_per_s)),
        _Column("tokens\n/s", lambda row: significant(row.tokens_per_s)),
        _Column(against, lambda row: _NONE if row.speed_up is None else f"{times(row.speed_up)} ×"),
        _spread("first token", rows, lambda row: row.ttft),
        _spread("between tokens", rows, lambda row: row.inter_token),
        _spread("latency", rows, lambda row: row.latency),
        _Column("memory\nMiB", lambda row: _number(row.peak_memory_bytes, lambda size: f"{size / _MIB:,.0f}")),
        _Column("rows/\nstep", lambda row: _number(row.rows_per_step, lambda mean: f"{mean:.1f}")),
        _Column("passes/\nstep", lambda row: _number(row.passes_per_step, lambda mean: f"{mean:.2f}")),
        _Column("equal\ntexts", lambda row: _share(row.equal)),
    ]


def _spread(name: str, rows: tuple[Row, ...], of: Callable[[Row], Spread]) -> _Column:
    """Returns a column with p50 and p95. The unit is ms if all figures are below 1 s, else s."""
    largest = max((value for row in rows for value in (of(row).p50, of(row).p95) if value is not None), default=0.0)
    unit, scale = ("ms", 1000) if largest < 1 else ("s", 1)

    def cell(row: Row) -> str:
        p50, p95 = (_number(value, lambda x: significant(x * scale)) for value in (of(row).p50, of(row).p95))
        return f"{p50} / {p95}"

    return _Column(f"{name}\n{unit} p50 / p95", cell)


def _number(value: float | None, write: Callable[[float], str]) -> str:
    return "n/a" if value is None else write(value)


def _share(value: float | None) -> str:
    """Formats a share in percent. Never rounds up to 100 %."""
    if value is None:
        return "n/a"
    return "100 %" if value == 1 else f"{min(100 * value, 99.9):.1f} %"


def _fastest(rows: tuple[Row, ...]) -> Row | None:
    measured = [row for row in rows if row.measured and row.strategy != BASELINE]
    return max(measured, key=lambda row: row.tokens_per_s, default=None)
