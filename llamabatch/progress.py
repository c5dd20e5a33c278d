"""A progress bar on stderr that stays silent where stderr is no terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class ProgressBar:
    """Requests done, tokens a second, time left.

    Args:
        total: how many requests.
        shown: False makes it a no-op.
    """

    def __init__(self, total: int, *, shown: bool) -> None:
        self._start = time.perf_counter()
        self._tokens = 0
        self._progress: Progress | None = None
        if shown and sys.stderr.isatty():
            self._progress = _bar()
            self._task = self._progress.add_task("requests", total=total, speed=0.0)

    def advance(self, tokens: int) -> None:
        """One request is done, with that many tokens."""
        if self._progress is None:
            return
        self._tokens += tokens
        speed = self._tokens / max(1e-9, time.perf_counter() - self._start)
        self._progress.update(self._task, advance=1, speed=speed)

    def __enter__(self) -> ProgressBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()


def _bar() -> Progress:
    # imported here: most calls show no bar, and rich takes a tenth of the time that importing llamabatch does
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    speed = TextColumn("{task.fields[speed]:.0f} tokens/s")
    return Progress(MofNCompleteColumn(), BarColumn(), speed, TimeRemainingColumn(), console=Console(stderr=True))
