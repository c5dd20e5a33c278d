"""Runs settings with a CUDA build, or with the build of .venv."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from llamabatch.planning.binding_choice import VARIABLE
from llamabatch.utils.subprogram import command
from tests.cuda.__main__ import NAMED

collect_ignore_glob = [] if NAMED in os.environ else ["test_*.py"]

TIMEOUT_S = 600.0


@pytest.fixture(scope="session")
def package():
    return Path(os.environ[NAMED])


@pytest.fixture(scope="session")
def cuda(package):
    """Environment variables of a program with the CUDA build, which finds its toolkit by itself."""
    return {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"} | {VARIABLE: str(package)}


@pytest.fixture(scope="session")
def run(cuda):
    """Runs tests/devices/case.py with the CUDA build; returns a dictionary for each of the settings."""
    return lambda *settings: cases(cuda, *settings)


@pytest.fixture(scope="session")
def on_cpu():
    """Runs it with the build of .venv."""
    return lambda *settings: cases(dict(os.environ), *settings)


def cases(environment: dict[str, str], *settings: dict[str, object]) -> list[dict]:
    done = subprocess.run(
        command("tests.devices.case", json.dumps(settings)), env=environment, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]
