"""Runs a test that fails up to twice more, and names the ones that then pass: they are unsteady, and fail nothing.

`make test` alone loads this plugin (`-p tests.gate.unsteady`), so that no change is refused for a test that fails once
in ten thousand runs. A timeout is never run again, nor a test that compares bits or ends its worker:
these are defects the first time. More than MOST_UNSTEADY unsteady tests in one run fail it.
"""

from __future__ import annotations

import socket

import pytest

RERUNS = 2
MOST_UNSTEADY = 3
NEVER = [r"Timeout \(>"]  # the errors of pytest-timeout
EXACT = (  # modules whose tests compare bits, or run the kernels' own checks
    "test_chain_peer", "test_equal_bits", "test_equality", "test_kernels", "test_long_words", "test_matrix",
    "test_portable", "test_ragged", "test_sampler_peer", "test_state_copies",
)  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.option.reruns = RERUNS
    config.option.rerun_except = NEVER
    # A worker tells pytest-rerunfailures of each test in two packets; TCP would wait 40 ms before it sends the second.
    to_controller = getattr(getattr(config, "failures_db", None), "sock", None)
    if to_controller is not None:
        to_controller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in EXACT:
            item.add_marker(pytest.mark.flaky(reruns=0))


def _unsteady(config: pytest.Config) -> list[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")  # a worker has none
    stats = reporter.stats if reporter else {}
    failed = {report.nodeid for key in ("failed", "error") for report in stats.get(key, ())}
    return sorted({report.nodeid for report in stats.get("rerun", ())} - failed)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if len(_unsteady(session.config)) > MOST_UNSTEADY:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    unsteady = _unsteady(config)
    for nodeid in unsteady:
        terminalreporter.write_line(f"UNSTEADY {nodeid} failed, and passed when it ran again: cure it", yellow=True)
    if len(unsteady) > MOST_UNSTEADY:
        terminalreporter.write_line(f"{len(unsteady)} tests are unsteady, more than {MOST_UNSTEADY}", red=True)
