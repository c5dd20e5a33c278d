"""The summary of a job at its end: for people, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamabatch.jobs.stats import Counts, Timeline
from llamabatch.utils.checks import counted
from llamabatch.utils.format import attributes, duration, seconds, significant
from llamabatch.utils.histogram import Quantiles

_SPREADS = ("queued_s", "ttft_s", "inter_token_s", "total_s", "prompt_lengths", "output_lengths")


@dataclass(frozen=True)
class Summary:
    """The summary of a run.

    Attributes:
        output: the name of the output.
        counts: the counts of rows and tokens.
        timeline: speed and slots over time.
        load_s: seconds until the engine was ready.
        run_s: seconds from that time until the last row was written.
        model, strategy: the names of the model and the strategy.
        slots: number of rows that could be computed at once, in `instances` engines together; 0: no engine was started.
        restarts: how many times an engine died and was replaced.
        energy_j: joules of the run by the machine's own meter; None: the machine has no meter.
        price_per_hour: the price of the machine; None: the summary has no cost.
        signum: the number of the signal that ended the run; None: no signal ended it.
    """

    output: str
    counts: Counts
    timeline: Timeline
    load_s: float
    run_s: float
    model: str
    strategy: str
    slots: int
    instances: int
    restarts: int = 0
    energy_j: float | None = None
    price_per_hour: float | None = None
    signum: int | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of the command. 0: every row of the output is ok; 1: rows failed, in this run or an earlier
        one; 128 + signum: a signal ended the run."""
        if self.signum is not None:
            return 128 + self.signum
        return 1 if self.counts.failed or self.counts.failed_before else 0

    @property
    def cost(self) -> Cost | None:
        if self.price_per_hour is None:
            return None
        return Cost(self.price_per_hour, self.run_s, self.counts.generated_tokens, self.counts.prompt_tokens)

    @property
    def tokens_per_joule(self) -> float | None:
        """The number of generated tokens per joule; for a job of embeddings, the number of prompt tokens per joule."""
        tokens = self.counts.generated_tokens or self.counts.prompt_tokens
        return tokens / self.energy_j if self.energy_j else None

    def per_second(self, count: int) -> float:
        return count / self.run_s if self.run_s > 0 else 0.0

    def document(self) -> dict[str, Any]:
        """Returns the summary as plain values for JSON, with times in seconds."""
        counts = self.counts
        return {
            **attributes(self, "output", "model", "strategy", "slots", "instances", "exit_code"),
            "rows": attributes(counts, "ok", "failed", "done_before", "failed_before")
            | {"by_task": dict(counts.tasks)},
            "seconds": {"load": self.load_s, "run": self.run_s},
            "tokens": {"prompt": counts.prompt_tokens, "generated": counts.generated_tokens},
            "per_second": {
                "rows": self.per_second(counts.ok + counts.failed),
                "prompt_tokens": self.per_second(counts.prompt_tokens),
                "generated_tokens": self.per_second(counts.generated_tokens),
            },
            "slot_use": self.timeline.slot_use,
            "finish_reasons": dict(counts.reasons),
            **{name: spread(getattr(counts, name)) for name in _SPREADS},
            **attributes(self, "restarts", "energy_j"),
            "generated_tokens_per_joule": self.tokens_per_joule,
            "cost": None if self.cost is None else self.cost.document(),
            "errors": list(counts.errors),
        }

    def describe(self) -> str:
        """Returns the summary as a few lines of text."""
        return "\n".join(f"{name + ':':<12} {text}" for name, text in self._lines())

    def _lines(self) -> list[tuple[str, str]]:
        counts = self.counts
        lines = [("rows", self._rows())]
        if counts.ok:
            lines += [("speed", self._speed()), ("tokens", self._tokens())]
        for name, figures in (
            ("first token", counts.ttft_s),
            ("inter-token", counts.inter_token_s),
            ("whole row", counts.total_s),
        ):
            if figures.n:
                lines.append((name, _percentiles(figures)))
        if self.slots:
            lines.append(("engine", self._engine()))
        if self.energy_j is not None and self.tokens_per_joule is not None:
            lines.append(("energy", f"{significant(self.energy_j)} J, {significant(self.tokens_per_joule)} tokens/J"))
        if self.cost is not None:
            lines.append(("cost", _cost(self.cost)))
        lines += [("error", message) for message in counts.errors]
        more = counts.failed - len(counts.errors)
        return [*lines, ("error", f"and {more:,} more")] if more > 0 else lines

    def _rows(self) -> str:
        counts = self.counts
        parts = [f"{counts.ok:,} ok", f"{counts.failed:,} failed"]
        if counts.done_before:
            errors = f" ({counted(counts.failed_before, 'error')} among them)" if counts.failed_before else ""
            parts.append(f"{counts.done_before:,} done before{errors}")
        return ", ".join(parts) + f"; {duration(self.run_s)}, and {duration(self.load_s)} to load"

    def _speed(self) -> str:
        counts = self.counts
        done = "of finished rows: " if self.signum is not None else ""
        return (
            f"{done}{significant(self.per_second(counts.generated_tokens))} generated tokens/s, "
            f"{significant(self.per_second(counts.prompt_tokens))} prompt tokens/s, "
            f"{significant(self.per_second(counts.ok + counts.failed))} rows/s"
        )

    def _tokens(self) -> str:
        counts = self.counts
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.reasons.most_common())
        ended = f"; ended by {reasons}" if reasons else ""
        return f"{counts.generated_tokens:,} generated, {counts.prompt_tokens:,} of prompts{ended}"

    def _engine(self) -> str:
        engines = f", {self.instances} engines" if self.instances > 1 else ""
        use = self.timeline.slot_use
        used = f", {use:.0%} of them in use" if use is not None else ""
        restarts = f", {counted(self.restarts, 'restart')}" if self.restarts else ""
        return f"{self.strategy}, {counted(self.slots, 'slot')}{used}{engines}{restarts}"


def _percentiles(figures: Quantiles) -> str:
    return ", ".join(f"p{p} {seconds(figures.at(p) or 0.0)}" for p in (50, 95, 99))


def _cost(cost: Cost) -> str:
    total = f"{significant(cost.total)} at {cost.price_per_hour:g} an hour"
    if cost.per_million_generated is None or cost.per_million is None:
        return total
    return (
        f"{total}: {significant(cost.per_million_generated)} a million generated tokens, "
        f"{significant(cost.per_million)} a million of prompt and output together"
    )


@dataclass(frozen=True)
class Cost:
    """The cost of a run, in the unit of the machine's price."""

    price_per_hour: float
    run_s: float
    generated_tokens: int
    prompt_tokens: int

    @property
    def total(self) -> float:
        return self.price_per_hour * self.run_s / 3600

    @property
    def per_million_generated(self) -> float | None:
        """The cost of a million generated tokens; None: no token was generated."""
        return self.total * 1e6 / self.generated_tokens if self.generated_tokens else None

    @property
    def per_million(self) -> float | None:
        """The cost of a million tokens, prompt and generated together; None: there are no tokens."""
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
    """Returns p50, p95, p99 and the mean for JSON; None: `figures` is empty."""
    if not figures.n:
        return None
    percentiles: dict[str, Any] = {f"p{p}": figures.at(p) for p in (50, 95, 99)}
    return {**percentiles, "mean": figures.mean}
