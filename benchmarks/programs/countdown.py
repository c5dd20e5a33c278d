"""A count that threads take down together. Standard library only: child programs use it, too."""

from __future__ import annotations

import threading


class Countdown:
    """`done` is set once `less` was called so often, at once for 0."""

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
