"""Sequences that wait for what is made ready elsewhere, before the scheduler hears of them: their compiled grammars."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from llamabatch.errors import describe
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.deadlines import sequence_deadline_message

Enter = Callable[[Sequence, Any], None]


class PendingGrammars:
    """Each sequence with the Future of what it waits for.

    Args:
        enter: called with a sequence and what it waited for.

    Attributes:
        num_missed: how many reached their deadline here.
    """

    def __init__(self, enter: Enter) -> None:
        self.num_missed = 0
        self._enter = enter
        self._waiting: dict[str, tuple[Sequence, Future[Any]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for sequence, _ in self._waiting.values()]

    def add(self, sequence: Sequence, future: Future[Any]) -> None:
        if future.done() and future.exception() is None:
            self._enter(sequence, future.result())
        else:
            self._waiting[sequence.request.request_id] = (sequence, future)

    def abort(self, request_id: str, error: str | None) -> SequenceOutput:
        """Ends one of them."""
        sequence, _ = self._waiting.pop(request_id)
        text = sequence.abort(error)
        return SequenceOutput(request_id, (), text, sequence.output())

    def step(self, patience_s: float) -> list[SequenceOutput]:
        """Lets those enter whose wait is over; the outputs of those who waited for something that failed.

        Args:
            patience_s: to wait for the first of them, when there is nothing else to do.
        """
        futures = {future for _, future in self._waiting.values()}
        done, _ = wait(futures, patience_s, FIRST_COMPLETED)
        now, failed = time.perf_counter(), []
        for request_id, (sequence, future) in list(self._waiting.items()):
            if future not in done:
                if sequence.request.is_late(now):
                    self.num_missed += 1
                    failed.append(self.abort(request_id, sequence_deadline_message(sequence, now)))
                continue
            try:  # whatever it is, it is this request's error
                self._enter(sequence, future.result())
            except BaseException as error:
                failed.append(self.abort(request_id, describe(error)))
            else:
                del self._waiting[request_id]
        return failed
