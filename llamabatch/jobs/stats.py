"""The figures of a job while it runs: its counts, and its speed over time."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from llamabatch.request.outputs import FinishReason, RequestOutput
from llamabatch.utils.histogram import Quantiles

_MOST_ERRORS = 5  # maximum number of error messages in the summary
_MOST_POINTS = 1024
_RECENT_S = 30.0
_SHORT_S = 2.0


@dataclass
class Counts:
    """Counts of one run. Rows of earlier runs are only in `done_before` and `failed_before`.

    Attributes:
        ok, failed: rows written with a result, and rows written with an error.
        done_before: rows that were in the output before this run.
        failed_before: error rows among the rows of done_before.
        prompt_tokens, generated_tokens: sums over the rows written with a result.
        reasons: the number of continuations with each finish reason.
        tasks: for each task, the number of rows that came back from the engine.
        errors: the first few error messages.
        queued_s: seconds in the engine's queue.
        ttft_s: seconds from the end of the queue to the first token.
        inter_token_s: seconds between tokens.
        total_s: seconds from the end of the queue to the last token.
        prompt_lengths, output_lengths: lengths in tokens.
    """

    ok: int = 0
    failed: int = 0
    done_before: int = 0
    failed_before: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    tasks: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    queued_s: Quantiles = field(default_factory=Quantiles)
    ttft_s: Quantiles = field(default_factory=Quantiles)
    inter_token_s: Quantiles = field(default_factory=Quantiles)
    total_s: Quantiles = field(default_factory=Quantiles)
    prompt_lengths: Quantiles = field(default_factory=Quantiles)
    output_lengths: Quantiles = field(default_factory=Quantiles)

    @property
    def rows(self) -> int:
        """The number of rows in the output now."""
        return self.done_before + self.ok + self.failed

    def include(self, other: Counts) -> None:
        """Adds the counts of another run."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, int):
                setattr(self, each.name, mine + theirs)
            elif isinstance(mine, list):
                mine.extend(theirs[: _MOST_ERRORS - len(mine)])
            elif isinstance(mine, Counter):
                mine.update(theirs)
            else:
                mine.include(theirs)

    def add_error(self, error: str) -> None:
        """Counts a row that ended with an error."""
        self.failed += 1
        if len(self.errors) < _MOST_ERRORS:
            self.errors.append(error)

    def add(self, task: str, place: str, output: RequestOutput) -> None:
        """Counts a row that came back from the engine."""
        self.tasks[task] += 1
        if output.finish_reason is FinishReason.ERROR or output.error is not None:
            self.add_error(f"{place}: {output.error}")
            return
        self.ok += 1
        n_prompt = len(output.prompt_token_ids)
        self.prompt_tokens += n_prompt
        self.prompt_lengths.add(n_prompt)
        if output.embedding is not None:
            return
        for each in output.outputs:
            self.reasons[each.finish_reason.value] += 1
            self.generated_tokens += len(each.token_ids)
            self.output_lengths.add(len(each.token_ids))
        times = output.timings
        queued = times.queued_s or 0.0
        self.queued_s.add(queued)
        if times.ttft_s is not None:
            self.ttft_s.add(times.ttft_s - queued)
        self.inter_token_s.add_all(times.inter_token_s)
        self.total_s.add(times.total_s - queued)


@dataclass(frozen=True)
class Point:
    """A point of a timeline.

    Attributes:
        at_s: seconds since the start.
        rows, tokens: counts since the start.
        running: rows that were being computed.
    """

    at_s: float
    rows: int
    tokens: int
    running: int


class Timeline:
    """Speed and slot use over time, as points at equal intervals. The interval doubles when there are too many points.

    Args:
        slots: the number of rows that can be computed at once.
        every_s: the initial interval between points, in seconds.
        clock: returns the seconds of a monotonic clock.
    """

    def __init__(self, slots: int, every_s: float = 0.5, clock: Callable[[], float] = time.perf_counter) -> None:
        self.points: list[Point] = []
        self._slots = slots
        self._every_s = every_s
        self._clock = clock
        self._start = clock()
        self._running_s = 0.0  # seconds in use, summed over all slots
        self._last = Point(0.0, 0, 0, 0)
        self._recent: deque[Point] = deque([self._last])

    def add(self, rows: int, tokens: int, running: int) -> None:
        """Stores the current figures. They become a point if the interval since the last point is over."""
        point = Point(self._clock() - self._start, rows, tokens, running)
        self._running_s += (point.at_s - self._last.at_s) * running
        self._last = point
        if not self.points or point.at_s - self.points[-1].at_s >= self._every_s:
            self.points.append(point)
        if len(self.points) > _MOST_POINTS:
            self.points = self.points[::2]
            self._every_s *= 2
        self._recent.append(point)
        while len(self._recent) > 2 and point.at_s - self._recent[1].at_s > _RECENT_S:
            self._recent.popleft()

    @property
    def slot_use(self) -> float | None:
        """The mean share of the slots in use; None: the timeline covers less than 2 s."""
        return self._running_s / (self._last.at_s * self._slots) if self._last.at_s >= _SHORT_S else None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second in the last 30 s."""
        first, last = self._recent[0], self._recent[-1]
        return (last.tokens - first.tokens) / max(1e-9, last.at_s - first.at_s)

    def seconds_for(self, rows: int) -> float | None:
        """Returns the seconds that `rows` more rows will take at the speed so far; None: not known yet."""
        last = self._last
        return rows * last.at_s / last.rows if last.rows else None
