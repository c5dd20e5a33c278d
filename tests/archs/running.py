"""Runs the cases of many models in child processes, one for each core. If a child dies, one model has no answer."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llamabatch.native_build.plan import jobs
from llamabatch.utils.subprogram import command
from llamabatch.utils.system import fatal_signal

PATIENCE_S = 300.0  # seconds for one model
_LAST_WORDS = ("GGML_ASSERT", "what():", "Error")

Found = dict[str, Any]


def run(paths: Iterable[Path], tell: Callable[[str, Found], None] = lambda name, found: None) -> dict[str, Found]:
    """Returns the findings of tests/archs/case.py on each model, by the name of its file, and deletes the files.

    If the child died, the findings are `dead`: the last words of the child.
    """
    waiting = sorted(paths, key=lambda path: path.stat().st_size)  # work() pops the largest model first
    results: dict[str, Found] = {}
    turn = threading.Lock()

    def work() -> None:
        with _Child() as child:
            while True:
                with turn:
                    if not waiting:
                        return
                    path = waiting.pop()
                found = child.ask(path)
                path.unlink()
                with turn:
                    results[path.stem] = found
                    tell(path.stem, found)

    with ThreadPoolExecutor(jobs()) as pool:
        for worker in [pool.submit(work) for _ in range(jobs())]:
            worker.result()
    return dict(sorted(results.items()))


class _Child:
    """A process of tests/archs/case.py. After its end, the next model starts a new one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - __exit__ closes it

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()
        self._errors.close()

    def ask(self, path: Path) -> Found:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        patience = threading.Timer(PATIENCE_S, process.kill)
        patience.start()
        try:
            process.stdin.write(f"{path}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            patience.cancel()
        if answer:
            return dict(json.loads(answer))
        code = process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").splitlines()
        words = next((line for line in reversed(lines) if any(word in line for word in _LAST_WORDS)), "")
        self._end()
        return {"dead": f"{fatal_signal(code) or f'exit status {code}'}: {words.strip()}"}

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._errors.truncate(0)
            self._process = subprocess.Popen(
                command("tests.archs.case"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                text=True, env={**os.environ, "GOMP_SPINCOUNT": "1000"},
            )  # fmt: skip
        return self._process

    def _end(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._process = None
