"""The link of a child program to its parent: messages, and the end of this process when the parent ends."""

from __future__ import annotations

import os
import queue
import threading
from typing import Any

from llamabatch.client.child_socket import connected
from llamabatch.client.wire import Wire
from llamabatch.utils.lifetime import end_with_parent, leave_signals_to_parent


class ParentLink:
    """The child's end of the wire. A thread of its own reads it, and so notices the end of the parent at once, also
    during a load or a step. This process then exits without finishing its work.

    Messages wait here until `receive`, so that a child never blocks a parent that sends.

    Args:
        number: the argument of this program.
    """

    def __init__(self, number: int) -> None:
        leave_signals_to_parent()
        end_with_parent()  # in case this process is stopped, or never gets to read
        self._wire = Wire(connected(number))
        self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="llamabatch-parent", daemon=True).start()

    def receive(self) -> tuple[Any, ...]:
        """Waits for the next message and returns it."""
        return self._messages.get()

    def send(self, *message: Any) -> None:
        """Sends a message, as Wire.send does."""
        self._wire.send(*message)

    def _read(self) -> None:
        while (message := self._wire.receive()) is not None:
            self._messages.put(message)
        os._exit(1)
