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
    """The child's end of the wire. A separate thread reads messages and notices the end of the parent at once, even
    during a load or a step. This process then exits without finishing its work.

    Messages wait in this object until `receive`. A child therefore never blocks a parent that sends.

    Args:
        number: the only argument of this program; see child_socket.connected.
    """

    def __init__(self, number: int) -> None:
        leave_signals_to_parent()
        end_with_parent()  # also ends a process paused by SIGSTOP, whose reading thread cannot run
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
