"""Ids of responses and of requests in the log: they tell answers apart and guard nothing, so they may be guessed.

They are no random bytes of the system: after that call other threads run first, which delays each short answer.
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
