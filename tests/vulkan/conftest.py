"""Fixtures that run settings on Vulkan, or on the CPU with the build of .venv."""

from __future__ import annotations

import os

import pytest

from llamabatch.planning.binding_choice import VARIABLE
from tests.devices.cases import cases
from tests.vulkan.__main__ import NAMED

collect_ignore_glob = [] if NAMED in os.environ else ["test_*.py"]

TIMEOUT_S = 3000.0  # the first run compiles shaders


@pytest.fixture(scope="session")
def vulkan():
    """Environment variables for a program on Vulkan."""
    return {**os.environ, VARIABLE: os.environ[NAMED]}


@pytest.fixture(scope="session")
def run(vulkan):
    """A function that runs tests/devices/case.py on Vulkan, and returns a dictionary for each setting."""
    return lambda *settings: cases(vulkan, settings, TIMEOUT_S)


@pytest.fixture(scope="session")
def on_cpu():
    """The findings of tests/devices/case.py with the build of .venv, on the CPU alone."""
    [found] = cases(os.environ, [{"devices": "none"}], TIMEOUT_S)
    return found
