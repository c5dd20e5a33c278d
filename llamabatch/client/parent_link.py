"""The parent, seen from a child program: its messages, and an end of this process when the parent ends."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from typing import Any

from llamabatch.client.wire import Wire
from llamabatch.utils.lifetime import end_with_parent


class ParentLink:
    """Reads in a thread of its own, so that the end of the parent is seen at once, also in the middle of a load or of a
    step: then this process ends without any care for what it was doing.

    What comes in is kept until `receive` asks for it: a parent that sends is never held up, and never holds up what is
    sent to it.
    """

    def __init__(self, fd: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what an interrupt means is the parent's to decide
        end_with_parent()  # where this process is stopped, or never comes to read
        self._wire = Wire(socket.socket(fileno=fd))
        self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="llamabatch-parent", daemon=True).start()

    def receive(self) -> tuple[Any, ...]:
        """The next message."""
        return self._messages.get()

    def send(self, *message: Any) -> None:
        """As Wire.send."""
        self._wire.send(*message)

    def _read(self) -> None:
        while (message := self._wire.receive()) is not None:
            self._messages.put(message)
        os._exit(1)
