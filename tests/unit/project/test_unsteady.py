"""A test that fails once is named and fails nothing; a test that always fails, or many that do once, fail the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import unsteady

CHECKOUT = Path(__file__).parents[3]
BODY = """
import pytest
calls = {}

@pytest.mark.parametrize("number", range(%d))
def test_unsteady(number):
    calls[number] = calls.get(number, 0) + 1
    assert calls[number] > 1

def test_other():
    calls["other"] = calls.get("other", 0) + 1
    assert %s, calls["other"]
"""


@pytest.mark.parametrize(
    ("n_unsteady", "other", "file", "code", "says"),
    [
        (unsteady.MOST_UNSTEADY, "True", "test_any.py", 0, "UNSTEADY test_any.py::test_unsteady[0]"),
        (unsteady.MOST_UNSTEADY + 1, "True", "test_any.py", 1, "4 tests are unsteady, more than 3"),
        (0, "False", "test_any.py", 1, "AssertionError: 3"),
        (1, "True", "test_equal_bits.py", 1, "1 failed"),
        (0, "pytest.fail('Timeout (>1.0s)')", "test_any.py", 1, "1 failed, 1 skipped in"),
    ],
)
def test_of_runs(tmp_path, n_unsteady, other, file, code, says):
    (tmp_path / file).write_text(BODY % (n_unsteady, other))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.unsteady", "-p", "no:cacheprovider", "-q", file],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert says in done.stdout
    assert ("UNSTEADY" in done.stdout) == (n_unsteady > 0 and file == "test_any.py")
