"""A job on a disk that is really full: a tmpfs of 1 MB. This needs root, who may mount one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llamabatch.errors import OutputError
from llamabatch.jobs.output.files import Files
from llamabatch.jobs.output.output import Output, OutputOptions

HOLDS = (
    "a disk of 1 MB fills up under a job: it says so, and stops, or waits and goes on when there is room; what was "
    "written stays, and the same command finishes with each row once"
)
TOTAL = 12
QUICK = 12

_SETTINGS = {"model": {"name": "none.gguf"}}
_ROWS = 400
_WIDE = 5000  # characters of a row's text: 2 MB in all, 6 MB with waiting rows and a Parquet file
_NAMES = ("out.jsonl", "out.jsonl", "out.parquet")
_ORDERS = ("input", "finished", "input")


def case(number: int, folder: Path) -> None:
    """Runs one combination: of three outputs, a job that stops or waits, and a disk that is empty or nearly full at the
    start."""
    kind, waits, full_before = number % 3, number // 3 % 2 == 1, number >= 6
    with _tmpfs(folder, "1m") as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(1_030_000 if full_before else 0))
        options = OutputOptions(order=_ORDERS[kind])
        out = disk / _NAMES[kind]
        messages: list[str] = []

        def tell(message: str) -> None:
            messages.append(message)
            if len(messages) == 1:  # after the first message, the user makes room
                ballast.unlink()
                _resize(disk, "8m")

        if waits:
            _run(out, options, Files(tell, patience_s=60.0, retry_s=0.01))
            assert ["no room for" in messages[0], "there is room again" in messages[-1]] == [True, True], messages
        else:
            computed = _stopped(out, options)
            ballast.unlink()
            _resize(disk, "8m")
            again = _run(out, options, Files())
            assert len(computed) + len(again) <= _ROWS + 1, (len(computed), len(again))
        _check(out, options)


def _stopped(out: Path, options: OutputOptions) -> list[int]:
    """Runs the job until the full disk stops it. Returns the computed rows, of which only the last may be lost."""
    computed: list[int] = []
    with pytest.raises(OutputError, match=r"No space left on device.*make room, and run the same command again"):
        _run(out, options, Files(patience_s=0.0), computed)
    return computed


def _run(out: Path, options: OutputOptions, files: Files, computed: list[int] | None = None) -> list[int]:
    """Runs the job. Rows finish in pairs, the later row first."""
    computed = [] if computed is None else computed
    with Output(out, _SETTINGS, options, files) as output:
        for number in (n ^ 1 for n in range(_ROWS)):
            if not output.is_done(number):
                computed.append(number)
                output.write(number, _record(number))
        output.finish()
    return computed


def _record(number: int) -> dict[str, Any]:
    text = os.urandom(_WIDE // 2).hex()  # random, so that a Parquet file cannot compress it
    return {"row": number, "id": str(number), "text": text, "finish_reason": "stop", "error": None}


def _check(out: Path, options: OutputOptions) -> None:
    if out.suffix == ".parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(out) as file:
            rows = file.read(columns=["row", "text"]).to_pylist()
    else:
        import json

        rows = [json.loads(line) for line in out.read_text().splitlines()]
    numbers = [row["row"] for row in rows]
    assert (numbers if options.order == "input" else sorted(numbers)) == list(range(_ROWS))
    assert all(len(row["text"]) == _WIDE for row in rows)
    assert sorted(path.name for path in out.parent.iterdir()) == [out.name, f"{out.name}.job.json"]


@cache
def cannot() -> str | None:
    """Returns the reason why this machine cannot run the figure; None if it can."""
    if not sys.platform.startswith("linux"):
        return "a tmpfs is Linux's"
    if os.geteuid() != 0:
        return "only root may mount a tmpfs"
    done = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
    return None if done.returncode == 0 else f"this machine lets root mount no tmpfs: {done.stderr.strip()}"


@contextmanager
def _tmpfs(folder: Path, size: str) -> Iterator[Path]:
    if why := cannot():
        pytest.skip(why)
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)
        disk.rmdir()


def _resize(disk: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)
