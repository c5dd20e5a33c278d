"""Reading ahead of a loop that must not wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_ROWS_AHEAD = 64


class Ahead(Generic[T]):
    """An iterator over what a slow one gives, such as a terminal or a pipe: None where there is nothing yet.

    A thread of its own waits for the input. Nobody waits for that thread: it may be blocked for ever.
    """

    def __init__(self, slow: Iterator[T]) -> None:
        self._ready: queue.Queue[tuple[T | None, Exception | None]] = queue.Queue(_ROWS_AHEAD)
        self._thread = threading.Thread(target=self._read, args=(slow,), name="llamabatch-input", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T | None]:
        return self

    def __next__(self) -> T | None:
        try:
            item, error = self._ready.get_nowait()
        except queue.Empty:
            return None
        if error is not None:
            self._ready.put((None, error))  # whoever asks again gets the same answer
            raise error
        return item

    def _read(self, slow: Iterator[T]) -> None:
        try:
            for item in slow:
                self._ready.put((item, None))
        except Exception as error:
            self._ready.put((None, error))
        else:
            self._ready.put((None, StopIteration()))
