"""Measures the memory of a job with many rows, whose engine has no model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HOLDS = "a job of up to 1,000,000 rows, in either order, grows the process by at most 32 MiB over one of 2,000"
TOTAL = 4
QUICK = 1

_ROWS = (20_000, 20_000, 1_000_000, 1_000_000)
_MOST_BYTES = 32 * 2**20
_ROOT = Path(__file__).parents[2]

_PROGRAM = """
import resource, sys
sys.path.insert(0, sys.argv[4])
from tests.unit.jobs_fakes import FakeClient
from llamabatch.jobs import OutputOptions, Settings, job, run
job.connect = lambda config: FakeClient(kept=0)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
first, whole, order = sys.argv[1:4]
grown = []
for source in (first, whole):
    summary = run(Settings(source, source + ".out", writing=OutputOptions(order=order)))
    grown.append(peak())
print(summary.counts.ok, grown[1] - grown[0])
"""


def case(number: int, folder: Path) -> None:
    """Lets a process of its own run a small job and then a large one. Odd numbers write rows as they finish."""
    files = [_rows(folder / name, n) for name, n in (("first.jsonl", 2000), ("whole.jsonl", _ROWS[number]))]
    order = ("input", "finished")[number % 2]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *map(str, files), order, str(_ROOT)],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ok, grown = map(int, done.stdout.split())
    assert ok == _ROWS[number]
    with Path(f"{files[1]}.out").open(encoding="utf-8") as out:
        numbers = [json.loads(line)["row"] for line in out]
    assert sorted(numbers) == list(range(ok))
    assert order == "finished" or numbers == list(range(ok))
    for path in folder.glob("*.jsonl*"):
        path.unlink()
    assert grown <= _MOST_BYTES, f"{grown} bytes more for {ok} rows"


def _rows(path: Path, n_rows: int) -> Path:
    with path.open("w") as file:
        for i in range(n_rows):
            line = {"prompt": f"What is the capital of country {i}?" + " more" * (i % 10), "max_tokens": 1 + i % 16}
            file.write(json.dumps(line) + "\n")
    return path
