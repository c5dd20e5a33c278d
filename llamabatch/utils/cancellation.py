"""Cancels the load of a model: the caller that waits for the model sets an event, and the loading thread polls it."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from threading import Event
from typing import TypeVar

from llamabatch.errors import EngineClosedError

LOOK_S = 0.1  # seconds between two polls of the events while a load waits
T = TypeVar("T")

_events: ContextVar[tuple[Event, ...]] = ContextVar("llamabatch_cancellation", default=())


@contextlib.contextmanager
def cancelled_by(event: Event) -> Iterator[None]:
    """Lets an event cancel the loads in the block. The events of outer blocks cancel these loads, too."""
    token = _events.set((*_events.get(), event))
    try:
        yield
    finally:
        _events.reset(token)


def can_be_cancelled() -> bool:
    """Returns True within a cancelled_by block."""
    return bool(_events.get())


def is_cancelled() -> bool:
    """Returns True if the current load should end."""
    return any(event.is_set() for event in _events.get())


def result_of(future: Future[T]) -> T:
    """Waits for a future's result or exception. Raises EngineClosedError if the current load is cancelled."""
    while can_be_cancelled() and not future.done():
        if is_cancelled():
            raise EngineClosedError("the load was cancelled")
        concurrent.futures.wait([future], LOOK_S)
    return future.result()
