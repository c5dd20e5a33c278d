"""What ends a job before its time: Ctrl-C, SIGTERM, a closed terminal."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from llamabatch import interrupts


class Stop:
    """Whether a job shall end, and for which signal.

    While a job runs, a signal only leaves its number here and wakes the loop, which ends in good order: an exception in
    the middle of a write would not. While the engine loads or closes, there is nothing to lose, and nobody who would
    look here: then a signal raises KeyboardInterrupt, at once or when no import is under way. So does the third one,
    wherever it comes.

    Attributes:
        signum: of the first signal; None: go on.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._n_signals = 0
        self._wake: Callable[[], object] | None = None

    def __bool__(self) -> bool:
        return self.signum is not None

    def request(self, signum: int = signal.SIGINT) -> None:
        """As if the signal had come. Safe from signal handlers and from any thread."""
        if self.signum is None:
            self.signum = signum
        if self._wake is not None:
            self._wake()

    @contextlib.contextmanager
    def noted(self, wake: Callable[[], object]) -> Iterator[None]:
        """Inside, signals are noted and `wake` is called; outside, they raise KeyboardInterrupt."""
        self._wake = wake
        try:
            yield
        finally:
            self._wake = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the signals over; outside the main thread, where Python gives none, it does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # one that is ignored stays so: nohup means it
        taken: dict[int, Any] = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
        taken = {number: before for number, before in taken.items() if before not in (signal.SIG_IGN, None)}
        for number in taken:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, before in taken.items():
                signal.signal(number, before)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.request(signum)
        self._n_signals += 1
        if self._wake is None or self._n_signals > 2:
            if interrupts.is_delicate(frame, "llamabatch.jobs.job"):
                self._n_signals -= 1
                interrupts.send_again(signum)
            else:
                raise KeyboardInterrupt
