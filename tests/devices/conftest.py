"""Simulated devices: RPC servers of llama.cpp on loopback, each with devices that compute on the CPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

from llamabatch.llama.rpc import BACKEND_VARIABLE, SERVERS_VARIABLE
from llamabatch.native_build.tools import SetupFailure
from llamabatch.utils.subprogram import command
from tests.devices.backend import backend
from tests.devices.cases import cases

WHOLE = "LLAMABATCH_TEST_DEVICES"
"""Set by `make test-devices`: the whole matrix."""


@contextlib.contextmanager
def devices(number: int) -> Iterator[dict[str, str]]:
    """Starts a server of this many devices, and yields the variables with which a program uses them. Raises
    SetupFailure."""
    plugin = {BACKEND_VARIABLE: str(backend()), SERVERS_VARIABLE: ""}
    start = command("tests.devices.server", str(number))
    server = subprocess.Popen(start, env={**os.environ, **plugin}, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        assert port, f"the server of {number} devices ended with {server.wait()}"
        # ggml-rpc stores the last graph of a device, not of a context: two contexts would compute each other's graphs
        yield {**plugin, SERVERS_VARIABLE: f"127.0.0.1:{port}", "LLAMA_GRAPH_REUSE_DISABLE": "1"}
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@pytest.fixture(scope="session")
def run():
    """A function that runs tests/devices/case.py on N devices (0: the CPU alone), and returns a dictionary for each
    setting.

    `reuse`: llama.cpp may reuse its last graph. On RPC devices, this is correct only for one context at a time.
    """
    with contextlib.ExitStack() as stack:
        known: dict[int, dict[str, str]] = {0: {}}

        def call(number: int, *settings: dict[str, object], timeout: float = 120.0, reuse: bool = False) -> list[dict]:
            if number not in known:
                try:
                    known[number] = stack.enter_context(devices(number))
                except SetupFailure as error:
                    pytest.skip(f"no devices: {error}")
            again = {"LLAMA_GRAPH_REUSE_DISABLE": "0"} if reuse else {}
            return cases({**os.environ, **known[number], **again}, settings, timeout)

        yield call


@pytest.fixture(scope="session")
def on_cpu(run):
    """The texts of an engine on the CPU alone."""
    [found] = run(0, {})
    return found["texts"]


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("devices") and not os.environ.get(WHOLE):
            item.add_marker(pytest.mark.skip(reason="of `make test-devices`"))
