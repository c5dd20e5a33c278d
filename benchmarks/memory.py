"""Compares the memory that a plan predicts with the measured peak: `python -m benchmarks.memory`.

Writes benchmarks/results/memory.json. The cases are those of tests/long/memory_prediction.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.facts import command_line, facts
from benchmarks.places import ROOT
from tests.long.memory_prediction import TOTAL, figure

_MIB = 2**20


def main() -> None:
    """Runs the cases one after another, each in a process of its own; the largest needs about 3 GiB."""
    found = []
    for number in range(TOTAL):
        with tempfile.TemporaryDirectory() as folder:
            found.append(figure(number, Path(folder)))
        last = found[-1]
        print(
            f"{last['model']:24} {last['n_slots']:3} slots: {last['measured'] / _MIB:8,.0f} MiB measured, "
            f"{last['predicted'] / _MIB:8,.0f} predicted, {last['ratio']:.3f}",
            file=sys.stderr,
            flush=True,
        )
    document = {**facts(command_line("python -m benchmarks.memory")), "cases": found}
    target = ROOT / "benchmarks" / "results" / "memory.json"
    target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
