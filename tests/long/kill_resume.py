"""A job is killed at random moments, and started again each time."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil

from benchmarks.equality import LogitGap

HOLDS = (
    "kill -9 at 5 random moments of a 2,000-row job, 100 in 20 jobs: every id is in the output once, what was written "
    "stays as it was, no engine is left behind, and greedy text equals that of an unkilled run by the rule of equality"
)
TOTAL = 20
QUICK = 2

KILLS = 5
N_ROWS = 2000
MAX_GAP = 0.15  # as in tests/model/conftest.py
_HELDOUT = Path(__file__).parents[2] / "models" / "tiny" / "heldout.jsonl"
_PATIENCE_S = 300.0  # seconds, for a busy machine


def case(number: int, folder: Path, kills: int = KILLS, n_rows: int = N_ROWS) -> None:
    """Kills a job so many times, and starts it again each time. If the job is done before, another job is next.

    Even numbers write in the order of the input, odd numbers as rows finish.
    """
    rng = random.Random(number)
    order = ("input", "finished")[number % 2]
    source = folder / "in.jsonl"
    prompts = [json.loads(line)["messages"] for line in _HELDOUT.read_text(encoding="utf-8").splitlines()]
    lines = [{"id": f"row {i}", "messages": each[-1:]} for i, each in enumerate(islice(cycle(prompts), n_rows))]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole = folder / "whole.jsonl"
    start = time.monotonic()
    begun_s = _finish(_start(source, whole, order), whole) - start
    compute_s = time.monotonic() - start - begun_s
    wanted, got = _records(whole), folder / "killed.jsonl"
    assert len(wanted) == n_rows
    killed = 0
    while killed < kills:
        left = 1.0 - len(_lines(got)) / n_rows
        killed += _run_and_kill(source, got, order, rng.uniform(0, begun_s + left * compute_s))
        if (code := _exit_code(got)) is not None and killed < kills:  # done before the kill: the next job
            assert code == 0
            _compare(_records(got), wanted)
            for file in (got, _manifest(got)):
                file.unlink()
    done = subprocess.run(
        _command(source, got, order), capture_output=True, text=True, timeout=_PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    _compare(_records(got), wanted)
    assert sorted(path.name for path in folder.glob("killed*")) == [got.name, _manifest(got).name]


def _command(source: Path, out: Path, order: str) -> list[str]:
    options = ["-t", "0", "-n", "8", "--token-ids", "--order", order]
    return [sys.executable, "-m", "llamabatch", "run", str(source), str(out), *options]


def _start(source: Path, out: Path, order: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(_command(source, out, order), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _finish(process: subprocess.Popen[bytes], out: Path) -> float:
    """Waits for the end of the process. Returns the time at which the first rows came."""
    until = time.monotonic() + _PATIENCE_S
    while not (out.exists() and out.stat().st_size) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    begun = time.monotonic()
    assert process.wait(_PATIENCE_S) == 0
    return begun


def _run_and_kill(source: Path, out: Path, order: str, after_s: float) -> int:
    """Runs the job for `after_s` seconds, and kills it. Returns 1 if it was killed, 0 if it had ended before."""
    process = _start(source, out, order)
    try:
        process.wait(after_s)
        assert process.returncode == 0
        return 0
    except subprocess.TimeoutExpired:
        engines = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    written = _lines(out)
    until = time.monotonic() + _PATIENCE_S
    while any(map(_computes, engines)):
        assert time.monotonic() < until, "an engine outlives its parent"
        time.sleep(0.01)
    assert _lines(out) == written
    _written[out] = written
    return 1


def _computes(process: psutil.Process) -> bool:
    """Returns True if the process lives. A zombie does not: its new parent may take seconds to reap it."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


_written: dict[Path, list[bytes]] = {}  # by output: its whole lines at the last kill


def _lines(out: Path) -> list[bytes]:
    """Returns the whole lines of an output."""
    lines = out.read_bytes().splitlines(keepends=True) if out.exists() else []
    return [line for line in lines if line.endswith(b"\n")]


def _manifest(out: Path) -> Path:
    return out.with_name(out.name + ".job.json")


def _exit_code(out: Path) -> int | None:
    """Returns the exit code that the job's manifest implies; None if the job has not ended."""
    ending = json.loads(_manifest(out).read_text())["ending"] if _manifest(out).exists() else None
    return None if ending is None else int(ending["errors"] > 0)


def _records(out: Path) -> dict[str, dict[str, Any]]:
    """Returns the records by id. Checks that the lines of the last kill are still there."""
    lines = _lines(out)
    before = _written.pop(out, [])
    assert lines[: len(before)] == before, "what was written has changed"
    records = [json.loads(line) for line in lines]
    found = {record["id"]: record for record in records}
    assert len(found) == len(records), f"{len(records)} lines, {len(found)} ids"
    return found


def _compare(got: dict[str, dict[str, Any]], wanted: dict[str, dict[str, Any]]) -> None:
    """Compares the records by the rule of equality."""
    assert set(got) == set(wanted)
    differing = [name for name in wanted if got[name]["token_ids"] != wanted[name]["token_ids"]]
    assert len(differing) <= 0.01 * len(wanted), f"{len(differing)} texts differ"
    assert all(got[name] == wanted[name] for name in set(wanted) - set(differing))
    gap = LogitGap()
    try:
        for name in differing:
            assert gap(_before_parting(gap, name, got[name]["token_ids"], wanted[name]["token_ids"])) < MAX_GAP, name
    finally:
        gap.close()


def _before_parting(gap: LogitGap, name: str, one: list[int], other: list[int]) -> tuple[int, ...]:
    """Returns the tokens of the prompt, and of the output up to the place where two outputs part."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    row = int(name.removeprefix("row "))
    prompts = _HELDOUT.read_text(encoding="utf-8").splitlines()
    messages = json.loads(prompts[row % len(prompts)])["messages"][-1:]
    return (*gap.prompt(messages), *one[:at])
