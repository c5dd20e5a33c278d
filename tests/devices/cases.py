"""Runs tests/devices/case.py as a program of its own: each environment has its devices from the start."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from llamabatch.utils.subprogram import command


def cases(environment: Mapping[str, str], settings: Sequence[object], timeout_s: float) -> list[dict[str, Any]]:
    """What the program says of each of the settings. Fails with the end of its errors if it does."""
    done = subprocess.run(
        command("tests.devices.case", json.dumps(settings)), env=dict(environment), capture_output=True, text=True,
        timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]
