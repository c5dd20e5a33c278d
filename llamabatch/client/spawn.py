"""The parent's side of a child process with an engine: the process, its wire, and the thread that reads the wire."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from llamabatch import errors
from llamabatch.client.base import Heartbeat
from llamabatch.client.child_socket import start_program
from llamabatch.client.wire import Wire, pack_config, pack_request
from llamabatch.config import EngineConfig
from llamabatch.errors import EngineClosedError, EngineError, SetupError, describe
from llamabatch.planning.binding_choice import for_children
from llamabatch.request.request import Request
from llamabatch.utils import system
from llamabatch.utils.subprogram import interpreter

logger = logging.getLogger(__name__)

WORKER = "llamabatch.client.worker"
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM")  # signals from other processes; a crash of native code ends with other signals
_VMSTAT = "/proc/vmstat"  # the kernel increases oom_kill here before it kills a process for lack of memory
_REQUESTS_A_MESSAGE = 256  # maximum; a message then stays far below the wire's size limit


class Listener(Protocol):
    """Callbacks of a child, called on the thread that reads from the child."""

    def on_ready(self, child: Child) -> None:
        """Called when the child has started."""

    def on_outputs(self, child: Child, packed: Sequence[Any]) -> None: ...

    def on_admitted(self, child: Child, request_ids: list[str]) -> None: ...

    def on_stats(self, child: Child, packed: dict[str, Any]) -> None:
        """Called with the counts of the child's engine since the start of the child."""

    def on_exit(self, child: Child) -> None:
        """Called when the child has ended and all its messages are delivered; see child.exit_reason."""


class Child:
    """A child process, and the thread that reads from it.

    Args:
        config: a config in which no option is "auto".
        environment: additional environment variables of the child.
        program: the module run by the child. It reads and writes the messages of wire.py.

    Attributes:
        ready: done when the child has started; its exception is the error of a failed start.
        exit_reason: a signal, an exit code, or the reason that the child sent before it ended; empty while it runs.
        n_received: number of messages from the child.
        received_s: time.monotonic() of the last message; None before the first.
        reader_is_busy: the reading thread runs a callback and cannot receive a message.
        has_beaten: the child has sent a heartbeat.
        from_outside: another process seems to have killed the child: the child did not crash, and the kernel did not
            kill it for lack of memory.
        last_token_s: time.monotonic() of the last token of its engine; None before the first.
    """

    def __init__(self, config: EngineConfig, environment: dict[str, str], program: str, listener: Listener) -> None:
        self.ready: Future[None] = Future()
        self.exit_reason = ""
        self.n_received = 0
        self.received_s: float | None = None
        self.last_token_s: float | None = None
        self.has_beaten = False
        self.reader_is_busy = False
        self.from_outside = False
        self._listener = listener
        self._sent_reason: str | None = None
        self._ended = False
        self._answers: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._oom_kills = oom_kills()
        try:
            interpreter()
        except OSError as error:
            raise SetupError(
                f"no child process can be started, as isolate=True and several engines need it: {error}"
            ) from error
        self._process, ours = start_program(program, os.environ | for_children() | environment)
        try:
            self.pid = self._process.pid
            self._wire = Wire(ours)
            with contextlib.suppress(OSError):  # the child has ended already; the reader reports this
                self._wire.send("init", pack_config(config))
            self._reader = threading.Thread(target=self._read, name=f"llamabatch-child-{self.pid}", daemon=True)
            self._reader.start()
        except BaseException:  # no thread can be started
            self._process.kill()
            self._process.wait()
            ours.close()
            raise

    def submit(self, requests: list[Request], *, stream: bool) -> dict[str, str]:
        """Sends requests. If sending fails, kills the child; on_exit is called once the child has ended.

        Returns:
            The errors of the requests that cannot be sent to any child, by request id.
        """
        refused: dict[str, str] = {}
        for start in range(0, len(requests), _REQUESTS_A_MESSAGE):
            part = requests[start : start + _REQUESTS_A_MESSAGE]
            try:
                packed = self._wire.pack("submit", [pack_request(request) for request in part], stream)
            except Exception as error:
                if len(part) == 1:
                    refused[part[0].request_id] = describe(error)
                else:
                    for request in part:
                        refused |= self.submit([request], stream=stream)
                continue
            self._send(packed)
        return refused

    def _send(self, packed: bytes) -> None:
        try:
            self._wire.send_packed(packed)
        except OSError:  # a child that still runs may have received half a message, so it must end
            self._process.kill()

    def abort(self, request_ids: list[str]) -> None:
        with contextlib.suppress(OSError):
            self._wire.send("abort", request_ids)

    def ask(self, kind: str, *arguments: Any) -> Future[Any]:
        """Sends a message. Returns the future of its answer: a value or error of the child, or EngineClosedError if the
        child ends."""
        answer: Future[Any] = Future()
        number = next(self._numbers)
        packed = self._wire.pack(kind, number, *arguments)
        with self._lock:
            if self._ended:
                raise EngineClosedError(f"the engine process ended: {self.exit_reason}")
            self._answers[number] = answer
        self._send(packed)  # if the child has just died, the reading thread ends the answer with an error
        return answer

    def heartbeat(self, up: bool, restarts: int) -> Heartbeat:
        """Returns the state of the child as this process knows it."""
        now = time.monotonic()
        silent_s = None if self.received_s is None else now - self.received_s
        last_token_s = None if self.last_token_s is None else now - self.last_token_s
        return Heartbeat(self.pid, up, silent_s, last_token_s, restarts)

    def ask_to_end(self) -> None:
        """Sends close to the child. Uses a new thread, because a hanging child with a full socket blocks the sender."""

        def send() -> None:
            with contextlib.suppress(OSError):  # the child may have ended already
                self._wire.send("close")

        threading.Thread(target=send, daemon=True).start()

    def kill(self, reason: str | None = None) -> None:
        """Kills the child and returns at once. `reason` becomes its exit_reason."""
        if reason is not None:
            self._sent_reason = reason
        self._process.kill()

    def end(self) -> None:
        """Kills the child if it still runs, and waits for its end. Must not be called on its reading thread."""
        self._process.kill()
        self._process.wait()
        self._wire.close()
        self._reader.join()

    def _read(self) -> None:
        try:
            while (message := self._wire.receive()) is not None:
                self.n_received += 1
                self.received_s = time.monotonic()
                self.reader_is_busy = True
                self._dispatch(message)
                self.reader_is_busy = False
        except Exception:
            logger.exception("the stream from the engine process is damaged")
            self._sent_reason = "the stream from it was damaged"
            self._process.kill()
        finally:
            self.reader_is_busy = True
            try:
                self._fail_answers()
            finally:
                self._listener.on_exit(self)

    def _dispatch(self, message: tuple[Any, ...]) -> None:
        kind = message[0]
        if kind == "outputs":
            self._listener.on_outputs(self, message[1])
        elif kind == "admitted":
            self._listener.on_admitted(self, message[1])
        elif kind == "beat":
            self.has_beaten = True
            if message[1] is not None:
                self.last_token_s = time.monotonic() - message[1]
        elif kind == "stats":
            self._listener.on_stats(self, message[1])
        elif kind == "answer":
            self._pop_answer(message[1]).set_result(message[2])
        elif kind == "refused":
            self._pop_answer(message[1]).set_exception(_error(message[2], message[3]))
        elif kind == "ready":
            self.ready.set_result(None)
            self._listener.on_ready(self)
        elif kind == "failed":
            self.ready.set_exception(_error(message[1], message[2]))
        elif kind == "dying":
            self._sent_reason = message[1]
        else:
            raise EngineError(f"the engine process sent {kind!r}")

    def _pop_answer(self, number: int) -> Future[Any]:
        with self._lock:
            return self._answers.pop(number)

    def _fail_answers(self) -> None:
        """Ends all awaited answers with an error, because the child has ended."""
        self.exit_reason = self._find_exit_reason()
        with self._lock:
            self._ended = True
            answers, self._answers = list(self._answers.values()), {}
        if not self.ready.done():
            self.ready.set_exception(EngineError(f"the engine process ended while it started: {self.exit_reason}"))
        for answer in answers:
            answer.set_exception(EngineClosedError(f"the engine process ended: {self.exit_reason}"))

    def _find_exit_reason(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return self._sent_reason or "it closed its socket"
        if self._sent_reason is not None:
            return self._sent_reason
        name = system.fatal_signal(code)
        self.from_outside = name in _FROM_OUTSIDE and self._oom_kills is not None and oom_kills() == self._oom_kills
        return name or f"exit code {code}"


def _error(name: str, text: str) -> Exception:
    error: Exception = getattr(errors, name, EngineError)(text)
    return error


def oom_kills() -> int | None:
    """Returns the number of processes killed by the kernel since boot because memory ran out. None if the kernel does
    not count them (Linux before 4.13, and all other systems).
    """
    lines = system.kernel_lines(_VMSTAT)
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
