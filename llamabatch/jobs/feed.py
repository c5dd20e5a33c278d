"""From rows to requests: as many in flight as keep the engine busy, and no more."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from llamabatch.entrypoints.input_processor import Host, InputProcessor
from llamabatch.errors import InputError
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.request.request import Request, new_group

# ----------------------------------------------------------------------------------------------------
# Reading ahead of a loop that must not wait.


T = TypeVar("T")

_ROWS_AHEAD = 64


class ReadAhead(Generic[T]):
    """An iterator over what a slow one gives, such as a terminal or a pipe: None where there is nothing yet.

    A thread of its own waits for the input. Nobody waits for that thread: it may be blocked for ever.
    """

    def __init__(self, slow: Iterator[T]) -> None:
        self._ready: queue.Queue[tuple[T | None, Exception | None]] = queue.Queue(_ROWS_AHEAD)
        self._thread = threading.Thread(target=self._read, args=(slow,), name="llamabatch-input", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T | None]:
        return self

    def __next__(self) -> T | None:
        try:
            item, error = self._ready.get_nowait()
        except queue.Empty:
            return None
        if error is not None:
            self._ready.put((None, error))  # whoever asks again gets the same answer
            raise error
        return item

    def _read(self, slow: Iterator[T]) -> None:
        try:
            for item in slow:
                self._ready.put((item, None))
        except Exception as error:
            self._ready.put((None, error))
        else:
            self._ready.put((None, StopIteration()))


# ----------------------------------------------------------------------------------------------------
# Which seed a row draws with: of the job's seed and the row's number alone, so that a run that goes on draws
# alike.


_MASK = 2**64 - 1


def seed_of(job_seed: int, number: int) -> int:
    """The number-th output of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)
    with the job's seed: 0 .. 2**64 - 1, without a pattern between neighbours."""
    z = (job_seed + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


_LEAST_GROUP = 64  # rows that a strategy has to choose from, however few the slots
_PIECE = 32  # rows that are tokenized before the engine gets them
_PIECE_S = 0.05  # or what is ready after this time
_LEAST_TOKENS = 2**19


@dataclass(frozen=True)
class Refused:
    """A row that the engine never saw, and why."""

    row: Row | BadRow
    error: str

    @property
    def message(self) -> str:
        """The error with the row's place in front."""
        place = self.row.place
        return self.error if self.error.startswith(place) else f"{place}: {self.error}"


class Feed:
    """Rows that are to be run, as requests, and which of them are in flight.

    The rows of a job form groups of several times the slots; inside a group a strategy sorts as it likes, and the next
    group is there before the last one is done, so that no slot stands empty. Nobody of a later group overtakes, so that
    what is finished ahead of its turn stays bounded too.

    Args:
        host: the engine that will get the requests.
        rows: those that are not done; None: none yet.
        slots: rows that the engine computes at once.
        n_ctx: tokens that one row takes at most.
        seed: of the job: rows without one of their own draw with a seed made of it and their number.
        adapters: as for LLM.generate.
        cancelled: as for Front: whether the job is to end.

    Attributes:
        exhausted: no other row comes.
        waits: the input is slow: rows may come, but there is none at the moment.
        broken: why the input cannot be read any further, when that is why no other row comes.
    """

    def __init__(
        self,
        host: Host,
        rows: Iterator[Row | BadRow | None],
        slots: int,
        n_ctx: int,
        seed: int,
        adapters: Mapping[str, float] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self._front = InputProcessor(host, cancelled)
        self._rows = rows
        self._seed = seed
        self._adapters = adapters
        self._group_rows = max(_LEAST_GROUP, 4 * slots)
        self._most_rows = 2 * self._group_rows
        self._most_tokens = max(_LEAST_TOKENS, 2 * slots * n_ctx)
        self._in_flight: dict[str, Row] = {}
        self._tokens: dict[str, int] = {}
        self._n_tokens = 0
        self._group, self._n_group = new_group(), 0
        self.exhausted = False
        self.waits = False
        self.broken: InputError | None = None

    @property
    def n_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def wants_more(self) -> bool:
        """Is there room for another piece, and is there any?"""
        room = self._most_rows - len(self._in_flight)
        return not self.exhausted and room >= min(_PIECE, self._group_rows) and self._n_tokens < self._most_tokens

    def piece(self) -> tuple[list[Request], list[Refused]]:
        """The next few: requests, which count as in flight, and rows that cannot be any."""
        requests: list[Request] = []
        refused: list[Refused] = []
        until = time.perf_counter() + _PIECE_S
        while len(requests) + len(refused) < _PIECE and self._n_tokens < self._most_tokens:
            row = self._next()
            if row is None:
                break
            made = Refused(row, row.error) if isinstance(row, BadRow) else self._request(row)
            if isinstance(made, Refused):
                refused.append(made)
            else:
                requests.append(made)
            if time.perf_counter() > until:
                break
        return requests, refused

    def _next(self) -> Row | BadRow | None:
        try:
            row = next(self._rows)
        except StopIteration:
            self.exhausted = True
            return None
        except InputError as error:
            self.exhausted, self.broken = True, error
            return None
        self.waits = row is None
        return row

    def take(self, request_id: str) -> Row:
        """The row of a request that has ended; it is no longer in flight."""
        self._n_tokens -= self._tokens.pop(request_id)
        return self._in_flight.pop(request_id)

    def _request(self, row: Row) -> Request | Refused:
        try:
            [item] = self._submitted(row)
        except (
            ValueError,
            RecursionError,
        ) as error:  # InputError; text that is no UTF-8; a template that goes too deep
            return Refused(row, str(error))
        if self._n_group == self._group_rows:
            self._group, self._n_group = new_group(), 0
        self._n_group += 1
        seed = item.seed if row.params.seed is not None else seed_of(self._seed, row.number)
        request = replace(item, group=self._group, seed=seed)
        self._in_flight[request.request_id] = row
        self._tokens[request.request_id] = len(request.prompt_token_ids)
        self._n_tokens += len(request.prompt_token_ids)
        return request

    def _submitted(self, row: Row) -> list[Request]:
        """The one request; what is wrong with it is raised, as of any prompt that comes alone."""
        if row.task == "embedding":
            return self._front.texts(row.prompt, self._adapters).requests
        if row.task == "chat":
            return self._front.conversations(row.prompt, row.params, row.options, self._adapters).requests
        return self._front.prompts(row.prompt, row.params, self._adapters).requests
