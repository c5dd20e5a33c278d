"""The counts of requests, in front of all engines: right whatever became of an engine, or of a child process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

from llamabatch.client import EngineClient, Sink, said_only
from llamabatch.lifetime import Home
from llamabatch.passing_client import PassingClient
from llamabatch.request import Request, SequenceOutput
from llamabatch.stats import EngineStats
from llamabatch.tallies import RequestCounts


class CountingClient(PassingClient):
    """Counts what is submitted, and each request once when it ends, before its caller knows of it."""

    def __init__(self, client: EngineClient) -> None:
        super().__init__(client)
        self._counts = RequestCounts()
        self._at_close: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._home = Home()

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        self._home.check()
        left = len(requests)  # of this call
        with self._lock:
            self._counts.submitted += left

        def tell(outputs: list[SequenceOutput]) -> None:
            nonlocal left
            ended = [output for output in outputs if output.finished is not None]
            if ended:
                with said_only("the counts of requests are off from here on"), self._lock:
                    if left:
                        self._counts.note(ended)
                        left -= len(ended)
            sink(outputs)

        try:
            self.behind.submit(requests, tell, stream=stream)
        except BaseException:  # nothing was taken in; interrupted, some may have ended already
            with self._lock:
                self._counts.submitted -= left
                left = 0
            raise

    def note_refused(self, outputs: list[SequenceOutput]) -> None:
        """Prompts of a call that were wrong, and ended before they were requests: submitted, and ended by an error."""
        with self._lock:
            self._counts.submitted += len(outputs)
            self._counts.note(outputs)

    def stats(self) -> EngineStats:
        """As EngineClient.stats; may be called from a sink."""
        self._home.check()
        with self._lock:
            counts = self._counts.figures()  # first, so that nothing that has ended still runs by what an engine says
        return replace(self.behind.stats(), **counts)

    def at_close(self, action: Callable[[], None]) -> None:
        """Has this method of an object called before the engines are closed, once; the object is not kept alive."""
        self._at_close = [other for other in self._at_close if other() is not None]
        self._at_close.append(weakref.WeakMethod(action))

    def close(self) -> None:
        while self._at_close:
            action = self._at_close.pop()()
            if action is not None:
                action()
        super().close()
