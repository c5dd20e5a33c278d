"""How far a job is, on stderr: a bar on a terminal, else a line every 30 s."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from llamabatch.engine.stats import EngineStats
from llamabatch.jobs.input.reader import Reader
from llamabatch.jobs.input.sources import Total
from llamabatch.jobs.stats import Counts, Timeline
from llamabatch.monitor.snapshot import Snapshot
from llamabatch.utils.checks import counted
from llamabatch.utils.format import duration, significant
from llamabatch.utils.progress import HasBar

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_BAR_S = 0.2
_BAR_WIDTH, _AROUND_BAR = 24, 2  # columns
_FIRST_LINE_S, _LINES_S = 5.0, 30.0


@dataclass(frozen=True)
class Standing:
    """How a job stands.

    Attributes:
        rows: in the output, those of earlier runs included; total: None where it is not known.
        failed: of the rows of this run.
        tokens_per_s: generated, in the last half minute.
        running: rows that are being computed; slots: how many there can be.
        left_s: None where nothing is known yet.
        estimated: `total` is told by what has been read so far.
    """

    rows: int
    total: int | None
    failed: int
    tokens_per_s: float
    running: int
    slots: int
    left_s: float | None
    estimated: bool = False

    @property
    def errors(self) -> str:
        return counted(self.failed, "error")

    def told(self, of: str) -> str:
        """Rows done, and of how many, with `of` between."""
        if self.total is None:
            return counted(self.rows, "row")
        about = "~" if self.estimated else ""
        return f"{self.rows:,}{of}{about}{counted(self.total, 'row')}"

    def __str__(self) -> str:
        share = f" ({self.rows / self.total:.0%})" if self.total else ""
        left = "" if self.left_s is None else f", {duration(self.left_s)} left"
        return (
            f"{self.told(' of ')}{share}, {significant(self.tokens_per_s)} tokens/s, {self.errors}, "
            f"{self.running} of {counted(self.slots, 'slot')}{left}"
        )


class Progress(Protocol):
    """Who is told how a job stands. Called by the thread that runs the job, many times a second."""

    def say(self, text: str) -> None:
        """Something that happened."""

    def show(self, standing: Callable[[], Standing]) -> None:
        """The job goes on; `standing` tells how it stands, for those who want to know now."""


class Silent:
    """Nobody."""

    def say(self, text: str) -> None: ...

    def show(self, standing: Callable[[], Standing]) -> None: ...


class StderrProgress(HasBar):
    """The Progress of the command line; a context manager.

    Args:
        clock: seconds, of a clock that no one sets.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = clock() + _FIRST_LINE_S
        if sys.stderr.isatty():
            self._next = clock()
            self._bar = _bar()
            self._task = self._bar.add_task("loading the model", total=None, told="")

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone, which is no reason to lose a night's work
            if self._bar is None:
                print(text, file=sys.stderr, flush=True)
            else:
                from llamabatch.utils.console import (
                    sentence,  # rich takes long to import, and is not there without a bar
                )

                sentence(self._bar.console, text)

    def show(self, standing: Callable[[], Standing]) -> None:
        now = self._clock()
        if now < self._next:
            return
        if self._bar is None:
            self._next = now + _LINES_S
            self.say(str(standing()))
        else:
            self._next = now + _BAR_S
            self._show(standing())

    def _show(self, standing: Standing) -> None:
        assert self._bar is not None
        description = standing.told("/")
        told, bar_width = _fitting(standing, self._bar.console.width - len(description))
        self._bar.columns[1].bar_width = bar_width  # type: ignore[union-attr]  # the BarColumn of _bar
        self._bar.update(
            self._task,
            description=description,
            completed=standing.rows,
            total=standing.total,
            told=told,
        )


def _fitting(standing: Standing, room: int) -> tuple[str, int]:
    """What stands behind the number of rows, and the width of the bar between: the bar gives way first."""
    left = [] if standing.left_s is None else [f"{duration(standing.left_s)} left"]
    slots = f"{standing.running}/{counted(standing.slots, 'slot')}"
    parts = [slots, f"{significant(standing.tokens_per_s)} tokens/s", standing.errors, *left]
    while len(parts) > 1 and len(" · ".join(parts)) + _AROUND_BAR + 1 > room:
        parts.pop(0)
    told = " · ".join(parts)
    return told, max(1, min(_BAR_WIDTH, room - len(told) - _AROUND_BAR))


def _bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=_BAR_WIDTH), TextColumn("{task.fields[told]}"))
    return Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=5)


# ----------------------------------------------------------------------------------------------------
# How a job stands: from what it counts itself and what the engine says.


_EVERY_S = 0.1


class JobStatus:
    """For one job.

    Attributes:
        timeline: how it stood, from its beginning on.
        stats: what the engine has last said of itself.
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
        """The engine is ready."""
        self.timeline = Timeline(slots)
        self._slots, self._total, self._reader = slots, total, reader

    def take(self, snapshot: Snapshot) -> None:
        """What a monitor has seen; on its thread."""
        self.stats = snapshot.stats

    def note(self, *, at_once: bool = False) -> None:
        """A point of the timeline, if it is time for one."""
        now = time.perf_counter()
        if at_once or now >= self._next:
            self._next = now + _EVERY_S
            stats = self.stats
            self.timeline.add(self._counts.ok + self._counts.failed, _tokens(stats), stats.running)

    def job(self) -> Mapping[str, Any]:
        """For `llamabatch top`."""
        now = self.now()
        return {
            "rows": now.rows,
            "total": now.total,
            "estimated": now.estimated,
            "left_s": now.left_s,
            "errors": now.failed,
        }

    def now(self) -> Standing:
        """For those who want to know."""
        counts = self._counts
        known = None if self._total is None or self._reader is None else self._total.rows(self._reader.seen)
        total = None if known is None else max(known.n, counts.rows)
        left_s = None if total is None else self.timeline.seconds_for(total - counts.rows)
        return Standing(
            *(counts.rows, total, counts.failed, self.timeline.tokens_per_s, self.stats.running, self._slots, left_s),
            estimated=known is not None and known.estimated,
        )


def _tokens(stats: EngineStats) -> int:
    return stats.generated_tokens + stats.embed_tokens
