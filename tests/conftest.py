"""What all tests share."""

import os
import signal
import threading

import psutil
import pytest
from hypothesis import HealthCheck, settings

from llamabatch import profile_store

# The same examples each time, however slow the machine: `--hypothesis-profile search` looks for others.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", settings.get_profile("search"), derandomize=True)
settings.load_profile("steady")


@pytest.fixture(autouse=True, scope="session")
def signals_as_on_a_terminal():
    """A shell that runs us in the background has SIGINT ignored, nohup SIGHUP, and so would each child have them."""
    usual = {signal.SIGINT: signal.default_int_handler}
    if hasattr(signal, "SIGHUP"):
        usual[signal.SIGHUP] = signal.SIG_DFL
    for number, handler in usual.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def no_profiles_of_this_machine(tmp_path_factory):
    """Tests say what the rules do, whatever was tuned here; one that sets LLAMABATCH_CACHE has profiles of its own."""
    nowhere, real, at_start = tmp_path_factory.mktemp("no-profiles"), profile_store.folder, os.environ.get(CACHE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_store, "folder", lambda: real() if os.environ.get(CACHE) != at_start else nowhere)
        yield


CACHE = "LLAMABATCH_CACHE"


class Begun:
    """What this process has begun since, and is still there. A number would not say it: what was there before may end
    meanwhile."""

    def __init__(self):
        self._before = set(threading.enumerate()) | set(psutil.Process().children())

    def threads(self):
        return set(threading.enumerate()) - self._before

    def children(self):
        return set(psutil.Process().children()) - self._before


@pytest.fixture
def begun():
    """By the test."""
    return Begun()
