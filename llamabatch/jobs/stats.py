"""What a job counts while it runs, and the summary at its end."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llamabatch.request.outputs import FinishReason, RequestOutput
from llamabatch.utils.histogram import Quantiles

_MOST_ERRORS = 5  # messages that the summary shows


@dataclass
class Counts:
    """Counts of one run; rows that an earlier run has done are in `done_before` alone.

    Attributes:
        ok, failed: rows written with a result, with an error.
        done_before, failed_before: rows that stood in the output already; those of them that are errors.
        prompt_tokens, generated_tokens: of rows written with a result.
        reasons: finish reasons of continuations.
        tasks: rows of each task.
        errors: the first few messages.
        queued_s, ttft_s, inter_token_s, total_s: in seconds: in the engine's queue; from there to the first token;
            between tokens; from the queue's end to the last token.
        prompt_lengths, output_lengths: in tokens.
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
        """Rows that stand in the output now."""
        return self.done_before + self.ok + self.failed

    def fail(self, error: str) -> None:
        """A row ended with an error."""
        self.failed += 1
        if len(self.errors) < _MOST_ERRORS:
            self.errors.append(error)

    def take(self, task: str, place: str, output: RequestOutput) -> None:
        """A row came back from the engine."""
        self.tasks[task] += 1
        if output.finish_reason is FinishReason.ERROR or output.error is not None:
            self.fail(f"{place}: {output.error}")
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
class Cost:
    """What a run cost at a price of the machine, in whatever unit the price has."""

    price_per_hour: float
    run_s: float
    generated_tokens: int
    prompt_tokens: int

    @property
    def total(self) -> float:
        return self.price_per_hour * self.run_s / 3600

    @property
    def per_million_generated(self) -> float | None:
        """All of it on the generated tokens; None where there are none."""
        return self.total * 1e6 / self.generated_tokens if self.generated_tokens else None

    @property
    def per_million(self) -> float | None:
        """On prompt and generated tokens alike."""
        tokens = self.generated_tokens + self.prompt_tokens
        return self.total * 1e6 / tokens if tokens else None

    def document(self) -> dict[str, float | None]:
        return {
            "price_per_hour": self.price_per_hour,
            "total": self.total,
            "per_million_generated_tokens": self.per_million_generated,
            "per_million_tokens": self.per_million,
        }


def spread(figures: Quantiles) -> Mapping[str, float | None] | None:
    """p50, p95, p99 and the mean, for JSON; None of nothing."""
    if not figures.n:
        return None
    told: dict[str, Any] = {f"p{p}": figures.at(p) for p in (50, 95, 99)}
    return {**told, "mean": figures.mean}


# ----------------------------------------------------------------------------------------------------
# Speed and slot use over the time of a job, in bounded memory.


_MOST_POINTS = 1024
_RECENT_S = 30.0
_SHORT_S = 2.0


@dataclass(frozen=True)
class Point:
    """How a job stood: seconds since its start; counts since then; rows that were being computed."""

    at_s: float
    rows: int
    tokens: int
    running: int


class Timeline:
    """Points at equal distances; when there are too many, every second one goes and the distance doubles.

    Args:
        slots: rows that can be computed at once.
        every_s: seconds between points, at first.
        clock: seconds, of a clock that no one sets.
    """

    def __init__(self, slots: int, every_s: float = 0.5, clock: Callable[[], float] = time.perf_counter) -> None:
        self.points: list[Point] = []
        self._slots = slots
        self._every_s = every_s
        self._clock = clock
        self._start = clock()
        self._running_s = 0.0  # slot-seconds
        self._last = Point(0.0, 0, 0, 0)
        self._recent: deque[Point] = deque([self._last])

    def add(self, rows: int, tokens: int, running: int) -> None:
        """How it stands now."""
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
        """Mean share of the slots that were in use; None of a job so short that the engine was hardly asked."""
        return self._running_s / (self._last.at_s * self._slots) if self._last.at_s >= _SHORT_S else None

    @property
    def tokens_per_s(self) -> float:
        """Of the last 30 s."""
        first, last = self._recent[0], self._recent[-1]
        return (last.tokens - first.tokens) / max(1e-9, last.at_s - first.at_s)

    def seconds_for(self, rows: int) -> float | None:
        """How long that many more rows will take, at the speed so far; None where nothing is known yet."""
        last = self._last
        return rows * last.at_s / last.rows if last.rows else None
