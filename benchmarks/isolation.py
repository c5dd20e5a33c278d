"""The cost of isolation: the engine in a child process beside one in the calling process.

    python -m benchmarks.isolation [--pairs N] [--workload NAME]... [--json FILE]

It measures as benchmarks/ab.py does; the ratio is isolate=True over isolate=False.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from benchmarks import places
from benchmarks.pairs import Side, compare, options

COMPARED = ("burst", "tiny")
MOST_LOSS = 0.03  # largest loss of throughput, as a share, on the burst workload


@click.command()
@options
def main(**given: Any) -> None:
    """Measure isolate=True beside isolate=False, alternating."""
    python = Path(sys.executable)
    sides = (Side("isolated", places.ROOT, python, {"isolate": True}), Side("here", places.ROOT, python))
    compare(lambda: sides, COMPARED, "python -m benchmarks.isolation", most_loss=MOST_LOSS, **given)


if __name__ == "__main__":
    main()
