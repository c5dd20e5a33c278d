"""Stores the outcome of each case in a file, and writes the committed summary."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.long.figures import Figure

_VERSION = 1


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case.

    Attributes:
        error: the error; None if the promise holds.
        date: time of the end, UTC.
        revision: revision of the repository.
    """

    error: str | None
    seconds: float
    date: str
    revision: str


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


class State:
    """Outcomes by figure and number of the case. Each change replaces the whole file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._figures: dict[str, dict[str, Any]] = {}
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept.get("version") == _VERSION:
                self._figures = kept["figures"]

    def outcomes(self, figure: Figure) -> dict[int, Outcome]:
        """Returns the outcomes by number of the case. There are none if the figure's module has changed since."""
        kept = self._figures.get(figure.name)
        if kept is None or kept["digest"] != figure.digest:
            return {}
        found = {int(number): Outcome(**outcome) for number, outcome in kept["cases"].items()}
        return {number: outcome for number, outcome in found.items() if number < figure.total}

    def missing(self, figure: Figure) -> list[int]:
        """Returns the cases without an outcome, and then the failed cases, which are tried again."""
        outcomes = self.outcomes(figure)
        never = [number for number in range(figure.total) if number not in outcomes]
        return never + [number for number in sorted(outcomes) if outcomes[number].error is not None]

    def record(self, figure: Figure, number: int, outcome: Outcome) -> None:
        """Stores an outcome. It is on the disk when the call returns."""
        kept = self._figures.get(figure.name)
        if kept is None or kept["digest"] != figure.digest:
            kept = self._figures[figure.name] = {"digest": figure.digest, "cases": {}}
        kept["cases"][str(number)] = asdict(outcome)
        write(self._path, {"version": _VERSION, "figures": self._figures})

    def forget(self, figures: Iterable[Figure]) -> None:
        """Deletes the outcomes of figures, so that all of their cases run again."""
        for figure in figures:
            self._figures.pop(figure.name, None)
        write(self._path, {"version": _VERSION, "figures": self._figures})


def publish(path: Path, figures: Iterable[Figure], state: State, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the committed summary, and returns it. Figures without an outcome here keep their old summary.

    Args:
        machine: facts about the machine that ran the cases, without names of hosts and paths.
    """
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["figures"] if path.exists() else {}
    for figure in figures:
        outcomes = state.outcomes(figure)
        if outcomes:
            kept[figure.name] = summary(figure, outcomes) | {"machine": dict(machine)}
    document = {"figures": {name: kept[name] for name in sorted(kept)}}
    write(path, document, indent=1)
    return document


def summary(figure: Figure, outcomes: Mapping[int, Outcome]) -> dict[str, Any]:
    """Returns the summary of one figure."""
    failed = {number: outcome.error for number, outcome in outcomes.items() if outcome.error is not None}
    dates = sorted(outcome.date for outcome in outcomes.values())
    return {
        "holds": figure.holds,
        "cases": figure.total,
        "run": len(outcomes),
        "failed": len(failed),
        "failures": {str(number): failed[number] for number in sorted(failed)},
        "seconds": round(sum(outcome.seconds for outcome in outcomes.values()), 1),
        "first": dates[0],
        "last": dates[-1],
        "revisions": sorted({outcome.revision for outcome in outcomes.values()}),
    }


def write(path: Path, document: Any, indent: int | None = None) -> None:
    """Replaces the file. After a crash, either the old or the new file is there, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=indent, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
