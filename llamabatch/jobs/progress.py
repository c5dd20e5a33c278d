"""The progress of a job: its status, and the display on stderr (a bar on a terminal, otherwise a line every 30 s)."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from llamabatch.engine.stats import EngineStats
from llamabatch.jobs.input.reader import Reader
from llamabatch.jobs.input.total import Total
from llamabatch.jobs.stats import Counts, Timeline
from llamabatch.monitor.snapshot import Snapshot
from llamabatch.utils.checks import counted
from llamabatch.utils.format import duration, significant
from llamabatch.utils.progress import HasBar, on_terminal

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_POINT_S = 0.1  # seconds between two points of the timeline
_BAR_S = 0.2
_BAR_WIDTH, _AROUND_BAR = 24, 2  # maximum width of the bar and space around the bar, in terminal columns
_FIRST_LINE_S, _LINES_S = 5.0, 30.0


@dataclass(frozen=True)
class JobSnapshot:
    """The state of a job at one moment.

    Attributes:
        rows: rows in the output, including the rows of earlier runs.
        total: rows of the whole job; None: not known.
        failed: error rows of this run.
        tokens_per_s: generated and embedded tokens per second, over the last 30 s.
        running: rows that are being computed.
        slots: maximum number of rows that can be computed at once.
        left_s: seconds to the end; None: not known yet.
        estimated: true if `total` is an estimate from the rows read so far.
        failed_before: error rows of earlier runs.
    """

    rows: int
    total: int | None
    failed: int
    tokens_per_s: float
    running: int
    slots: int
    left_s: float | None
    estimated: bool = False
    failed_before: int = 0

    @property
    def errors(self) -> str:
        return counted(self.failed, "error")

    def rows_text(self, of: str) -> str:
        """Returns the finished rows and the total, such as "7/10 rows". The text `of` separates the two numbers."""
        if self.total is None:
            return counted(self.rows, "row")
        about = "~" if self.estimated else ""
        return f"{self.rows:,}{of}{about}{counted(self.total, 'row')}"

    def __str__(self) -> str:
        share = f" ({self.rows / self.total:.0%})" if self.total else ""
        left = "" if self.left_s is None else f", {duration(self.left_s)} left"
        return (
            f"{self.rows_text(' of ')}{share}, {significant(self.tokens_per_s)} tokens/s, {self.errors}, "
            f"{self.running} of {counted(self.slots, 'slot')}{left}"
        )


class JobStatus:
    """The status of a job, from the job's counts and the engine's stats.

    Attributes:
        timeline: speed and slots since `begin`.
        stats: the latest stats of the engine.
    """

    def __init__(self, counts: Counts) -> None:
        self.timeline = Timeline(1)
        self.stats = EngineStats()
        self._counts = counts
        self._reader: Reader | None = None
        self._slots = 1
        self._total: Total | None = None
        self._next = 0.0

    def begin(self, slots: int, total: Total, reader: Reader) -> None:
        """Starts the timeline. Called when the engine is ready."""
        self.timeline = Timeline(slots)
        self._slots, self._total, self._reader = slots, total, reader

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Stores the engine's stats. The thread of a monitor calls this method."""
        self.stats = snapshot.stats

    def add_point(self, *, at_once: bool = False) -> None:
        """Adds a point to the timeline if a point is due or `at_once` is set."""
        now = time.perf_counter()
        if at_once or now >= self._next:
            self._next = now + _POINT_S
            stats = self.stats
            self.timeline.add(self._counts.ok + self._counts.failed, _tokens(stats), stats.running)

    def document(self) -> Mapping[str, Any]:
        """Returns the state as plain values for `llamabatch top`."""
        now = self.snapshot()
        return {
            "rows": now.rows,
            "total": now.total,
            "estimated": now.estimated,
            "left_s": now.left_s,
            "errors": now.failed,
        }

    def snapshot(self) -> JobSnapshot:
        """Returns the state at this moment."""
        counts = self._counts
        known = None if self._total is None or self._reader is None else self._total.rows(self._reader.seen)
        total = None if known is None else max(known.n, counts.rows)
        left_s = None if total is None else self.timeline.seconds_for(total - counts.rows)
        return JobSnapshot(
            *(counts.rows, total, counts.failed, self.timeline.tokens_per_s, self.stats.running, self._slots, left_s),
            estimated=known is not None and known.estimated,
            failed_before=counts.failed_before,
        )


def _tokens(stats: EngineStats) -> int:
    return stats.generated_tokens + stats.embed_tokens


class Progress(Protocol):
    """The display of a job. The thread that runs the job calls its methods many times a second."""

    def say(self, text: str) -> None:
        """Shows a message."""

    def show(self, snapshot: Callable[[], JobSnapshot]) -> None:
        """Shows the state that `snapshot` returns, if it is time for an update."""


class Silent:
    """A Progress that shows nothing."""

    def say(self, text: str) -> None: ...

    def show(self, snapshot: Callable[[], JobSnapshot]) -> None: ...


class StderrProgress(HasBar):
    """The Progress of the command line; a context manager.

    Args:
        clock: returns the seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = clock() + _FIRST_LINE_S
        if on_terminal():
            self._next = clock()
            self._bar = _bar()
            self._task = self._bar.add_task("loading the model", total=None, details="")

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed terminal must not end the job
            if self._bar is None:
                print(text, file=sys.stderr, flush=True)
            else:
                from llamabatch.utils.console import sentence  # rich takes long to import

                sentence(self._bar.console, text)

    def show(self, snapshot: Callable[[], JobSnapshot]) -> None:
        now = self._clock()
        if now < self._next:
            return
        if self._bar is None:
            self._next = now + _LINES_S
            self.say(str(snapshot()))
        else:
            self._next = now + _BAR_S
            self._show(snapshot())

    def _show(self, snapshot: JobSnapshot) -> None:
        assert self._bar is not None
        description = snapshot.rows_text("/")
        details, bar_width = _fitting(snapshot, self._bar.console.width - len(description))
        self._bar.columns[1].bar_width = bar_width  # type: ignore[union-attr]  # the BarColumn of _bar
        self._bar.update(
            self._task,
            description=description,
            completed=snapshot.rows,
            total=snapshot.total,
            details=details,
        )


def _fitting(snapshot: JobSnapshot, room: int) -> tuple[str, int]:
    """Returns the details and the width of the bar for `room` columns. The bar shrinks before details are left out."""
    left = [] if snapshot.left_s is None else [f"{duration(snapshot.left_s)} left"]
    slots = f"{snapshot.running}/{counted(snapshot.slots, 'slot')}"
    parts = [slots, f"{significant(snapshot.tokens_per_s)} tokens/s", snapshot.errors, *left]
    while len(parts) > 1 and len(" · ".join(parts)) + _AROUND_BAR + 1 > room:
        parts.pop(0)
    details = " · ".join(parts)
    return details, max(1, min(_BAR_WIDTH, room - len(details) - _AROUND_BAR))


def _bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=_BAR_WIDTH), TextColumn("{task.fields[details]}"))
    return Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=5)
