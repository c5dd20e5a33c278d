"""Estimates the time and cost of a job from a measured sample of its rows, or from a tuned profile of the machine.

Without a measurement there is no estimate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamabatch.client.connect import connect
from llamabatch.client.front_client import slots_of
from llamabatch.config import EngineConfig
from llamabatch.jobs.loop import Feed, Loop, Stop
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.jobs.stats import Counts
from llamabatch.monitor.energy import EnergyMeter
from llamabatch.planning.profile import Profile
from llamabatch.request.outputs import FinishReason, RequestOutput
from llamabatch.utils.checks import counted
from llamabatch.utils.format import duration, significant

_Z = 1.96  # a 95 % confidence interval reaches 1.96 standard errors to each side of the mean
_LEAST_USE = 0.05  # replaces a smaller slot_use, because very few busy slots cannot predict the speed of all slots


@dataclass(frozen=True)
class Sample:
    """The measurements of some rows of a job.

    Attributes:
        n_rows: number of rows that were run.
        n_failed: number of failed rows among them.
        run_s: seconds from the first row to the last.
        load_s: seconds until the engine was ready.
        prompt_tokens, output_tokens: the number of tokens of each successful row.
        slot_use: mean share of the slots that were in use, 0 to 1. A whole job keeps more slots busy than a sample.
        energy_j: joules by the machine's own meter; None: the machine has no meter.
    """

    n_rows: int
    n_failed: int
    run_s: float
    load_s: float
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    slot_use: float
    energy_j: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """The number of tokens per second, in prompts and outputs together."""
        return (sum(self.prompt_tokens) + sum(self.output_tokens)) / self.run_s

    def output_range(self, n_rows: int) -> tuple[float, float]:
        """Returns the 95 % confidence interval (lowest, highest) for the output tokens of `n_rows` rows together."""
        n = len(self.output_tokens)
        mean = sum(self.output_tokens) / n
        if n < 2:
            return 0.0, math.inf
        spread = math.sqrt(sum((each - mean) ** 2 for each in self.output_tokens) / (n - 1))
        error = _Z * spread / math.sqrt(n)
        return n_rows * max(0.0, mean - error), n_rows * (mean + error)

    def document(self) -> dict[str, Any]:
        """Returns the measurements as plain values for JSON."""
        return {
            "rows": self.n_rows,
            "failed": self.n_failed,
            "seconds": {"load": self.load_s, "run": self.run_s},
            "tokens": {"prompt": sum(self.prompt_tokens), "generated": sum(self.output_tokens)},
            "slot_use": self.slot_use,
            "energy_j": self.energy_j,
        }


@dataclass(frozen=True)
class Estimate:
    """The expected time, energy and cost of a job. Ranges are (lowest, highest).

    Attributes:
        source: a phrase that says where the figures come from, or why there are no figures.
        seconds, output_tokens: ranges; None: not known.
        energy_j: a range in joules; None: there is no meter, or no sample.
        price_per_hour: the price of the machine; None: no cost is computed.
    """

    source: str
    seconds: tuple[float, float] | None = None
    output_tokens: tuple[float, float] | None = None
    energy_j: tuple[float, float] | None = None
    price_per_hour: float | None = None

    @property
    def cost(self) -> tuple[float, float] | None:
        """The range of the cost, in the unit of the price."""
        if self.seconds is None or self.price_per_hour is None:
            return None
        low, high = (each * self.price_per_hour / 3600 for each in self.seconds)
        return low, high

    def document(self) -> Mapping[str, Any]:
        """Returns the estimate as plain values for JSON."""
        figures = {"seconds": self.seconds, "output_tokens": self.output_tokens, "energy_j": self.energy_j}
        shown = {name: None if value is None else list(value) for name, value in figures.items()}
        return {"source": self.source, **shown, "cost": None if self.cost is None else list(self.cost)}

    def describe(self) -> list[str]:
        """Returns the estimate as lines of text."""
        if self.seconds is None:
            return [f"time: unknown: {self.source}"]
        lines = [f"time: {_range(self.seconds, duration)}, {self.source}"]
        if self.output_tokens is not None:
            lines.append(f"output: {_range(self.output_tokens, _whole)} tokens expected")
        if self.energy_j is not None:
            lines.append(f"energy: {_range(self.energy_j, significant)} J")
        if self.cost is not None and self.price_per_hour is not None:
            lines.append(f"cost: {_range(self.cost, significant)} at {self.price_per_hour:g} an hour")
        return lines


def _range(values: tuple[float, float], text: Any) -> str:
    low, high = (text(each) for each in values)
    if not values[0]:
        return f"up to {high}"
    return str(low) if low == high else f"{low} to {high}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


class _Measured:
    """A sink that stores the token counts of rows and drops the texts."""

    def __init__(self) -> None:
        self.prompt_tokens: list[int] = []
        self.output_tokens: list[int] = []
        self.computed_s = 0.0

    def done(self, row: Row, output: RequestOutput) -> None:
        if output.error is not None or output.finish_reason is FinishReason.ERROR:
            return
        self.prompt_tokens.append(len(output.prompt_token_ids))
        self.output_tokens.append(sum(len(each.token_ids) for each in output.outputs))
        self.computed_s += max(0.0, output.timings.total_s - (output.timings.queued_s or 0.0))

    def refused(self, row: Row | BadRow, error: str) -> None: ...


def measure(config: EngineConfig, rows: list[Row], seed: int, adapters: Mapping[str, float] | None) -> Sample:
    """Runs rows in a new engine and returns the measurements. No output is written. Raises the errors of `job.run`."""
    start = time.perf_counter()
    client = connect(config)
    try:
        load_s = time.perf_counter() - start
        slots = slots_of(client.plan.config)
        sink, counts = _Measured(), Counts()
        feed = Feed(client, iter(rows), slots, client.plan.config.n_ctx, seed, adapters)
        with EnergyMeter() as meter:
            start = time.perf_counter()
            Loop(client, feed, sink, counts, Stop(), lambda: None).run()
            run_s = time.perf_counter() - start
            energy_j = meter.read()
    finally:
        client.close()
    use = min(1.0, sink.computed_s / (run_s * slots))
    return Sample(
        *(len(rows), counts.failed, run_s, load_s, tuple(sink.prompt_tokens), tuple(sink.output_tokens), use, energy_j)
    )


def from_sample(
    sample: Sample, n_rows: int, prompt_tokens: int, most_output: int | None, price_per_hour: float | None
) -> Estimate:
    """Returns the estimate from a sample of the rows.

    The slow end of the range assumes the speed of the sample. The fast end is faster by the factor 1 / slot_use,
    because the whole job may fill the slots that the sample leaves empty. The speed counts the tokens of prompts and
    outputs. The prompt tokens are known. The output tokens follow from the sample's mean and the 95 % confidence
    interval of this mean. The time to load the model is left out.

    Args:
        n_rows, prompt_tokens, most_output: figures of the whole job, as in DryRun.
    """
    if not sample.output_tokens:
        return Estimate(f"all {counted(sample.n_rows, 'row')} of the sample failed", price_per_hour=price_per_hour)
    low, high = sample.output_range(n_rows)
    if most_output is not None:
        low, high = min(low, most_output), min(high, most_output)
    if math.isinf(high):
        return Estimate("one row is no sample of rows without a limit; give --sample 2 or more")
    slowest = sample.tokens_per_s
    fastest = slowest / max(sample.slot_use, _LEAST_USE)
    seconds = (prompt_tokens + low) / fastest, (prompt_tokens + high) / slowest
    n = counted(sample.n_rows, "row")
    source = f"from {n} run in {duration(sample.run_s)} with {sample.slot_use:.0%} of the slots in use"
    watts = None if sample.energy_j is None else sample.energy_j / sample.run_s
    energy = None if watts is None else (watts * seconds[0], watts * seconds[1])
    return Estimate(source, seconds, (low, high), energy, price_per_hour)


def from_profile(
    profile: Profile | None, slots: int, instances: int, most_output: int | None, price_per_hour: float | None
) -> Estimate:
    """Returns an upper bound of the time to generate, from the decode steps of a tuned profile.

    Every output counts with its maximum length. The time to process prompts is left out, because a profile does not
    have this time.

    Args:
        slots: the slots of the engine.
        most_output: the maximum number of tokens that all rows together may generate; None: there is no limit.
    """
    if profile is None or not profile.stairs or instances > 1:
        what = "no profile" if profile is None or not profile.stairs else "the profile is of one engine"
        return Estimate(f"{what}; add --sample 20")
    if most_output is None:
        return Estimate("rows set no limit to their outputs; add --sample 20")
    if most_output == 0:
        return Estimate("the profile says nothing of prompts; add --sample 20")
    stair = min(profile.stairs, key=lambda each: abs(each.rows - slots))
    source = (
        f"to generate {most_output:,} tokens at most, by the {profile.source} ({significant(stair.tokens_per_s)} "
        f"tokens/s of {counted(stair.rows, 'row')}); prompts come on top, which --sample 20 would measure"
    )
    return Estimate(source, (0.0, most_output / stair.tokens_per_s), None, None, price_per_hour)
