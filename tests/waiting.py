"""Waits for other threads and processes. Tests give no times: the limit of all waits only ends those that never
succeed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from tests.paced import PATIENCE_S

__all__ = ["PATIENCE_S", "until", "until_soon"]

T = TypeVar("T")


def until(holds: Callable[[], T], about: object = None) -> T:
    """Calls `holds` again and again, and returns its first true value.

    Args:
        holds: the condition.
        about: more information for the failure, if `holds` never becomes true; or a function that returns it.
    """
    give_up = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < give_up, _failure(found, about)
        time.sleep(0.002)
    return found


async def until_soon(holds: Callable[[], T], about: object = None) -> T:
    """Waits like `until`, but lets the event loop run meanwhile."""
    give_up = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < give_up, _failure(found, about)
        await asyncio.sleep(0.002)
    return found


def _failure(found: object, about: object) -> str:
    return f"not within {PATIENCE_S} s: {found!r} {about() if callable(about) else about or ''}"
