"""Ids of responses and of requests in the log. The ids need not be secret, because they only distinguish responses.

The ids do not come from `os.urandom`, which releases the interpreter lock. Other threads could then take the lock and
delay short responses.
"""

from __future__ import annotations

import random
from contextvars import ContextVar

from llamabatch.utils.lifetime import in_forks

current_id: ContextVar[str | None] = ContextVar("llamabatch.request_id", default=None)
"""The id of the current request in its headers and in the log; None outside of a request."""

_random = random.Random()  # unaffected if the host program seeds `random`


def random_hex(n_bytes: int = 12) -> str:
    """Returns random hexadecimal digits, two for each byte."""
    return f"{_random.getrandbits(8 * n_bytes):0{2 * n_bytes}x}"


@in_forks
def _other_ids() -> None:
    _random.seed()
