"""Progress of a call: a bar on stderr if it is a terminal, a bar in a notebook, or calls of a function."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from llamabatch.errors import InputError
from llamabatch.utils.checks import show

if TYPE_CHECKING:
    from rich.progress import Progress
    from typing_extensions import Self

ShowProgress = bool | Callable[[int, int], object] | None

_UPDATE_S = 0.1  # seconds between two updates of a notebook's bar; each is a message to the browser


def on_terminal() -> bool:
    """Returns True if stderr is a terminal. sys.stderr may be None (in pythonw), closed, or an object without
    isatty()."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError, OSError):
        return False


class HasBar:
    """Base of progress displays: a context manager that shows a bar, if a subclass sets one. Ignores errors of a
    terminal that is gone."""

    _bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.stop()


class ProgressBar(HasBar):
    """A bar with the number of finished requests, tokens per second and time left.

    Args:
        total: number of requests.
        progress: True shows a bar in a notebook, and on stderr if it is a terminal. False shows no bar. None shows a
            bar only in a notebook and only for a list. A function is called as progress(done, total): once before
            any request ends, and then after the end of each request.
        is_list: True if the caller gave a list of requests, not a single request.
        done: number of requests finished in an earlier call.

    Raises:
        InputError: `progress` has another value.
    """

    def __init__(self, total: int, progress: ShowProgress = None, *, is_list: bool = True, done: int = 0) -> None:
        if not isinstance(progress, bool) and progress is not None and not callable(progress):
            raise InputError(f"progress is {show(progress)}; give True, False, None or a function of (done, total)")
        self._total, self._done, self._tokens = total, done, 0
        self._start = time.perf_counter()
        self._emit = progress if callable(progress) else None
        self._notebook: _NotebookBar | None = None
        if progress is False or self._emit is not None:
            return
        if in_notebook():
            if progress or is_list:
                self._notebook = _NotebookBar(total, done)
        elif progress and on_terminal():
            self._bar = _bar()
            self._task = self._bar.add_task("requests", total=total, completed=done, speed=0.0)

    def __enter__(self) -> Self:
        if self._emit is not None:
            self._emit(self._done, self._total)
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        super().__exit__(kind, error, tb)
        if self._notebook is not None:
            self._notebook.show()

    def advance(self, tokens: int) -> None:
        """Counts one request as finished, with its number of tokens."""
        self._done += 1
        self._tokens += tokens
        if self._emit is not None:
            self._emit(self._done, self._total)
        speed = self._tokens / max(1e-9, time.perf_counter() - self._start)
        if self._bar is not None:
            self._bar.update(self._task, advance=1, speed=speed)
        if self._notebook is not None:
            self._notebook.update(self._done, speed)


class _NotebookBar:
    """A rich bar as one output of a notebook cell. The output is replaced as requests end.

    rich's own live display and tqdm.auto are not used: they need ipywidgets, and a saved notebook lacks their last
    state.
    """

    def __init__(self, total: int, done: int) -> None:
        self._bar = _bar()
        self._task = self._bar.add_task("requests", total=total, completed=done, speed=0.0)
        self._handle = sys.modules["IPython"].display.display(self._picture, display_id=True)
        self._next = time.monotonic() + _UPDATE_S

    @property
    def _picture(self) -> Any:
        return self._bar.make_tasks_table(self._bar.tasks)

    def update(self, done: int, speed: float) -> None:
        self._bar.update(self._task, completed=done, speed=speed)
        if time.monotonic() >= self._next:
            self.show()

    def show(self) -> None:
        """Shows the current state in place of the previous one."""
        self._next = time.monotonic() + _UPDATE_S
        if self._handle is not None:  # None: IPython runs without a front end
            self._handle.update(self._picture)


def in_notebook() -> bool:
    """Returns True in a kernel of Jupyter or of a similar front end."""
    ipython = sys.modules.get("IPython")  # a kernel of Jupyter has always imported IPython
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _bar() -> Progress:
    # rich is imported late because most calls show no bar, and its import adds a tenth to llamabatch's import time.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    speed = TextColumn("{task.fields[speed]:.0f} tokens/s")
    return Progress(MofNCompleteColumn(), BarColumn(), speed, TimeRemainingColumn(), console=Console(stderr=True))


class DownloadBar(HasBar):
    """A bar with bytes, speed and time left. Shows nothing if stderr is not a terminal.

    Args:
        name: name of the file.
        start: bytes that are already there.
        total: bytes of the file; None if unknown.
    """

    def __init__(self, name: str, start: int, total: int | None) -> None:
        if not on_terminal():
            return
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as SpeedColumn

        shown = name if len(name) <= 28 else f"…{name[-27:]}"  # so that the whole bar fits into 80 columns
        columns = (TextColumn("{task.description}"), BarColumn(12), DownloadColumn(), SpeedColumn())
        self._bar = Progress(*columns, TimeRemainingColumn(compact=True), console=Console(stderr=True))
        self._task = self._bar.add_task(escape(shown), total=total, completed=start)

    def advance(self, n_bytes: int) -> None:
        """Counts downloaded bytes."""
        if self._bar is not None:
            self._bar.update(self._task, advance=n_bytes)
