"""Waits for what another thread or process does. No test says how long that takes: patience is for what never comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from tests.paced import PATIENCE_S

__all__ = ["PATIENCE_S", "until", "until_soon"]

T = TypeVar("T")


def until(holds: Callable[[], T], about: object = None) -> T:
    """What `holds` says once it is true.

    Args:
        holds: is asked again and again.
        about: says more where it never becomes true; a function is called then.
    """
    give_up = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < give_up, _failure(found, about)
        time.sleep(0.002)
    return found


async def until_soon(holds: Callable[[], T], about: object = None) -> T:
    """As `until`, while the event loop goes on."""
    give_up = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < give_up, _failure(found, about)
        await asyncio.sleep(0.002)
    return found


def _failure(found: object, about: object) -> str:
    return f"not within {PATIENCE_S} s: {found!r} {about() if callable(about) else about or ''}"
