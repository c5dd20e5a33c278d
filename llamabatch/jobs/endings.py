"""What a job keeps beside its output: the endings that the output's name gets."""

from __future__ import annotations

import re
from pathlib import Path

MANIFEST = ".job.json"
AHEAD = ".ahead"
PART = ".part"
SUMS = ".sums"
LOCK = ".lock"
RESCUED = ".rescued"
ALL = (MANIFEST, AHEAD, PART, SUMS, LOCK, RESCUED)
TEMPORARY = re.compile(r"\.[0-9a-f]{8}\.tmp$")
LONGEST = 13  # characters of an ending: of a manifest in being, of lines that wait beside a Parquet file's


def temporary(out: Path, job_id: str) -> Path:
    """Where a file of a job is written before it is renamed: in the same folder, so that a rename is enough, and under
    a name that holds a part of the job's id, so that nothing else has it."""
    return out.with_name(f"{out.name}.{job_id[:8]}.tmp")


def shortened(name: str) -> str | None:
    """The name of the output that a file of this name may be kept beside; None: it has no such ending."""
    if match := TEMPORARY.search(name):
        return name[: match.start()] or None
    return next((name.removesuffix(each) for each in ALL if name.endswith(each)), "") or None
