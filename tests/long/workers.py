"""Runs cases in child processes, so that a case that dies, hangs or leaks fails alone and does not end the run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

import psutil

from llamabatch.utils.subprogram import command
from tests.long import figures
from tests.long.figures import ROOT, Figure
from tests.long.state import Outcome, now

_MAX_MESSAGE = 600


class Worker:
    """A process that runs cases of one figure, one after another. It is replaced after a case that ended it."""

    def __init__(self, figure: Figure, folder: Path, revision: str) -> None:
        self._figure, self._folder, self._revision = figure, folder, revision
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False
        self._lock = threading.Lock()  # for _process and _stopped: one thread runs cases, and another may stop them

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            self._stopped = True
        self._end()

    def run(self, number: int) -> Outcome | None:
        """Runs one case, and returns its outcome; None if the worker was stopped before the case ended."""
        start = time.monotonic()
        error = self._ask(number)
        return None if self._stopped else Outcome(error, round(time.monotonic() - start, 2), now(), self._revision)

    def _end(self) -> None:
        """Kills the process and all of its children."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        _kill_children(process.pid)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _started(self) -> subprocess.Popen[str] | None:
        """Returns the process that runs cases, and starts it if needed; None if the worker was stopped."""
        with self._lock:
            if self._process is None and not self._stopped:
                self._process = subprocess.Popen(
                    command("tests.long.workers", str(self._folder), self._figure.name),
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tempfile.gettempdir(),
                    start_new_session=True,  # Ctrl-C is for the parent
                )  # fmt: skip
            return self._process

    def _ask(self, number: int) -> str | None:
        """Runs a case, and returns its error; None if the promise holds."""
        process, is_late = self._started(), threading.Event()
        if process is None:
            return None
        assert process.stdin is not None
        assert process.stdout is not None

        def late() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(self._figure.timeout_s, late)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(f"{number}\n")
                process.stdin.flush()
            answer = process.stdout.readline()
        except ValueError:  # the worker was stopped meanwhile, so the pipes are closed
            return None
        finally:
            timer.cancel()
        if answer:
            error: str | None = json.loads(answer)["error"]
            return error
        self._end()
        if is_late.is_set():
            return f"it did not end within {self._figure.timeout_s:g} s"
        return f"its process ended with code {process.returncode}"


def _kill_children(pid: int) -> None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()


def _end_with(parent: int) -> None:
    """Waits for the end of the parent, and then ends this process, even in the middle of a case."""
    while os.getppid() == parent:
        time.sleep(0.5)
    _kill_children(os.getpid())
    os._exit(1)


def message(error: BaseException, folder: Path) -> str:
    """Returns the text of an error for a committed file: short, and without paths of this machine."""
    text = f"{type(error).__name__}: {error}".replace(str(folder), "FOLDER").replace(str(ROOT), ".")
    for place in (str(Path.home()), tempfile.gettempdir(), sys.prefix):
        text = text.replace(place, "…") if len(place) > 1 else text
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "…"


def main(folder: Path, name: str) -> None:
    """Reads numbers of cases from stdin, and answers each with a line of JSON. Output of the cases goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    module = figures.load(folder, name)
    for line in sys.stdin:
        error = None
        with tempfile.TemporaryDirectory(prefix=f"llamabatch-{name}-", ignore_cleanup_errors=True) as place:
            os.chdir(place)  # programs of a case start outside the checkout, as on a user's machine
            try:
                module.case(int(line), Path(place))
            except KeyboardInterrupt:
                return
            except BaseException as failure:
                error = message(failure, Path(place))
            os.chdir(tempfile.gettempdir())
        answers.write(json.dumps({"error": error}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
