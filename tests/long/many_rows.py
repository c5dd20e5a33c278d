"""Measures the memory that the reader of a job takes for many rows with ids."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HOLDS = "reading up to 1,000,000 rows grows the process by at most 32 MiB and 64 bytes a row, which are its id"
TOTAL = 4
QUICK = 1

_ROWS = (50_000, 200_000, 500_000, 1_000_000)
_BASE = 32 * 2**20
_A_ROW = 64

_PROGRAM = """
import resource, sys
from llamabatch.jobs.input.reader import read
from llamabatch.jobs.input.sources import find
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before = peak()
count = sum(row.number == i and row.id == f"row {i}" for i, row in enumerate(read(find(sys.argv[1:]))))
print(count, peak() - before)
"""


def case(number: int, folder: Path) -> None:
    """Lets a process of its own read a file with this case's number of rows."""
    n_rows = _ROWS[number]
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for i in range(n_rows):
            line = {
                "id": f"row {i}",
                "prompt": f"What is the capital of country {i}?" + " more" * (i % 50),
                "seed": i % 3,
            }
            file.write(json.dumps(line) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(path)], capture_output=True, text=True, timeout=600, check=False
    )
    path.unlink()
    assert done.returncode == 0, done.stderr
    count, grown = map(int, done.stdout.split())
    assert count == n_rows
    assert grown <= _BASE + _A_ROW * n_rows, f"{grown} bytes for {n_rows} rows"
