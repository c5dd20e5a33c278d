"""Lets a test decide how long the steps of engines take, so that no test depends on the speed of the CPU."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paced import sitecustomize
from tests.paced.sitecustomize import PATIENCE_S, SPEED

__all__ = ["PATIENCE_S", "SPEED", "Steps", "set_speed"]

FOLDER = str(Path(__file__).parent)
_numbers = itertools.count(1)


class Steps:
    """Controls the steps of all engines in this process and in the processes that it starts. See the fixture `steps`.

    ::

        with steps.held(3):
            stream = llm.stream("Once", SamplingParams(max_tokens=20))
            next(stream)
            ...  # the request runs for as long as the block does
    """

    def __init__(self, file: Path, patch: pytest.MonkeyPatch) -> None:
        self._file = file
        self._order: dict[str, float] | None = None
        patch.setenv(sitecustomize.FILE, str(file))
        if not os.environ.get(SPEED):  # else the whole session is paced already
            from llamabatch.llama import model_runner  # tests/unit may run without llama.cpp

            _reach_children(patch)
            patch.setattr(model_runner.ModelRunner, "run", sitecustomize.paced(model_runner.ModelRunner.run))

    @contextlib.contextmanager
    def held(self, after: int = 0) -> Iterator[None]:
        """Lets each engine make so many steps, and then holds it until the block ends or `let_go` is called."""
        with self._ordered(most=after):
            yield

    @contextlib.contextmanager
    def each_takes(self, seconds: float) -> Iterator[None]:
        """Lets each step in the block take at least so many seconds."""
        with self._ordered(step_s=seconds):
            yield

    def let_go(self) -> None:
        """Ends all waiting of steps."""
        self._set(None)

    @contextlib.contextmanager
    def _ordered(self, *, step_s: float = 0.0, most: float = 1e18) -> Iterator[None]:
        before = self._order
        self._set({"number": next(_numbers), "step_s": step_s, "most": most})
        try:
            yield
        finally:
            self._set(before)

    def _set(self, order: dict[str, float] | None) -> None:
        self._order = order
        if order is None:
            self._file.unlink(missing_ok=True)
            return
        new = self._file.with_suffix(".new")  # written aside first, so that no engine reads half of an order
        new.write_text(json.dumps(order), encoding="utf-8")
        new.replace(self._file)


def set_speed(patch: pytest.MonkeyPatch) -> None:
    """Gives all steps the speed that SPEED_OF_TESTED_STEPS names."""
    asked = os.environ[SPEED]
    assert asked in ("slow", "instant"), f"{SPEED} is {asked!r}; known are 'slow' and 'instant'"
    _reach_children(patch)
    sitecustomize.install()


def _reach_children(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PYTHONPATH", FOLDER, prepend=os.pathsep)
