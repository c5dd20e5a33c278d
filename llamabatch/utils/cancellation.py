"""Cancelling a load: the caller who waits for a model sets an event, the thread that loads looks at it now and then."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from threading import Event
from typing import TypeVar

from llamabatch.errors import EngineClosedError

LOOK_S = 0.1  # how often a load that waits for a process looks whether it was cancelled
T = TypeVar("T")

_events: ContextVar[tuple[Event, ...]] = ContextVar("llamabatch_cancellation", default=())


@contextlib.contextmanager
def cancelled_by(event: Event) -> Iterator[None]:
    """Lets an event cancel the loads within, beside those events that can already."""
    token = _events.set((*_events.get(), event))
    try:
        yield
    finally:
        _events.reset(token)


def can_be_cancelled() -> bool:
    """True within cancelled_by."""
    return bool(_events.get())


def is_cancelled() -> bool:
    """True if the load under way in this context is to end."""
    return any(event.is_set() for event in _events.get())


def result_of(future: Future[T]) -> T:
    """The result, waited for. Raises what the future has; EngineClosedError once the load under way is cancelled."""
    while can_be_cancelled() and not future.done():
        if is_cancelled():
            raise EngineClosedError("the load was cancelled")
        concurrent.futures.wait([future], LOOK_S)
    return future.result()
