"""What tuning found, as an object and as a JSON document."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamabatch.errors import ConfigError
from llamabatch.planning.profile import Profile, Stair, best_rows
from llamabatch.scheduler.chunked_prefill import SHORT, STEPS_BETWEEN
from llamabatch.tools.machine_facts import MachineFacts
from llamabatch.tools.tune.choose import Choice
from llamabatch.utils.checks import counted

# ----------------------------------------------------------------------------------------------------
# How many rows keep the time between two tokens below a limit, from what steps were measured to take. Pure
# Python.


OUTPUT = 256  # tokens: what a request may write where it does not say
_P95 = 0.05


@dataclass(frozen=True)
class Gap:
    """With this many rows the p95 of the time between two tokens is so long, in milliseconds."""

    rows: int
    p95_ms: float


@dataclass(frozen=True)
class Latency:
    """The answer to a limit.

    Attributes:
        limit_ms: of the p95 of the time between two tokens.
        rows: the slots that make the most tokens/s within it; the fewest within 3 % of that.
        gaps: by rising number of rows.
        prompt_ms: that a prompt token takes.
    """

    limit_ms: float
    rows: int
    gaps: tuple[Gap, ...]
    prompt_ms: float

    @property
    def p95_ms(self) -> float:
        """With the rows that were chosen."""
        return next(gap.p95_ms for gap in self.gaps if gap.rows == self.rows)


def gap_of(stair: Stair, prompt_ms: float) -> Gap:
    """The p95 between two tokens of one of so many rows that write all the time."""
    step = stair.step_ms if stair.p95_ms is None else stair.p95_ms
    beside_prompts = 1 / (STEPS_BETWEEN + 1) + stair.rows / OUTPUT
    return Gap(stair.rows, step + (SHORT * prompt_ms if beside_prompts > _P95 else 0.0))


def choose_rows(stairs: Iterable[Stair], prompt_ms: float, limit_ms: float) -> Latency:
    """The number of slots for this limit. Raises ConfigError, with the least that can be had, where none keeps it."""
    stairs = sorted(stairs, key=lambda stair: stair.rows)
    gaps = tuple(gap_of(stair, prompt_ms) for stair in stairs)
    within = [stair for stair, gap in zip(stairs, gaps, strict=True) if gap.p95_ms <= limit_ms]
    rows = best_rows(within)
    if rows is None:
        least = min(gaps, key=lambda gap: gap.p95_ms)
        raise ConfigError(
            f"p95_inter_token_ms is {limit_ms:g}; the least that can be had here is {least.p95_ms:.3g}, with "
            f"{counted(least.rows, 'row')}"
        )
    return Latency(limit_ms, rows, gaps, prompt_ms)


SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Result:
    """The answer to one question.

    Attributes:
        title, measures, only_on_request: as in Stage.
        failures: why a candidate could not be measured, by label.
    """

    title: str
    measures: tuple[str, ...]
    choice: Choice
    failures: Mapping[str, str] = field(default_factory=dict)
    only_on_request: bool = False


@dataclass(frozen=True)
class Report:
    """Everything.

    Attributes:
        results: in the order of the questions.
        stairs: decode steps with what was chosen, by rising number of rows.
        gain: what was chosen against llama.cpp's defaults.
        many: rows of the steps called "many".
        file: where the profile was kept.
        seconds: that it took.
        load: of the machine when it began, in processes that wanted a core.
        latency: the slots for a limit on the time between two tokens, where one was given.
        cut_short: something was measured less often than planned, because the time was over.
    """

    machine: MachineFacts
    results: tuple[Result, ...]
    stairs: tuple[Stair, ...]
    gain: Result
    many: int
    profile: Profile
    file: Path
    seconds: float
    cut_short: bool
    load: float
    latency: Latency | None = None

    @property
    def best_rows(self) -> int:
        """The rows that pay, memory aside, and keep the latency limit."""
        return self.latency.rows if self.latency is not None else best_rows(list(self.stairs)) or 1

    def speed_up(self, measure: str) -> float:
        """How many times as fast as llama.cpp's defaults what was chosen is."""
        default, chosen = (self.gain.choice.median(label) for label in (self.gain.choice.default, CHOSEN))
        return default[measure] / chosen[measure]


CHOSEN, LLAMA_CPP = "chosen", "llama.cpp"


def document(report: Report) -> dict[str, Any]:
    """For `--json`; docs/tune.md describes it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "machine": {name: value for name, value in dataclasses.asdict(report.machine).items() if name != "versions"},
        "versions": report.machine.versions,
        "seconds": report.seconds,
        "cut_short": report.cut_short,
        "load": report.load,
        "many_rows": report.many,
        "questions": [_result(result) for result in report.results],
        "stairs": [
            {"rows": stair.rows, "step_ms": stair.step_ms, "p95_ms": stair.p95_ms, "tokens_per_s": stair.tokens_per_s}
            for stair in report.stairs
        ],
        "latency": _latency(report.latency),
        "best_rows": report.best_rows,
        "against_llama_cpp": {
            **_result(report.gain),
            "speed_up": {name: report.speed_up(name) for name in report.gain.measures},
        },
        "profile": report.profile.to_json(),
    }


def _latency(latency: Latency | None) -> dict[str, Any] | None:
    if latency is None:
        return None
    return {
        "p95_inter_token_ms": latency.limit_ms,
        "rows": latency.rows,
        "predicted_ms": latency.p95_ms,
        "prompt_ms": latency.prompt_ms,
        "gaps": [dataclasses.asdict(gap) for gap in latency.gaps],
    }


def _result(result: Result) -> dict[str, Any]:
    choice = result.choice
    return {
        "title": result.title,
        "default": choice.default,
        "chosen": choice.chosen,
        "only_on_request": result.only_on_request,
        "candidates": [
            {
                "label": label,
                "gain": choice.gains[label],
                "noise": choice.noise[label],
                "median_ms": choice.median(label),
                "rounds_ms": [dict(figures) for figures in rounds],
                "error": result.failures.get(label),
            }
            for label, rounds in choice.rounds.items()
        ],
    }
