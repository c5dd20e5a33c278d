"""Ids of the tests that llama-server passes, ids that our server fails, and the comparison of a run with both."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PASSED = HERE / "passed.json"
FAILURES = HERE / "failures.json"


@dataclass(frozen=True)
class Comparison:
    """The outcomes of our server beside the expected failures. Exact means that these lists are right."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    """Fail, but are not listed."""
    cured: list[str] = field(default_factory=list)
    """Are listed, but pass."""
    missing: list[str] = field(default_factory=list)
    """Had no outcome."""

    @property
    def is_exact(self) -> bool:
        return not (self.unexpected or self.cured or self.missing)


def read_passed() -> dict[str, Any]:
    """Returns the record of llama-server: versions, command, and under "ids" the tests that passed."""
    record: dict[str, Any] = json.loads(PASSED.read_text(encoding="utf-8"))
    return record


def read_failures() -> dict[str, str]:
    """Returns the ids of tests that our server fails, each with its reason. The file lists the ids by reason."""
    record: dict[str, list[str]] = json.loads(FAILURES.read_text(encoding="utf-8")) if FAILURES.is_file() else {}
    return {name: reason for reason, names in record.items() for name in names}


def write_failures(failures: Mapping[str, str]) -> None:
    record: dict[str, list[str]] = {}
    for name, reason in failures.items():
        record.setdefault(reason, []).append(name)
    write(FAILURES, {reason: sorted(record[reason]) for reason in sorted(record)})


def write(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def compare(asked: list[str], outcomes: Mapping[str, str], expected: Mapping[str, str]) -> Comparison:
    """Compares the outcomes of a run with the expected failures.

    Args:
        asked: ids of the tests to run.
        outcomes: "passed", "failed" or "skipped", by id.
        expected: reasons of expected failures, by id.
    """
    found = Comparison()
    for name in asked:
        if name not in outcomes:
            found.missing.append(name)
        elif outcomes[name] == "passed":
            found.passed.append(name)
            if name in expected:
                found.cured.append(name)
        else:
            found.failed.append(name)
            if name not in expected:
                found.unexpected.append(name)
    return found


def counts(names: Iterable[str]) -> Counter[str]:
    """Returns the number of ids by module."""
    return Counter(name.split("::", 1)[0] for name in names)


def table() -> str:
    """Returns the figures and the reasons for docs/conformance.md."""
    asked, failures = read_passed()["ids"], read_failures()
    n_passed = len(asked) - len(failures)
    lines = [
        f"llamabatch passes {n_passed} of the {len(asked)} tests that llama-server passes, "
        f"{n_passed / len(asked):.0%}. It fails the others:",
        "",
        "| fails | because |",
        "|---|---|",
    ]
    for reason in dict.fromkeys(failures.values()):
        tests = counts(name.split("[")[0].split("::")[1] for name, why in failures.items() if why == reason)
        named = ", ".join(f"`{test}`" + (f" ({n})" if n > 1 else "") for test, n in tests.items())
        lines.append(f"| {named} | {reason} |")
    return "\n".join(lines) + "\n"
