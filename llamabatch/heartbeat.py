"""How a child process is, as its parent sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heartbeat:
    """One child process.

    Attributes:
        pid: of the present process; None while there is none.
        up: it takes requests; False while one that died is being replaced.
        silent_s: seconds since it last gave a sign of life; it gives one a second at least. None before the first.
        last_token_s: seconds since its engine last brought a token; None before the first.
        restarts: processes that took the place of one that died.
    """

    pid: int | None
    up: bool
    silent_s: float | None
    last_token_s: float | None
    restarts: int
