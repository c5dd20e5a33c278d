"""Runs of pytest that measure."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKERS = ("-p", "tests.gate.workers", "-n", "auto", "--dist", "loadfile")


def measured(arguments: Iterable[str]) -> tuple[int, dict[str, float]]:
    """The exit code of pytest, and the seconds of each test that is no guard."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds.json"
        plugins = ["-p", "no:cacheprovider", "-p", "tests.gate.seconds", "--seconds", str(file)]
        code = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *plugins, *arguments], cwd=ROOT, check=False
        ).returncode
        return code, json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
