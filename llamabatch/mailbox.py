"""Commands of callers' threads to the thread that owns an engine.

A command is the mailbox's until the next one is fetched, so that one which could not be carried out to its end is
answered with those that still wait.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from llamabatch.engine import Engine
from llamabatch.errors import EngineClosedError
from llamabatch.lifetime import Home
from llamabatch.request import Request
from llamabatch.watch import Sink as Sink


@dataclass(frozen=True)
class Submit:
    requests: list[Request]
    sink: Sink
    stream: bool
    left: deque[Request] = field(init=False)  # not taken in yet

    def __post_init__(self) -> None:
        object.__setattr__(self, "left", deque(self.requests))


@dataclass(frozen=True)
class Abort:
    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    ask: Callable[[Engine], Any]
    answer: Future[Any]


Command = Submit | Abort | Question


class Mailbox:
    """Commands for the engine's thread. After `shut` none gets in, so that none is left unanswered."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._home = Home()
        self._shut_because: str | None = None
        self._current: Command | None = None  # being carried out
        self._n_put = 0  # continuations that came in, and of those how many
        self._n_taken = 0  # went on to the engine; each is counted by one side, so that neither waits for the other

    @property
    def n_waiting(self) -> int:
        """Continuations that the engine does not know of yet."""
        return max(0, self._n_put - self._n_taken)

    def took(self, request: Request) -> None:
        """The engine's thread has handed it on."""
        self._n_taken += request.params.n_copies

    def check_open(self) -> None:
        """Raises EngineClosedError if it is shut."""
        self._home.check()
        if self._shut_because is not None:
            raise EngineClosedError(self._shut_because)

    def put(self, command: Command) -> None:
        """Raises EngineClosedError once it is shut."""
        self._home.check()
        with self._lock:
            if self._shut_because is not None:
                raise EngineClosedError(self._shut_because)
            if isinstance(command, Submit):
                self._n_put += sum(request.params.n_copies for request in command.requests)
            self._queue.put(command)

    def put_end(self) -> None:
        """The engine's thread ends when it comes to this."""
        self._queue.put(None)

    def get(self, wait_s: float | None) -> Command | None:
        """The next command, None at the end. Raises queue.Empty if none comes in that time; None: waits for ever."""
        self._current = None
        self._current = self._queue.get(block=wait_s != 0, timeout=wait_s)
        return self._current

    @property
    def is_shut(self) -> bool:
        return self._shut_because is not None

    def shut(self, reason: str) -> list[Command]:
        """Lets nothing more in; returns what had come in before, from the command that was being carried out on."""
        with self._lock:
            self._shut_because = reason
        left: list[Command] = [] if self._current is None else [self._current]
        while not self._queue.empty():
            command = self._queue.get()
            if command is not None:
                left.append(command)
        return left
