"""Cancelling a load: the caller who waits for a model sets an event, the thread that loads looks at it now and then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from threading import Event

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
