"""One child process with an engine in it, seen from the parent."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from llamabatch import errors
from llamabatch.client import Sink, failure, tell
from llamabatch.config import EngineConfig
from llamabatch.errors import EngineClosedError, EngineError, InputError
from llamabatch.lifetime import Home
from llamabatch.llama.model import Model
from llamabatch.request import Request, SequenceOutput
from llamabatch.stats import EngineStats
from llamabatch.wire import Wire, check_crosses, pack_config, pack_request, unpack_output

logger = logging.getLogger(__name__)

WORKER = "llamabatch.worker"
_CLOSE_TIMEOUT_S = 20.0  # a step that is under way may take that long on a slow machine; then it is killed
_REQUESTS_A_MESSAGE = 256  # keeps messages far below the wire's limit, however long the list
# The child imports what the parent would, and nothing that happens to lie in the working directory.
_START = "import sys; sys.path[:] = sys.argv[3:]; import runpy; runpy.run_module(sys.argv[2], run_name='__main__')"


@dataclass
class _Pending:
    request: Request
    sink: Sink


class Child:
    """The process, and the thread that reads from it. Holds no reference to its client.

    Args:
        config: without "auto".
        environment: variables in addition to this process's.
        program: the module that the child runs; it speaks the wire.
    """

    def __init__(self, config: EngineConfig, environment: dict[str, str], program: str = WORKER) -> None:
        self.alive = True
        self._dropped = False
        self._home = Home()
        self._pending: dict[str, _Pending] = {}
        self._questions: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), program, *sys.path],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the parent alone, which decides what it means
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # stdout belongs to the parent's answer
                env=os.environ | environment,
            )
        self.pid = self._process.pid
        self._wire = Wire(ours)
        self._reader = threading.Thread(target=self._read, name=f"llamabatch-child-{self.pid}", daemon=True)
        with contextlib.suppress(OSError):  # it ended at once; wait_until_ready says so
            self._wire.send("init", pack_config(config))

    def wait_until_ready(self) -> None:
        """Raises what the child raised while it started."""
        message = self._wire.receive()
        if message is None:
            self.alive = False
            raise EngineError(f"the engine process ended while it started: {self._how_it_ended()}")
        if message[0] == "failed":
            self.alive = False
            raise getattr(errors, message[1], EngineError)(message[2])
        self._reader.start()

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        """As EngineClient.submit."""
        self._home.check()
        refused, fresh = [], []
        with self._lock:
            if not self.alive:
                raise EngineClosedError("the engine process is gone")
            for request in requests:
                try:
                    check_crosses(request)
                    if request.request_id in self._pending:
                        raise InputError(f"request id {request.request_id!r} is already in flight")
                except InputError as error:
                    refused.append(failure(request, str(error)))
                else:
                    self._pending[request.request_id] = _Pending(request, sink)
                    fresh.append(request)
        if refused:
            tell(sink, refused)
        try:
            for start in range(0, len(fresh), _REQUESTS_A_MESSAGE):
                part = fresh[start : start + _REQUESTS_A_MESSAGE]
                self._wire.send("submit", [pack_request(request) for request in part], stream)
        except OSError:
            pass  # it just died: the reader tells everybody who waits
        except BaseException:
            with self._lock:
                for request in fresh:
                    self._pending.pop(request.request_id, None)
            raise

    def abort(self, request_ids: Iterable[str]) -> None:
        if self._home.is_here:
            with contextlib.suppress(OSError):
                self._wire.send("abort", list(request_ids))

    def stats(self) -> EngineStats:
        """As EngineClient.stats."""
        return EngineStats.from_wire(self.ask("stats"))

    def save_prefix(self, token_ids: list[int], path: str) -> bool:
        return bool(self.ask("save_prefix", token_ids, path))

    def load_prefix(self, path: str) -> int:
        return int(self.ask("load_prefix", path))

    def unload_prefix(self, path: str) -> None:
        self.ask("unload_prefix", path)

    def ask(self, kind: str, *arguments: Any) -> Any:
        """Sends a message that has an answer, and waits for it. Raises what the child refuses it with."""
        self._home.check()
        answer: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if not self.alive:
                raise EngineClosedError("the engine process is gone")
            self._questions[number] = answer
        with contextlib.suppress(OSError):  # it just died: the reader answers
            self._wire.send(kind, number, *arguments)
        return answer.result()

    def ask_to_end(self) -> None:
        """Returns at once: a child that hangs with a full pipe would block the sender."""

        def send() -> None:
            with contextlib.suppress(OSError):  # it may have ended already
                self._wire.send("close")

        threading.Thread(target=send, daemon=True).start()

    def wait(self, deadline: float) -> None:
        """Until it has ended, or time.monotonic() reaches the deadline."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """Kills it if it still runs, and leaves nothing behind."""
        self._process.kill()
        self._process.wait()
        self.alive = False
        self._wire.close()
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            self._reader.join()

    def drop(self) -> None:
        """Kills it and waits for nobody; the reading thread clears up."""
        self._dropped = True
        self._process.kill()

    @property
    def ended(self) -> bool:
        return not self.alive and not self._reader.is_alive()

    def _read(self) -> None:
        try:
            while (message := self._wire.receive()) is not None:
                self._obey(message)
        except Exception:
            logger.exception("the stream from the engine process is damaged")
            self._process.kill()
        finally:
            self._answer_all()
            if self._dropped:
                self._wire.close()

    def _obey(self, message: list[Any]) -> None:
        if message[0] == "outputs":
            self._deliver(message[1])
        elif message[0] == "answer":
            self._question(message[1]).set_result(message[2])
        elif message[0] == "refused":
            self._question(message[1]).set_exception(getattr(errors, message[2], EngineError)(message[3]))
        else:
            raise EngineError(f"the engine process sent {message[0]!r}")

    def _question(self, number: int) -> Future[Any]:
        with self._lock:
            return self._questions.pop(number)

    def _deliver(self, packed: list[list[Any]]) -> None:
        by_sink: dict[int, tuple[Sink, list[SequenceOutput]]] = {}
        with self._lock:
            for item in packed:
                pending = self._pending.get(item[0])
                if pending is None:
                    continue  # its submit was interrupted
                output = unpack_output(item, pending.request)
                if output.finished is not None:
                    del self._pending[output.request_id]
                by_sink.setdefault(id(pending.sink), (pending.sink, []))[1].append(output)
        for sink, outputs in by_sink.values():
            tell(sink, outputs)

    def _answer_all(self) -> None:
        """It is gone: nobody may wait for ever."""
        with self._lock:
            self.alive = False
            lost, self._pending = list(self._pending.values()), {}
            questions, self._questions = list(self._questions.values()), {}
        reason = f"the engine process ended: {self._how_it_ended()}"
        for pending in lost:
            tell(pending.sink, [failure(pending.request, reason)])
        for question in questions:
            question.set_exception(EngineClosedError(reason))

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class Children:
    """Child processes and the parent's vocabulary, ended together: an Endable."""

    def __init__(self, model: Model) -> None:
        self.list: list[Child] = []
        self._model = model

    def start(self, config: EngineConfig, environment: dict[str, str], program: str = WORKER) -> None:
        """One more; the arguments are those of Child."""
        self.list.append(Child(config, environment, program))

    def drop(self) -> None:
        for child in self.list:
            child.drop()

    def end(self) -> None:
        """Waits for steps that are under way; interrupted, it kills instead."""
        try:
            for child in self.list:
                child.ask_to_end()
            deadline = time.monotonic() + _CLOSE_TIMEOUT_S
            for child in self.list:
                child.wait(deadline)
        finally:
            self.kill()

    def kill(self) -> None:
        """Does not wait, for children that are still loading."""
        for child in self.list:
            child.end()
        self._model.close()

    @property
    def ended(self) -> bool:
        return all(child.ended for child in self.list)
