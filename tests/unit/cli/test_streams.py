"""Standard streams that are closed, or of an encoding that lacks a character."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs a shell")

PLAN = f"{sys.executable} -m llamabatch plan -m tiny"


def shell(command, **environ):
    return subprocess.run(
        ["sh", "-c", command], env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )


def test_a_command_runs_with_its_streams_closed():
    done = shell(f"{PLAN} 2>&-")
    assert (done.returncode, "weights" in done.stdout) == (0, True)
    assert shell(f"{PLAN} >&- 2>&- <&-").returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
@pytest.mark.parametrize("command", [PLAN, f"{sys.executable} -m llamabatch --help"])
def test_a_full_disk_is_one_sentence(command):
    done = shell(f"{command} > /dev/full")
    assert (done.returncode, done.stderr) == (3, "Error: the output could not be written: No space left on device\n")


def test_tables_are_written_in_any_encoding():
    done = shell(PLAN, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "?" in done.stdout
