"""`llamabatch top`: shows the status of running jobs as plain figures, or as panels in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from llamabatch.engine.stats import EngineStats
from llamabatch.errors import InputError
from llamabatch.monitor.status import Status, age_s, read, running
from llamabatch.utils.checks import counted
from llamabatch.utils.format import duration, seconds, significant
from llamabatch.utils.histogram import Histogram
from llamabatch.utils.paths import absolute

_BARS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 14
_LEAST_WIDTH = 60  # minimum number of terminal columns for a panel with bars
_SILENT_S = 3.0  # seconds that a write may be late before the job counts as silent


def find(what: str | None) -> list[Status]:
    """Returns the status of each running job.

    Args:
        what: a process id, or the path of a status file; None: all jobs of this user on this machine.

    Raises:
        InputError: the file does not exist, or is not a status file.
    """
    if what is None:
        return running()
    path = Path(absolute(what))
    if what.isdigit() and not path.exists():
        return [status for status in running() if status.pid == int(what)]
    if not path.exists():
        raise InputError(f"{what!r} is neither a process id nor a file")
    status = read(path)
    return [status] if status.is_running else []


def figures(status: Status) -> dict[str, Any]:
    """Returns the figures of a status as plain values for JSON, with times in seconds. Rates and percentiles cover the
    last `window_s` seconds. If this window has no times, percentiles cover the time since the engine started."""
    stats, recent, machine = status.stats, status.recent, status.machine
    ended = recent.ok + recent.errors + recent.aborted
    return {
        "pid": status.pid,
        "title": status.title,
        "elapsed_s": status.elapsed_s,
        "age_s": age_s(status),
        "window_s": status.window_s,
        "job": dict(status.job),
        "requests": {name: getattr(stats, name) for name in ("submitted", "in_flight", "ok", "errors", "aborted")},
        **{name: getattr(stats, name) for name in ("running", "waiting", "n_slots", "slot_use", "kv_use")},
        "rows_per_step": recent.rows_per_step or stats.rows_per_step,
        "passes_per_step": recent.passes_per_step or stats.passes_per_step,
        "generated_tokens_per_s": _rate(status, recent.generated_tokens),
        "prompt_tokens_per_s": _rate(status, recent.prompt_tokens + recent.embed_tokens),
        "requests_per_s": _rate(status, ended),
        "speeds": list(status.speeds),
        **{name: _spread(getattr(recent, name), getattr(stats, name)) for name in _DURATIONS.values()},
        "counts": stats.counts(),
        "machine": machine.document(),
    }


_DURATIONS = {"queued": "queue_s", "first token": "ttft_s", "inter-token": "inter_token_s", "whole request": "e2e_s"}


def _rate(status: Status, count: int) -> float:
    return count / status.window_s if status.window_s > 0 else 0.0


def _spread(recent: Histogram, whole: Histogram) -> dict[str, float] | None:
    """Returns the percentiles of `recent` by name; those of `whole` if `recent` is empty; None if both are empty."""
    histogram = recent if recent.count else whole
    values = {f"p{percent}": histogram.percentile(percent) for percent in (50, 95, 99)}
    return {name: value for name, value in values.items() if value is not None} or None


def draw(statuses: Sequence[Status]) -> RenderableType:
    """Returns one panel for each status. Panels are as wide as the console."""
    return Group(*(_Drawn(status) for status in statuses))


class _Drawn:
    """A panel that shows one status. A narrow panel has no bars."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _panel(self._status, bars=options.max_width >= _LEAST_WIDTH)


def _panel(status: Status, bars: bool) -> Panel:
    values = figures(status)
    title = f"{status.title or 'llamabatch'} · pid {status.pid} · {duration(status.elapsed_s)}"
    grid = Table.grid(padding=(0, 2 if bars else 1))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1)
    if values["age_s"] > status.every_s + _SILENT_S:
        grid.add_row("", Text(f"no news for {duration(values['age_s'])}", style="yellow"))
    if status.job:
        grid.add_row("rows", _rows(status, bars))
        if status.job.get("errors"):
            grid.add_row("", Text(f"{status.job['errors']:,} failed", style="red"))
    grid.add_row("requests", _requests(status.stats))
    grid.add_row("slots", _slots(values, bars))
    grid.add_row("tokens/s", _speed(values, bars))
    for times in [_times(values)] if bars else _times_in_lines(values):
        grid.add_row("", times)
    steps = f"{values['rows_per_step']:.1f} rows · {values['passes_per_step']:.2f} passes over the weights"
    grid.add_row("a step", steps)
    grid.add_row("engine", _engine(status.stats))
    grid.add_row("machine", _machine(status))
    for gpu in status.machine.gpus:
        grid.add_row(f"gpu {gpu.index}", _joined(_gpu(gpu)))
    return Panel(grid, title=title, title_align="left", border_style="dim")


def _joined(parts: list[str]) -> str:
    return " · ".join(parts)


def _bar(share: float) -> ProgressBar:
    return ProgressBar(total=1.0, completed=min(1.0, share), width=_BAR_WIDTH)


def _side_by_side(*cells: RenderableType) -> Table:
    row = Table.grid(padding=(0, 2))
    row.add_row(*cells)
    return row


def _rows(status: Status, bars: bool) -> RenderableType:
    job = status.job
    rows, total = job.get("rows") or 0, job.get("total")
    about = "~" if job.get("estimated") else ""
    parts = [f"{rows:,} of {about}{total:,}" if total else f"{rows:,}"]
    if job.get("left_s") is not None:
        parts.append(f"{duration(job['left_s'])} left")
    if not total:
        return _joined(parts)
    share = f"{rows / total:.0%}"
    return _side_by_side(_bar(rows / total), share, _joined(parts)) if bars else _joined([share, *parts])


def _requests(stats: EngineStats) -> Text:
    text = Text(f"{stats.running:,} running · {stats.waiting:,} waiting · {stats.ok:,} ok · ")
    text.append(counted(stats.errors, "error"), style="red" if stats.errors else "")
    return text.append(f" · {stats.aborted:,} aborted")


def _slots(values: dict[str, Any], bars: bool) -> RenderableType:
    text = f"{values['running']} of {values['n_slots']} · KV cache {values['kv_use']:.0%}"
    return _side_by_side(_bar(values["slot_use"]), text) if bars else text


def _speed(values: dict[str, Any], bars: bool) -> RenderableType:
    speeds = values["speeds"][-_BAR_WIDTH:]
    highest = max(speeds, default=0.0)
    curve = "".join(_BARS[round(speed / highest * (len(_BARS) - 1))] if highest else _BARS[0] for speed in speeds)
    generated, prompts = significant(values["generated_tokens_per_s"]), significant(values["prompt_tokens_per_s"])
    text = f"{generated} generated · {prompts} of prompts"
    return _side_by_side(f"{curve:>{_BAR_WIDTH}}", text) if bars else text


def _times_in_lines(values: dict[str, Any]) -> list[Text]:
    return [
        Text(f"{label} ", style="dim").append(_joined([f"{p} {seconds(value)}" for p, value in values[name].items()]))
        for label, name in _DURATIONS.items()
        if values[name]
    ]


def _times(values: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    table.add_column("")
    for percent in ("p50", "p95", "p99"):
        table.add_column(percent, justify="right", min_width=8)
    for label, name in _DURATIONS.items():
        spread = values[name] or {}
        cells = [seconds(spread[p]) if p in spread else "–" for p in ("p50", "p95", "p99")]
        table.add_row(Text(label, style="dim"), *cells)
    return table


def _engine(stats: EngineStats) -> Text:
    text = Text(f"{counted(stats.prefix_hits, 'prefix hit')} · {counted(stats.preemptions, 'preemption')} · ")
    return text.append(counted(stats.restarts, "restart"), style="yellow" if stats.restarts else "")


def _machine(status: Status) -> str:
    machine, parts = status.machine, []
    if machine.cpu_percent is not None:
        parts.append(f"CPU {machine.cpu_percent:.0f}%")
    if machine.system_cpu_percent is not None:
        parts.append(f"{machine.system_cpu_percent:.0f}% of all cores")
    if machine.memory_bytes is not None:
        parts.append(f"memory {_bytes(machine.memory_bytes)}")
    if machine.system_available_bytes is not None:
        parts.append(f"{_bytes(machine.system_available_bytes)} free")
    if machine.cpu_power_w is not None:
        parts.append(f"{machine.cpu_power_w:.0f} W")
    return _joined(parts)


def _gpu(gpu: Any) -> list[str]:
    parts = [gpu.name]
    if gpu.use_percent is not None:
        parts.append(f"{gpu.use_percent:.0f}%")
    if gpu.memory_used is not None and gpu.memory_total is not None:
        parts.append(f"{_bytes(gpu.memory_used)} of {_bytes(gpu.memory_total)}")
    if gpu.power_w is not None:
        parts.append(f"{gpu.power_w:.0f} W")
    return parts


def _bytes(value: int) -> str:
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
