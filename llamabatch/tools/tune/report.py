"""The results of tuning, as an object and as a JSON document."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamabatch.planning.profile import Profile, Stair, best_rows
from llamabatch.tools.machine_facts import MachineFacts
from llamabatch.tools.processes import OthersUse
from llamabatch.tools.tune.choose import Choice, Latency
from llamabatch.utils.format import attributes

SCHEMA_VERSION = 1
CHOSEN, LLAMA_CPP = "chosen", "llama.cpp"  # labels of the two candidates in Report.gain


@dataclass(frozen=True)
class Result:
    """The result of one Stage.

    Attributes:
        title, measures, only_on_request: the attributes of the Stage.
        failures: the errors of failed candidates, by the candidates' labels.
    """

    title: str
    measures: tuple[str, ...]
    choice: Choice
    failures: Mapping[str, str] = field(default_factory=dict)
    only_on_request: bool = False


@dataclass(frozen=True)
class Report:
    """All results of a tuning.

    Attributes:
        results: one result per stage, in the order of the stages.
        stairs: times of decode steps with the chosen setting, the smallest number of rows first.
        gain: the chosen setting against llama.cpp's defaults.
        many: number of rows in the steps called "many".
        file: file of the profile; None: not written, since other processes used the CPU during the tuning.
        seconds: duration of the tuning.
        cut_short: True if the time was over before everything was measured as often as planned.
        others: the CPU use of other processes during the tuning.
        latency: the number of slots that keeps the latency limit; None without a limit.
    """

    machine: MachineFacts
    results: tuple[Result, ...]
    stairs: tuple[Stair, ...]
    gain: Result
    many: int
    profile: Profile
    file: Path | None
    seconds: float
    cut_short: bool
    others: OthersUse
    latency: Latency | None = None

    @property
    def best_rows(self) -> int:
        """The best number of rows within the latency limit, if there is a limit. Memory is not considered."""
        return self.latency.rows if self.latency is not None else best_rows(list(self.stairs)) or 1

    def speed_up(self, measure: str) -> float:
        """Returns the speed of the chosen setting as a multiple of the speed of llama.cpp's defaults."""
        default, chosen = (self.gain.choice.median(label) for label in (self.gain.choice.default, CHOSEN))
        return default[measure] / chosen[measure]


def document(report: Report) -> dict[str, Any]:
    """Returns the document of `--json`, which docs/tune.md describes."""
    return {
        "schema_version": SCHEMA_VERSION,
        **report.machine.document(),
        **attributes(report, "seconds", "cut_short"),
        "others_cpu_percent": round(report.others.percent, 1),
        "kept": report.file is not None,
        "many_rows": report.many,
        "questions": [_result(result) for result in report.results],
        "stairs": [attributes(stair, "rows", "step_ms", "p95_ms", "tokens_per_s") for stair in report.stairs],
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
