"""Runs the processes that measure settings, and a process that keeps a core busy.

Settings with the same `load` share a process. Several processes stay alive at once if memory allows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import IO, Any

from llamabatch import errors
from llamabatch.config import EngineConfig
from llamabatch.errors import EngineError
from llamabatch.planning.binding_choice import for_children
from llamabatch.tools.tune.stages import Job, Setting, config_of
from llamabatch.utils import system
from llamabatch.utils.closing import Closing
from llamabatch.utils.subprogram import command

PROGRAM = "llamabatch.tools.tune.child"
_ANSWER_TIMEOUT_S = 600.0
_MOST = 5
_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**6): pass"

Figures = dict[str, float]


class Children(Closing):
    """A pool of processes that measure settings. Settings with the same `load` share a process.

    Leaving the context manager ends all processes.

    Args:
        base: options that name the model and the devices of its layers.
        room: number of processes with this model that fit in memory at once.
    """

    def __init__(self, base: EngineConfig, room: int) -> None:
        self._base = base
        self._room = max(1, min(room, _MOST))
        self._running: dict[tuple[str, str, int], _Child] = {}  # ordered by last use

    def measure(self, setting: Setting, job: Job) -> Figures:
        """Returns the figures of Bench.measure for a job.

        Raises:
            EngineError: llama.cpp refuses the context, or the process died. The next call starts another process.
            Other errors of Model, if the load fails.
        """
        child = self._child(setting, job)
        try:
            return child.measure(self._base, setting, job)
        except _ChildDiedError:
            del self._running[setting.load]
            child.end()
            raise

    def spins_matter(self, setting: Setting, job: Job) -> bool:
        """Returns True if the library obeys GOMP_SPINCOUNT (see uses_libgomp)."""
        return self._child(setting, job).uses_libgomp

    def _child(self, setting: Setting, job: Job) -> _Child:
        child = self._running.pop(setting.load, None)
        if child is None:
            while len(self._running) >= self._room:
                oldest = next(iter(self._running))
                self._running.pop(oldest).end()
            child = _Child(config_of(self._base, setting, job), setting.environment())
        self._running[setting.load] = child
        return child

    def close(self) -> None:
        for child in self._running.values():
            child.end()
        self._running.clear()


class _ChildDiedError(EngineError):
    """The error of a measuring process that has ended before its answer."""


class _Child:
    def __init__(self, config: EngineConfig, environment: Mapping[str, str]) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        self._process: subprocess.Popen[str] = subprocess.Popen(
            command(PROGRAM),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only the parent
            creationflags=system.NEW_GROUP,
            env={**inherited, **for_children(), **environment},
        )
        try:
            self.uses_libgomp = bool(self._ask(dataclasses.asdict(config))["libgomp"])
        except BaseException:
            self.end()
            raise

    def measure(self, base: EngineConfig, setting: Setting, job: Job) -> Figures:
        wanted = {name: value for name, value in dataclasses.asdict(job).items() if name != "n_ctx"}
        config = dataclasses.asdict(config_of(base, setting, job))
        figures: Figures = self._ask({**wanted, "config": config})["figures"]
        return figures

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = _open(self._process.stdin), _open(self._process.stdout)
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        clock = threading.Timer(_ANSWER_TIMEOUT_S, end)  # a timer, since select does not work on pipes on Windows
        clock.daemon = True
        clock.start()
        try:
            with contextlib.suppress(OSError):  # if the process has died, readline returns ""
                stdin.write(json.dumps(message) + "\n")
                stdin.flush()
            line = stdout.readline()
        finally:
            clock.cancel()
        if not line:
            raise _ChildDiedError(f"the measuring process ended: {self._how_it_ended(late.is_set())}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise getattr(errors, answer["kind"], EngineError)(answer["error"])
        return answer

    def _how_it_ended(self, late: bool) -> str:
        if late:
            return f"no answer within {_ANSWER_TIMEOUT_S:.0f} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(5)
            return system.fatal_signal(code) or f"exit code {code}"
        return "it closed its output"

    def end(self) -> None:
        _end(self._process)


def _open(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # close() flushes stdin, but its reader is dead
                stream.close()
    process.wait()


@contextlib.contextmanager
def busy_neighbour() -> Iterator[None]:
    """Runs a process that keeps a core busy until the block or this process ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SPIN],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        creationflags=system.NEW_GROUP,
    )
    try:
        yield
    finally:
        _end(process)
