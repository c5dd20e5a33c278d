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
    """The child's end of the wire, read on a thread of its own, so that the end of the parent is seen at once, also
    during a load or a step: this process then ends without any care for its work.

    Messages wait here until `receive`, so that a parent is never held up by a child that it sends to.

    Args:
        number: the argument of this program.
    """

    def __init__(self, number: int) -> None:
        leave_signals_to_parent()
        end_with_parent()  # for a process that is stopped, or never comes to read
        self._wire = Wire(connected(number))
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
