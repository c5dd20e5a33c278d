"""Runs settings on Vulkan, or on the CPU with the build of .venv."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from llamabatch.planning.binding_choice import VARIABLE
from llamabatch.utils.subprogram import command
from tests.vulkan.__main__ import NAMED

collect_ignore_glob = [] if NAMED in os.environ else ["test_*.py"]

TIMEOUT_S = 3000.0  # the first run compiles shaders


@pytest.fixture(scope="session")
def vulkan():
    """Environment variables of a program on Vulkan."""
    return {**os.environ, VARIABLE: os.environ[NAMED]}


@pytest.fixture(scope="session")
def run(vulkan):
    """Runs tests/devices/case.py on Vulkan; returns a dictionary for each of the settings."""
    return lambda *settings: _run(vulkan, *settings)


@pytest.fixture(scope="session")
def on_cpu():
    """What the build of .venv finds without any device."""
    [found] = _run(dict(os.environ), {"devices": "none"})
    return found


def _run(environment: dict[str, str], *settings: dict[str, object]) -> list[dict]:
    done = subprocess.run(
        command("tests.devices.case", json.dumps(settings)), env=environment, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]
