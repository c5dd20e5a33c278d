"""Makes contexts: Growth makes a larger one in a thread, and largest_context() makes one that fits into memory."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

from llamabatch.config import ResolvedConfig
from llamabatch.errors import EngineError
from llamabatch.llama.context import Context
from llamabatch.llama.model import Model

logger = logging.getLogger(__name__)

# With this niceness the thread gets a quarter of a core while other threads compute. The thread then needs some seconds
# to zero the cells of 32 slots of a model with 0.5B parameters.
_NICENESS = 5


class Growth:
    """Makes a larger context in a separate thread while the steps go on. On Linux, this thread has a lower priority
    than the threads that compute."""

    def __init__(self, make: Callable[[], Context]) -> None:
        self._made: Future[Context] = Future()
        self._make = make
        threading.Thread(target=self._run, name="llamabatch-growth", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._made.done()

    def context(self) -> Context:
        """Waits for the context. Raises EngineError if llama.cpp cannot make it."""
        return self._made.result()

    def end(self) -> None:
        """Waits for the context and closes it, because it is no longer needed."""
        if self._made.exception() is None:
            self._made.result().close()

    def _run(self) -> None:
        try:
            if sys.platform == "linux":
                with contextlib.suppress(OSError):
                    thread = threading.get_native_id()
                    nice = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
            self._made.set_result(self._make())
        except BaseException as error:
            self._made.set_exception(error)


def largest_context(model: Model, config: ResolvedConfig, n_slots: int) -> Context:
    """Makes a context of n_slots slots, or halves this number until the memory suffices.

    Raises:
        EngineError: the error for n_slots slots, if a context of one slot cannot be made either.
    """
    first: EngineError | None = None
    slots = n_slots
    while True:
        try:
            context = Context(model, config, slots)
        except EngineError as error:
            first = first or error
            if slots == 1:
                raise first from None
            slots //= 2
            continue
        if first is not None:
            logger.warning("%s; continuing with %d slot(s)", first, slots)
        return context
