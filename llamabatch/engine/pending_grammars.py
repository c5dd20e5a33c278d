"""The sequences that wait for their compiled grammar before the scheduler gets them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any

from llamabatch.errors import describe, error_type
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.deadlines import sequence_deadline_message

OnCompiled = Callable[[Sequence, Any], None]


class PendingGrammars:
    """The waiting sequences, each with the Future of its grammar.

    Attributes:
        num_missed: number of sequences that missed their deadline while they waited for a grammar.
    """

    def __init__(self) -> None:
        self.num_missed = 0
        self._waiting: dict[str, tuple[Sequence, Future[Any]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for sequence, _ in list(self._waiting.values())]

    def add(self, sequence: Sequence, future: Future[Any], on_compiled: OnCompiled) -> None:
        """Passes a sequence to `on_compiled` if its grammar is compiled; otherwise the sequence waits."""
        if future.done() and future.exception() is None:
            on_compiled(sequence, future.result())
        else:
            self._waiting[sequence.request.request_id] = (sequence, future)

    def abort(self, request_id: str, error: str | None) -> SequenceOutput:
        """Ends a waiting sequence."""
        sequence, _ = self._waiting.pop(request_id)
        text = sequence.abort(error)
        return SequenceOutput(request_id, (), text, sequence.output())

    def step(self, patience_s: float, on_compiled: OnCompiled) -> list[SequenceOutput]:
        """Passes sequences with a compiled grammar to `on_compiled`. Returns the outputs of sequences that failed or
        missed their deadline.

        Args:
            patience_s: seconds to wait for the first grammar; 0 if there is other work.
            on_compiled: called with a sequence and its grammar.
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
            error = future.exception()  # raising it would keep a traceback, and so the engine, in the cached future
            try:  # an exception fails this request alone
                if error is None:
                    on_compiled(sequence, future.result())
            except BaseException as raised:
                error = raised
            if error is not None:
                ended = self.abort(request_id, describe(error))
                assert ended.finished is not None
                failed.append(replace(ended, finished=replace(ended.finished, error_type=error_type(error))))
            else:
                del self._waiting[request_id]
        return failed
