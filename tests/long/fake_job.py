"""A job without an engine. Rows finish in a random order, and each row's text depends only on its number."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamabatch.jobs.output.files import FULL, Files
from llamabatch.jobs.output.output import Output, OutputOptions
from llamabatch.jobs.output.records import RecordOptions, record, refusal, to_line
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput

SETTINGS = {"model": {"name": "none.gguf", "size": 1}, "sampling": {"temperature": 0.0}}
WINDOW = 6  # most rows in flight

Failing = Callable[[int], bool]


class Killed(BaseException):
    """Stands for the death of the process."""


class FaultyFiles(Files):
    """File operations of which the k-th call of one kind fails.

    Args:
        what: the kind of call, as in Files; None: any kind.
        k: number of the call that fails, from 1.
        fault: the number of an OSError; "short": only a third is written; "killed before", "killed amid" (after half of
            a write) or "killed after": the process is killed, and no later call does anything.
        lasting: every later call also fails. On a full disk, the first write that fails still writes half of its data.

    Attributes:
        calls: the kinds of the calls so far, in order.
        messages: the messages to the user so far.
    """

    def __init__(
        self, what: str | None = None, k: int = 0, fault: int | str = 0, *, lasting: bool = False, patience_s: float = 0
    ) -> None:
        self.calls: list[str] = []
        self.messages: list[str] = []
        super().__init__(self.messages.append, patience_s=patience_s, retry_s=0.0001)
        self._what, self._k, self._fault, self._lasting = what, k, fault, lasting
        self._n = 0
        self._is_dead = False

    def _system(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        if self._is_dead:
            raise Killed
        self.calls.append(what)
        if self._what in (None, what):
            self._n += 1
            if self._n == self._k or (self._lasting and self._n > self._k):
                return self._go_wrong(function, args)
        return _call(function, args)

    def _go_wrong(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if isinstance(self._fault, int):
            half = len(args[1]) // 2 if function is os.write else 0
            if self._lasting and self._n == self._k and half and self._fault in FULL:
                return function(args[0], args[1][:half])
            raise OSError(self._fault, os.strerror(self._fault))
        if self._fault == "short":
            return function(args[0], args[1][: max(1, len(args[1]) // 3)])
        if self._fault == "killed amid":
            function(args[0], args[1][: len(args[1]) // 2])
        if self._fault == "killed after":
            with contextlib.suppress(FileNotFoundError):
                _call(function, args)
        self._is_dead = True
        raise Killed


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return None if function is os.fsync else function(*args)  # a test cannot see whether data reached the disk


def result(number: int, failing: bool = False) -> tuple[Row, RequestOutput]:
    """Returns a row and its output, which depend only on the arguments."""
    draw = random.Random(number)
    text = "".join(draw.choice('aé "\\\n\t世🙂\u2028') for _ in range(draw.randrange(12)))
    row = Row(number, f"id-{number}", "completion", "say", openai=number % 5 == 4)
    reason = FinishReason.ERROR if failing else FinishReason.STOP
    made = CompletionOutput(0, text, tuple(draw.randrange(1000) for _ in range(3)), reason)
    return row, RequestOutput("request-1", "say", (1, 2), (made,), "it failed" if failing else None)


def is_bad(number: int) -> bool:
    """Returns True for rows that the reader refuses."""
    return number % 9 == 8


def in_shard(options: OutputOptions, n_rows: int) -> list[int]:
    i, n = options.shard
    return list(range(i - 1, n_rows, n))


def expected(number: int, options: RecordOptions, failing: bool = False) -> dict[str, Any]:
    """Returns the record that an output must have for a row."""
    if is_bad(number):
        made = refusal(BadRow(number, None, "it is no row"), "it is no row", options)
    else:
        made = record(*result(number, failing), options)
    found: dict[str, Any] = json.loads(to_line(made))
    return found


def run(
    out: Path,
    n_rows: int,
    options: OutputOptions,
    files: Files | None = None,
    *,
    seed: int = 0,
    failing: Failing = lambda number: False,
    until: int | None = None,
    computed: list[int] | None = None,
) -> list[int]:
    """Runs the job once. Rows start in order, with at most WINDOW in flight. `seed` draws the next row that finishes.

    Args:
        until: the run ends early, but cleanly, after so many rows.
        computed: gets the numbers of the computed rows, in order. The function also returns this list.
    """
    order = random.Random(seed)
    computed = [] if computed is None else computed
    with Output(out, SETTINGS, options, files or FaultyFiles()) as output:
        waiting = [n for n in in_shard(options, n_rows) if not output.is_done(n)]
        flight: list[int] = []
        while waiting or flight:
            while waiting and len(flight) < WINDOW:
                flight.append(waiting.pop(0))
            number = flight.pop(order.randrange(len(flight)))
            computed.append(number)
            if is_bad(number):
                output.refused(BadRow(number, None, "it is no row"), "it is no row")
            else:
                output.done(*result(number, failing(number)))
            if len(computed) == until:
                return computed
        if not output.finished:
            output.finish()
    return computed


def rows(out: Path) -> list[tuple[int, dict[str, Any]]]:
    """Returns the number and record of each line of an output. Fails if a line is torn."""
    content = out.read_bytes()
    assert content[-1:] in (b"", b"\n"), "a torn line"
    found = [json.loads(line) for line in content.split(b"\n")[:-1]]
    return [(record["row"] if "row" in record else int(record["id"][len("batch_req_") :]), record) for record in found]


def check(out: Path, n_rows: int, options: OutputOptions, failing: Failing = lambda number: False) -> None:
    """Checks that the job is done: each row is there once, with its own text, in the order asked for, and no other
    files are left."""
    found = rows(out)
    numbers = [number for number, _ in found]
    due = in_shard(options, n_rows)
    assert numbers == due if options.order == "input" else sorted(numbers) == due, numbers
    for number, each in found:
        assert each == expected(number, options.records, failing(number)), (number, each)
    check_beside(out)


def check_beside(out: Path) -> None:
    """Checks that only the output and the manifest of an ended job are left."""
    beside = sorted(path.name for path in out.parent.iterdir() if path.name.startswith(out.name))
    lock = Path(f"{out}.lock")
    # An empty lock stays if the process was killed between making and writing it: it may be another job's.
    if lock.exists() and not lock.stat().st_size:
        beside.remove(lock.name)
    assert beside == [out.name, f"{out.name}.job.json"], beside
