"""Runs a failed test up to twice more. A test that then passes is reported as unsteady, and does not fail the run.

Only `make test` loads this plugin (`-p tests.gate.unsteady`), so that no change is refused for a test that fails once
in ten thousand runs. A test is not run again if it timed out, compares bits, or ended its worker: one such failure is a
defect. More than MOST_UNSTEADY unsteady tests fail the run.
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
    # A worker sends pytest-rerunfailures two packets for each test. Without TCP_NODELAY, the second would wait 40 ms.
    to_controller = getattr(getattr(config, "failures_db", None), "sock", None)
    if to_controller is not None:
        to_controller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in EXACT:
            item.add_marker(pytest.mark.flaky(reruns=0))


def _unsteady(config: pytest.Config) -> list[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")  # None in a worker
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
