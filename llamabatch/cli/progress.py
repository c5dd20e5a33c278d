"""Shows the progress of `compare` and `tune` on stderr: a bar on a terminal only, and a line for each finished part."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from llamabatch.utils.checks import counted
from llamabatch.utils.console import sentence
from llamabatch.utils.format import seconds
from llamabatch.utils.progress import HasBar


class CompareProgress(HasBar):
    """The progress of a comparison: a bar for the current run, and a line for each finished run."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._label, self._total = "", 0
        if self._console.is_terminal:
            self._bar = _bar(self._console, MofNCompleteColumn())

    def start(self, label: str, total: int) -> None:
        self._label, self._total = label, total
        if self._bar is not None:
            self._task = self._bar.add_task(escape(label), total=total)

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)

    def end(self, wall_s: float | None, error: str | None) -> None:
        if self._bar is not None:
            self._bar.remove_task(self._task)
        if wall_s is not None:
            sentence(self._console, f"{self._label}: {counted(self._total, 'request')} in {seconds(wall_s)}")
        else:
            sentence(self._console, f"{self._label}: failed: {error}")


class TuneProgress(HasBar):
    """The progress of tuning: one bar for the whole, and a line for each finished part."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._title, self._share, self._done, self._before = "", 0.0, 0.0, 0.0
        if self._console.is_terminal:
            self._bar = _bar(self._console, TaskProgressColumn())
            self._task = self._bar.add_task("loading", total=1.0)

    def start(self, title: str, share: float) -> None:
        self._title, self._share, self._done = title, share, 0.0
        self._show()

    def advance(self, share: float) -> None:
        self._done = min(1.0, self._done + share)
        self._show()

    def end(self, outcome: str) -> None:
        self._before += self._share
        self._share = 0.0
        sentence(self._console, f"{self._title}: {outcome}")

    def _show(self) -> None:
        if self._bar is not None:
            completed = self._before + self._share * self._done
            self._bar.update(self._task, description=escape(self._title), completed=completed)


def _bar(console: Console, done: ProgressColumn) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), done, TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)
