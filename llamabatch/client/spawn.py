"""One child process with an engine in it, seen from the parent: the process, its wire, and the thread that reads it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from llamabatch import errors
from llamabatch.client.base import Heartbeat
from llamabatch.client.wire import Wire, pack_config, pack_request
from llamabatch.config import EngineConfig
from llamabatch.errors import EngineClosedError, EngineError, describe
from llamabatch.request.request import Request
from llamabatch.utils.subprogram import command

# ----------------------------------------------------------------------------------------------------
# How often the kernel has killed for want of memory.


_COUNTS = Path("/proc/vmstat")  # of the whole machine, containers included; the count rises before the signal is sent


def oom_kills() -> int | None:
    """Processes killed since the machine started; None where nobody tells (not Linux, or before 4.13)."""
    try:
        lines = _COUNTS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


logger = logging.getLogger(__name__)

WORKER = "llamabatch.client.worker"
_OF_OTHERS = (signal.SIGKILL, signal.SIGTERM)  # which no native code raises
_REQUESTS_A_MESSAGE = 256  # keeps messages far below the wire's limit, however long the list


class Listener(Protocol):
    """Who is told what a child says, on the child's reading thread."""

    def is_ready(self, child: Child) -> None:
        """It has started, or could not: see child.ready."""

    def has_outputs(self, child: Child, packed: list[list[Any]]) -> None: ...

    def has_admitted(self, child: Child, request_ids: list[str]) -> None: ...

    def has_stats(self, child: Child, packed: dict[str, Any]) -> None:
        """What its engine has counted so far."""

    def is_gone(self, child: Child) -> None:
        """It has ended, and all that it said has been told; see child.how."""


class Child:
    """The process, and the thread that reads from it.

    Args:
        config: without "auto".
        environment: variables in addition to this process's.
        program: the module that the child runs; it speaks the wire.

    Attributes:
        ready: done when it has started, or with what it raised instead.
        how: how it ended.
        heard: messages that came from it; heard_s: time.monotonic() of the last one, None before.
        busy: that it says nothing means nothing: its reading thread is with the listener.
        beats: it has given a sign of life.
        from_outside: somebody else killed it, as far as one can tell: neither itself nor the kernel for want of memory.
        last_token_s: time.monotonic() when its engine last brought a token; None before.
    """

    def __init__(self, config: EngineConfig, environment: dict[str, str], program: str, listener: Listener) -> None:
        self.ready: Future[None] = Future()
        self.how = ""
        self.heard = 0
        self.heard_s: float | None = None
        self.last_token_s: float | None = None
        self.beats = False
        self.busy = False
        self.from_outside = False
        self._listener = listener
        self._last_words: str | None = None
        self._ended = False
        self._questions: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._oom_kills = oom_kills()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command(program, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the parent alone, which decides what it means
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # stdout belongs to the parent's answer
                env=os.environ | environment,
            )
        try:
            self.pid = self._process.pid
            self._wire = Wire(ours)
            with contextlib.suppress(OSError):  # it ended at once; the reader says so
                self._wire.send("init", pack_config(config))
            self._reader = threading.Thread(target=self._read, name=f"llamabatch-child-{self.pid}", daemon=True)
            self._reader.start()
        except BaseException:  # no thread can be started
            self._process.kill()
            self._process.wait()
            ours.close()
            raise

    def submit(self, requests: list[Request], *, stream: bool) -> dict[str, str]:
        """Those that do not come through are lost with the child, which its listener hears of.

        Returns:
            Of each request that cannot be sent to any child: its id, and why.
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
        except OSError:  # it has ended; if not, it must, as nobody could tell what has come through
            self._process.kill()

    def abort(self, request_ids: list[str]) -> None:
        with contextlib.suppress(OSError):
            self._wire.send("abort", request_ids)

    def ask(self, kind: str, *arguments: Any) -> Future[Any]:
        """Sends a message that has an answer: what the child says, or refuses it with; EngineClosedError if it ends."""
        answer: Future[Any] = Future()
        number = next(self._numbers)
        packed = self._wire.pack(kind, number, *arguments)
        with self._lock:
            if self._ended:
                raise EngineClosedError(f"the engine process ended: {self.how}")
            self._questions[number] = answer
        self._send(packed)  # if it just died, the reader answers
        return answer

    def heartbeat(self, up: bool, restarts: int) -> Heartbeat:
        """What it looks like from here."""
        now = time.monotonic()
        silent_s = None if self.heard_s is None else now - self.heard_s
        last_token_s = None if self.last_token_s is None else now - self.last_token_s
        return Heartbeat(self.pid, up, silent_s, last_token_s, restarts)

    def ask_to_end(self) -> None:
        """Returns at once: a child that hangs with a full pipe would block the sender."""

        def send() -> None:
            with contextlib.suppress(OSError):  # it may have ended already
                self._wire.send("close")

        threading.Thread(target=send, daemon=True).start()

    def kill(self, why: str | None = None) -> None:
        """Waits for nobody. `why`: what its end is to be called."""
        if why is not None:
            self._last_words = why
        self._process.kill()

    def end(self) -> None:
        """Kills it if it still runs, and leaves nothing behind. Not from its reading thread."""
        self._process.kill()
        self._process.wait()
        self._wire.close()
        self._reader.join()

    def _read(self) -> None:
        try:
            while (message := self._wire.receive()) is not None:
                self.heard += 1
                self.heard_s = time.monotonic()
                self.busy = True
                self._obey(message)
                self.busy = False
        except Exception:
            logger.exception("the stream from the engine process is damaged")
            self._last_words = "the stream from it was damaged"
            self._process.kill()
        finally:
            self.busy = True
            try:
                self._answer_all()
            finally:
                self._listener.is_gone(self)

    def _obey(self, message: list[Any]) -> None:
        kind = message[0]
        if kind == "outputs":
            self._listener.has_outputs(self, message[1])
        elif kind == "admitted":
            self._listener.has_admitted(self, message[1])
        elif kind == "beat":
            self.beats = True
            if message[1] is not None:
                self.last_token_s = time.monotonic() - message[1]
        elif kind == "stats":
            self._listener.has_stats(self, message[1])
        elif kind == "answer":
            self._question(message[1]).set_result(message[2])
        elif kind == "refused":
            self._question(message[1]).set_exception(_error(message[2], message[3]))
        elif kind == "ready":
            self.ready.set_result(None)
            self._listener.is_ready(self)
        elif kind == "failed":
            self.ready.set_exception(_error(message[1], message[2]))
        elif kind == "dying":
            self._last_words = message[1]
        else:
            raise EngineError(f"the engine process sent {kind!r}")

    def _question(self, number: int) -> Future[Any]:
        with self._lock:
            return self._questions.pop(number)

    def _answer_all(self) -> None:
        """It is gone: nobody may wait for ever."""
        self.how = self._how_it_ended()
        with self._lock:
            self._ended = True
            questions, self._questions = list(self._questions.values()), {}
        if not self.ready.done():
            self.ready.set_exception(EngineError(f"the engine process ended while it started: {self.how}"))
        for question in questions:
            question.set_exception(EngineClosedError(f"the engine process ended: {self.how}"))

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return self._last_words or "it closed its socket"
        if self._last_words is not None:
            return self._last_words
        self.from_outside = -code in _OF_OTHERS and self._oom_kills is not None and oom_kills() == self._oom_kills
        return _signal_name(-code) if code < 0 else f"exit code {code}"


def _error(name: str, text: str) -> Exception:
    error: Exception = getattr(errors, name, EngineError)(text)
    return error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"
