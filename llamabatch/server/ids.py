"""Ids of responses and of requests in the log: they tell answers apart and guard nothing, so they may be guessed.

Random bytes of the system would cost more than all else of a short answer: other threads run first after that call.
"""

from __future__ import annotations

import random

from llamabatch.utils.lifetime import in_forks

_random = random.Random()  # no seed of a program that this one is part of


def random_hex(n_bytes: int = 12) -> str:
    """Hexadecimal digits, two for each byte."""
    return f"{_random.getrandbits(8 * n_bytes):0{2 * n_bytes}x}"


@in_forks
def _other_ids() -> None:
    _random.seed()
