"""Differences between systems, as far as Linux can show them."""

import signal
import subprocess
import sys
import threading

import pytest

from llamabatch.utils import system


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (0, None),
        (3, None),
        (-signal.SIGKILL, "SIGKILL"),
        (-(signal.SIGRTMIN + 3), f"signal {signal.SIGRTMIN + 3}"),
        (0xC0000005, "SIGSEGV"),
        (0xC0000409, "SIGABRT"),
        (0xC0000374, "exception 0xC0000374"),
    ],
)
def test_a_fatal_signal_has_a_name(code, name):
    assert system.fatal_signal(code) == name


def test_a_lock_is_waited_for(tmp_path):
    path = tmp_path / "lock"
    with path.open("w") as first, path.open("w") as second:
        assert system.lock(first.fileno())
        assert not system.lock(second.fileno())
        waiting = threading.Thread(target=system.lock, args=(second.fileno(),), kwargs={"patience": 60.0})
        waiting.start()
        first.close()
        waiting.join(60)
        assert not waiting.is_alive()


def test_limits_are_read_and_set():
    assert system.limits("RLIMIT_NO_SUCH") == (None, None)
    code = (
        "from llamabatch.utils import system\n"
        "system.set_limits('RLIMIT_NO_SUCH', 1, None)\n"
        "system.set_limits('RLIMIT_CORE', 0, 0)\n"
        "system.set_limits('RLIMIT_CORE', 5, 0)\n"  # above the hard limit: the limits stay
        "print(system.limits('RLIMIT_CORE'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(0, 0)\n"
