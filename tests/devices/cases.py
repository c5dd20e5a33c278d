"""Runs tests/devices/case.py as a program, since a process chooses its devices from the environment at its start."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from llamabatch.utils.subprogram import command


def cases(environment: Mapping[str, str], settings: Sequence[object], timeout_s: float) -> list[dict[str, Any]]:
    """Returns the program's findings for each setting. If the program fails, the test fails with the end of its
    stderr."""
    done = subprocess.run(
        command("tests.devices.case", json.dumps(settings)), env=dict(environment), capture_output=True, text=True,
        timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]
