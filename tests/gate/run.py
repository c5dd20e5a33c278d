"""Runs of pytest over the gate's tests."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ("tests/unit", "tests/model", "tests/installed")
NO_TESTS = 5  # pytest ends so where no test was chosen
WORKERS = ("-p", "tests.gate.workers", "--dist", "loadfile", "-n", "auto")
"""Options with which each core has a worker, and each file runs on one of them."""


def pytest_of(arguments: Iterable[str], environment: Mapping[str, str] | None = None) -> int:
    """The exit code of pytest, run in the checkout."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def run_marked(
    marked: str,
    tests: Sequence[str] = TESTS,
    options: Sequence[str] = (),
    workers: Sequence[str] = WORKERS,
    environment: Mapping[str, str] | None = None,
) -> int:
    """The exit code of pytest: on workers first, and then what needs all cores.

    Args:
        marked: an expression of markers.
        tests: files and folders.
        options: of both runs.
        workers: options of the first run.
    """
    code = pytest_of([*workers, *options, "-m", f"({marked}) and not alone", *tests], environment)
    alone = need_all_cores(tests)
    if code not in (0, NO_TESTS) or not alone:
        return code
    code_of_alone = pytest_of([*options, "-m", f"({marked}) and alone", *alone], environment)
    return code if code_of_alone == NO_TESTS else code_of_alone


def need_all_cores(tests: Iterable[str]) -> list[str]:
    """The files in which a test is marked so."""
    paths = [ROOT / test for test in tests]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    return sorted(str(file.relative_to(ROOT)) for file in files if "mark.alone" in file.read_text(encoding="utf-8"))


def measured(arguments: Iterable[str]) -> tuple[int, dict[str, float]]:
    """The exit code of pytest, and the seconds of each test that is no guard."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds.json"
        code = pytest_of(["-p", "tests.gate.seconds", "--seconds", str(file), *arguments])
        return code, json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
