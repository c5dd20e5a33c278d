"""Fixtures of all tests."""

import inspect
import logging
import os
import signal
import subprocess
import threading
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

import llamabatch
from llamabatch.planning import profile_store
from tests import paced
from tests.gate import marks

# Hypothesis tries the same examples each time, however slow the machine. `--hypothesis-profile search` tries others.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", settings.get_profile("search"), derandomize=True)
settings.load_profile("steady")


@pytest.fixture(autouse=True, scope="session")
def signals_as_on_a_terminal():
    """Restores the default handlers of SIGINT and SIGHUP. A shell starts background jobs with SIGINT ignored, and nohup
    ignores SIGHUP; each child would inherit this."""
    usual = {signal.SIGINT: signal.default_int_handler}
    if hasattr(signal, "SIGHUP"):
        usual[signal.SIGHUP] = signal.SIG_DFL
    for number, handler in usual.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


CHECKOUT = Path(__file__).parents[1]


@pytest.fixture(autouse=True, scope="session")
def programs_start_elsewhere(tmp_path_factory):
    """Lets tests, and the programs that they start, run in a temporary folder, as on a user's machine.

    In the checkout, a program would also find relative paths, stray files, and modules that no wheel contains.
    """
    real = subprocess.Popen.__init__

    def start(self, args, *rest, cwd=None, **named):
        folder = Path(cwd or os.getcwd()).resolve()
        is_inside = folder.is_relative_to(CHECKOUT.resolve()) and args[0] != "git"
        assert not is_inside, f"{args} would start in {folder}: give it a cwd elsewhere"
        real(self, args, *rest, cwd=cwd, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        patch.setattr(subprocess.Popen, "__init__", start)
        yield


@pytest.fixture(autouse=True)
def handlers_of_signals_stay():
    """Restores the signal handlers after each test, since the command line replaces them in this process."""
    usual = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in usual}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler and handler is not None:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def logs_stay():
    """Restores the loggers after each test. A server in this process changes them, and its log would write into the
    output of the next test."""
    loggers = [logging.getLogger(name) for name in (llamabatch.__name__, "uvicorn.error")]
    before = [(logger, logger.handlers[:], logger.filters[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, filters, level, propagate in before:
        logger.handlers[:], logger.filters[:], logger.propagate = handlers, filters, propagate
        logger.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def no_profiles_of_this_machine(tmp_path_factory):
    """Hides the profiles of this machine, so that plans follow the rules. A test that sets LLAMABATCH_CACHE has its own
    profiles."""
    nowhere, real, at_start = tmp_path_factory.mktemp("no-profiles"), profile_store.folder, os.environ.get(CACHE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_store, "folder", lambda: real() if os.environ.get(CACHE) != at_start else nowhere)
        yield


CACHE = "LLAMABATCH_CACHE"


@pytest.fixture(autouse=True, scope="session")
def no_defaults_of_this_user(tmp_path_factory):
    """Hides the user's own defaults of options from commands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LLAMABATCH_MODEL", raising=False)
        empty = tmp_path_factory.mktemp("no-defaults") / "config.toml"
        empty.touch()
        patch.setenv("LLAMABATCH_CONFIG", str(empty))
        yield


class Begun:
    """The threads and children that this process has started since the object was made, and that still run. A count is
    not enough, because earlier ones may end meanwhile."""

    def __init__(self):
        self._before = set(threading.enumerate()) | set(psutil.Process().children())

    def threads(self):
        return set(threading.enumerate()) - self._before

    def children(self):
        return set(psutil.Process().children()) - self._before


@pytest.fixture
def begun():
    """The threads and children that the test has started."""
    return Begun()


def pytest_itemcollected(item):
    """Marks tests that use the fixture `steps` as `timed`, since time matters in them."""
    if "steps" in inspect.signature(getattr(item, "function", None) or print).parameters:
        item.add_marker("timed")


def pytest_collection_modifyitems(items):
    marks.mark(items)


@pytest.fixture(autouse=True, scope="session")
def speed_of_steps():
    """Gives steps the speed that SPEED_OF_TESTED_STEPS names (`slow` or `instant`), here and in programs of tests."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get(paced.SPEED):
            paced.set_speed(patch)
        yield


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Controls when the engines of a module's tests make steps, in this process and in children."""
    with pytest.MonkeyPatch.context() as patch:
        yield paced.Steps(tmp_path_factory.mktemp("paced") / "order", patch)
