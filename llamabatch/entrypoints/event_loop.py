"""Connects event loops with the threads of a model: Load loads the model, and Call submits requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from llamabatch.client.connect import connect
from llamabatch.client.front_client import FrontClient
from llamabatch.config import EngineConfig
from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission
from llamabatch.request.outputs import SequenceOutput
from llamabatch.utils.cancellation import cancelled_by

Download = Callable[[], Path]
Prepare = Callable[[InputProcessor], Submission]


class Load:
    """The load of a model, on a worker's thread. It has no reference to its AsyncLLM. So Python can collect an unused
    AsyncLLM, and the finalizer of the AsyncLLM cancels the load.

    Attributes:
        connect: returns the client; subclasses of AsyncLLM replace it.
        download: fetches a model from the hub and returns its file, for `connect`.
        client: the client of the loaded model. It is not the result of the load's future, because a cancelled task
            leaves that future in a reference cycle of asyncio.
        cancelled: once set, ends this load and any later load.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.connect: Callable[[EngineConfig, Download | None], FrontClient] = _connect
        self.download: Download | None = None
        self.client: FrontClient | None = None
        self.cancelled = threading.Event()
        self._config = config

    def run(self) -> None:
        """Loads the model. Raises the errors of `connect`."""
        with cancelled_by(self.cancelled):
            self.client = self.connect(self._config, self.download)


def _connect(config: EngineConfig, download: Download | None) -> FrontClient:
    return connect(config if download is None else replace(config, model=os.fspath(download())))


async def ended(loading: Future[None]) -> None:
    """Waits until a load has ended, with or without an error. Several tasks may wait, and cancelling them does not stop
    the load. The tasks wait for an event. If they waited for the future, asyncio would log an error of the load
    after a task was cancelled.
    """
    loop = asyncio.get_running_loop()
    has_ended = asyncio.Event()

    def tell(_: Future[None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(has_ended.set)

    loading.add_done_callback(tell)
    await has_ended.wait()


class Call:
    """The requests of one call. Passes their events from the engine's thread to the event loop of the caller.

    Attributes:
        events: the events of the requests, for the loop.
        left: True once the caller no longer waits.
    """

    def __init__(self, client: FrontClient, loop: asyncio.AbstractEventLoop, prepare: Prepare, stream: bool) -> None:
        self.events: asyncio.Queue[list[SequenceOutput]] = asyncio.Queue()
        self.left = False
        self._client = client
        self._loop = loop
        self._prepare = prepare
        self._stream = stream
        self._submission: Submission | None = None

    @property
    def done(self) -> bool:
        """True once every request has ended."""
        return self._submission is not None and self._submission.done

    def start(self) -> Submission:
        """Makes the requests and submits them. Runs on a worker's thread."""
        with self._client.awake():
            submission = self._prepare(InputProcessor(self._client, lambda: self.left, self._client.next_seed))
        if not self.left:
            self._submission = submission
            self._client.submit(submission.requests, self._emit, stream=self._stream)
            if submission.refused:
                self._client.count_refused(submission.refused)
        if self.left:  # the caller left during the submission, so Call.abort may have run too early
            self.abort()
        return submission

    def abort(self) -> None:
        """Aborts the requests that have not ended. Runs on any thread except the event loop's."""
        if self._submission is not None:
            self._client.abort(self._submission.unfinished)

    def _emit(self, events: list[SequenceOutput]) -> None:
        """Passes events to the loop. Runs on a thread of the client."""
        if self.left:
            return
        try:
            self._loop.call_soon_threadsafe(self.events.put_nowait, events)
        except RuntimeError:  # the loop was closed before its tasks had ended
            self.left = True
            self.abort()
