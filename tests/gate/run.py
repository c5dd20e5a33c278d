"""Runs pytest on the gate's tests."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ("tests/unit", "tests/model", "tests/installed")
NO_TESTS = 5  # exit code of pytest if no test was chosen
WORKERS = ("-p", "tests.gate.workers", "--dist", "loadfile", "-n", "auto")
"""Options with which each core has a worker, and each file runs on one of them."""


def pytest_of(arguments: Iterable[str], environment: Mapping[str, str] | None = None) -> int:
    """Runs pytest in the checkout, and returns its exit code."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def run_marked(
    marked: str,
    tests: Sequence[str] = TESTS,
    options: Sequence[str] = (),
    workers: Sequence[str] = WORKERS,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Runs tests on workers, then the tests that need all cores without workers. Returns the exit code of pytest.

    Args:
        marked: an expression of markers that chooses the tests.
        tests: files and folders of tests.
        options: options of pytest for both runs.
        workers: further options of pytest for the first run.
    """
    code = pytest_of([*workers, *options, "-m", f"({marked}) and not alone", *tests], environment)
    alone = need_all_cores(tests)
    if code not in (0, NO_TESTS) or not alone:
        return code
    code_of_alone = pytest_of([*options, "-m", f"({marked}) and alone", *alone], environment)
    return code if code_of_alone == NO_TESTS else code_of_alone


def need_all_cores(tests: Iterable[str]) -> list[str]:
    """Returns the files that have a test with the marker `alone`."""
    paths = [ROOT / test for test in tests]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    return sorted(str(file.relative_to(ROOT)) for file in files if "mark.alone" in file.read_text(encoding="utf-8"))


def measured(arguments: Iterable[str]) -> tuple[int, dict[str, float]]:
    """Runs pytest. Returns its exit code, and the seconds of each test that has no marker `guard`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds.json"
        code = pytest_of(["-p", "tests.gate.seconds", "--seconds", str(file), *arguments])
        return code, json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
