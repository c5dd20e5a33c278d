"""What a job keeps beside its output: the endings that the output's name gets."""

from __future__ import annotations

MANIFEST = ".job.json"
AHEAD = ".ahead"
PART = ".part"
LOCK = ".lock"
TEMPORARY = ".tmp"
ALL = (MANIFEST, AHEAD, PART, LOCK, TEMPORARY)
