"""How far a comparison is, on stderr: a bar on a terminal, else a line for each run that is over."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from llamabatch.checks import counted
from llamabatch.compare.figures import seconds
from llamabatch.progress import HasBar
from llamabatch.stdout import sentence


class StderrProgress(HasBar):
    """The Progress of the command line; a context manager."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._label, self._total = "", 0
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )

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
