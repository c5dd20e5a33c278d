"""How far tuning is, on stderr: a bar on a terminal, and a line for each part that is over."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from llamabatch.progress import HasBar
from llamabatch.stdout import sentence


class StderrProgress(HasBar):
    """The Progress of the command line; a context manager."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._title, self._share, self._done, self._before = "", 0.0, 0.0, 0.0
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
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
