"""A counter that threads decrement together. It imports only the standard library, since child programs use it."""

from __future__ import annotations

import threading


class Countdown:
    """An event `done` that is set after `n` calls of `less`, at once if `n` is 0."""

    def __init__(self, n: int) -> None:
        self.done = threading.Event()
        self._left = n
        self._lock = threading.Lock()
        if n == 0:
            self.done.set()

    def less(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.done.set()
