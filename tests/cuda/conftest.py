"""Fixtures that run settings with a CUDA build, or with the build of .venv."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llamabatch.planning.binding_choice import VARIABLE
from tests.cuda.__main__ import NAMED
from tests.devices.cases import cases

collect_ignore_glob = [] if NAMED in os.environ else ["test_*.py"]

TIMEOUT_S = 600.0


@pytest.fixture(scope="session")
def package():
    return Path(os.environ[NAMED])


@pytest.fixture(scope="session")
def cuda(package):
    """Environment variables for a program with the CUDA build. They lack LD_LIBRARY_PATH, since the build finds its
    toolkit by itself."""
    return {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"} | {VARIABLE: str(package)}


@pytest.fixture(scope="session")
def run(cuda):
    """A function that runs tests/devices/case.py with the CUDA build. It returns a dictionary for each setting."""
    return lambda *settings: cases(cuda, settings, TIMEOUT_S)


@pytest.fixture(scope="session")
def on_cpu():
    """A function that runs tests/devices/case.py with the build of .venv."""
    return lambda *settings: cases(os.environ, settings, TIMEOUT_S)
