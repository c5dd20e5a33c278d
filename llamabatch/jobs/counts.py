"""What a job counts while it runs, and the summary at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llamabatch.jobs.quantiles import Quantiles
from llamabatch.request import FinishReason, RequestOutput

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
