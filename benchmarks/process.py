"""Child programs of a benchmark: started in an untouched environment, given a time limit, and never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

_NOT_FOR_CHILDREN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_LAST_WORDS = 300  # characters of a program's log that a failure quotes


class PeerFailure(Exception):
    """A peer cannot be measured; the message is the reason. The run continues with the other peers."""


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of peers: `given` without variables that make a Python find other packages."""
    return {name: value for name, value in given.items() if name not in _NOT_FOR_CHILDREN}


class Program:
    """A child program in a process group of its own.

    Args:
        name: its name in messages.
        command: the command line.
        log: the file for its standard error, and for its standard output unless `lines` is set.
        lines: the program speaks the protocol of programs/lines.py.
    """

    def __init__(
        self, name: str, command: Sequence[str | Path], env: Mapping[str, str], log: Path, *, lines: bool
    ) -> None:
        self.name = name
        self._log = log
        self._timed_out: float | None = None
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                env=dict(env),
                stdin=subprocess.PIPE if lines else subprocess.DEVNULL,
                stdout=subprocess.PIPE if lines else output,
                stderr=output,
                text=True,
                start_new_session=True,  # so that one signal ends the program and its children
            )

    @property
    def pids(self) -> list[int]:
        """The ids of the program's process and of all its descendants."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            return [process.pid, *(child.pid for child in process.children(recursive=True))]
        return []

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Sends a message and returns the answer. Raises PeerFailure with the program's own reason."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self.limit(timeout_s):
            with contextlib.suppress(BrokenPipeError):  # the program has ended; readline below reports it
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise self.failure()
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:  # the program was killed in the middle of its answer
            raise self.failure() from error
        if "error" in answer:
            raise PeerFailure(str(answer["error"]))
        return answer

    @contextlib.contextmanager
    def limit(self, timeout_s: float) -> Iterator[None]:
        """Kills the program if the `with` block takes longer; a reader that waits for it then returns."""

        def expire() -> None:
            self._timed_out = timeout_s
            self._kill()

        timer = threading.Timer(timeout_s, expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def failure(self) -> PeerFailure:
        """Returns the reason for a missing answer."""
        if self._timed_out is not None:
            return PeerFailure(f"it took longer than {self._timed_out:g} s")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.poll()
        if code is None:
            return PeerFailure("it gave no answer")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        words = " ".join(self._log.read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:].split())
        return PeerFailure(f"it ended with {how}: {words}" if words else f"it ended with {how}")

    def close(self) -> None:
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@contextlib.contextmanager
def neighbour(wanted: bool, env: Mapping[str, str]) -> Iterator[None]:
    """Runs another process that uses a whole core during the `with` block, if `wanted`."""
    if not wanted:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", "while True: pass"], env=dict(env), start_new_session=True
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Makes SIGTERM raise KeyboardInterrupt, so that the callers' cleanup ends every program."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
