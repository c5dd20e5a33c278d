"""Progress bars on stderr, shown only on a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress
    from typing_extensions import Self


class HasBar:
    """Base of progress displays: a context manager that shows its bar if it has one."""

    _bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


class ProgressBar(HasBar):
    """A bar of requests done, tokens a second and time left; silent if stderr is no terminal.

    Args:
        total: number of requests.
        shown: False turns it off.
    """

    def __init__(self, total: int, *, shown: bool) -> None:
        self._start = time.perf_counter()
        self._tokens = 0
        if shown and sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task("requests", total=total, speed=0.0)

    def advance(self, tokens: int) -> None:
        """Counts one request as done, with that many tokens."""
        if self._bar is None:
            return
        self._tokens += tokens
        speed = self._tokens / max(1e-9, time.perf_counter() - self._start)
        self._bar.update(self._task, advance=1, speed=speed)


def _bar() -> Progress:
    # imported here: most calls show no bar, and rich takes a tenth of the time that importing llamabatch does
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    speed = TextColumn("{task.fields[speed]:.0f} tokens/s")
    return Progress(MofNCompleteColumn(), BarColumn(), speed, TimeRemainingColumn(), console=Console(stderr=True))
