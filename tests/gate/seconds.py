"""A plugin of pytest that measures the seconds of each test: `-p tests.gate.seconds --seconds FILE`.

The time of a test includes its own fixtures. A fixture that several tests share counts for none of them, because
otherwise it would count for the test that happens to run first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from pathlib import Path

import pytest

KEY = "seconds"
_spent = pytest.StashKey[float]()
_is_last = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", metavar="FILE", help="where to write the seconds of each test, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Measure(config), "measured seconds")


class _Measure:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, float] = {}
        self._in_shared_fixture = False
        self._shared_s = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        item.stash[_spent] = 0.0
        item.stash[_is_last] = nextitem is None or nextitem.path != item.path

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        if fixturedef.scope == "function" or self._in_shared_fixture:
            return (yield)
        begin, self._in_shared_fixture = time.perf_counter(), True
        try:
            return (yield)
        finally:
            self._in_shared_fixture = False
            self._shared_s += time.perf_counter() - begin

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        shared_s, self._shared_s = self._shared_s, 0.0
        if call.when != "teardown":
            item.stash[_spent] += call.duration - shared_s
        else:
            item.stash[_spent] += 0.0 if item.stash[_is_last] else call.duration
            if item.get_closest_marker("guard") is None:  # a guard runs in the gate, however long it takes
                item.user_properties.append((KEY, item.stash[_spent]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for key, value in report.user_properties:
            if key == KEY:
                self._seconds[report.nodeid] = value

    def pytest_sessionfinish(self) -> None:
        if (file := self._config.getoption("--seconds")) and not hasattr(self._config, "workerinput"):
            Path(file).write_text(json.dumps(self._seconds), encoding="utf-8")
