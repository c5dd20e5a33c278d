"""Which seed a row draws with: of the job's seed and the row's number alone, so that a run that goes on draws alike."""

from __future__ import annotations

_MASK = 2**64 - 1


def seed_of(job_seed: int, number: int) -> int:
    """The number-th output of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)
    with the job's seed: 0 .. 2**64 - 1, without a pattern between neighbours."""
    z = (job_seed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
