"""Windows and macOS imitated on Linux: what they lack is removed. Nothing runs on these systems."""

import json
import subprocess

import pytest

from llamabatch.utils.subprogram import command


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_all_is_imported_and_generates_without_what_a_system_lacks(system, tmp_path):
    program = command("tests.workers.other_system", system, str(tmp_path))
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) > 380, "modules"
