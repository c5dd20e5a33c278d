"""Embedding requests of an engine: what waits, what a step computes of it, and what came of it."""

from __future__ import annotations

import time
from array import array
from collections import deque

from llamabatch.config import ResolvedConfig
from llamabatch.engine.hooks import EngineHooks
from llamabatch.engine.validation import longest_text
from llamabatch.errors import describe
from llamabatch.llama.embedder import MAX_TEXTS, Embedder
from llamabatch.llama.model import Model
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput, Timings
from llamabatch.request.request import Request
from llamabatch.scheduler.chunked_prefill import SHORT, STEPS_BETWEEN

# ----------------------------------------------------------------------------------------------------
# Texts that wait to be embedded, and which of them go through the model together. Pure Python.


LOOK_AHEAD = 256  # texts that are looked at for those that still fit, so that a step costs the same for any queue


class EmbedQueue:
    """Requests in order of arrival.

    Args:
        n_pack: tokens in a pass, unless one text alone has more.
    """

    def __init__(self, n_pack: int) -> None:
        self._n_pack = n_pack
        self._waiting: deque[Request] = deque()
        self._ids: set[str] = set()
        self._since = STEPS_BETWEEN

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request: Request) -> None:
        self._waiting.append(request)
        self._ids.add(request.request_id)

    def remove(self, request_id: str) -> Request:
        """Takes one out that waits."""
        self._ids.remove(request_id)
        found = next(request for request in self._waiting if request.request_id == request_id)
        self._waiting.remove(found)
        return found

    def uses(self, name: str) -> bool:
        """Does anything that waits use this adapter?"""
        return any(name == used for request in self._waiting for used, _ in request.adapters)

    def take(self, beside_others: bool) -> list[Request]:
        """What goes through the model in this step: the oldest, and younger ones with the same adapters that fit.

        Args:
            beside_others: others wait for their next token. Texts then pay what long prompts pay (turns.py): up to 64
                tokens a step, and one full pass in 30 steps.
        """
        is_full_turn = not beside_others or self._since >= STEPS_BETWEEN
        self._since = STEPS_BETWEEN if not beside_others else 0 if is_full_turn else self._since + 1
        room = self._n_pack if is_full_turn else min(SHORT, self._n_pack)
        taken: list[Request] = []
        passed: list[Request] = []
        while self._waiting and len(taken) < MAX_TEXTS and len(passed) < LOOK_AHEAD and room > 0:
            request = self._waiting.popleft()
            n = len(request.prompt_token_ids)
            alike = not taken or request.adapters == taken[0].adapters
            if alike and (n <= room or (is_full_turn and not taken)):
                taken.append(request)
                room -= n
            else:
                passed.append(request)
        self._waiting.extendleft(reversed(passed))
        self._ids.difference_update(request.request_id for request in taken)
        return taken


class Embeddings:
    """One pass a step, so that generation goes on beside it."""

    def __init__(self, model: Model, config: ResolvedConfig, watch: EngineHooks | None = None) -> None:
        self._watch = watch
        self._queue = EmbedQueue(min(config.n_ubatch, longest_text(config)))
        self._embedder = Embedder(model, config)
        self.counts = self._embedder.counts

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._queue

    def add(self, request: Request) -> None:
        """Takes in a request that `validate` has passed."""
        self._queue.add(request)

    def abort(self, request_id: str, error: str | None) -> SequenceOutput:
        """Ends one that waits."""
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        return _finished(self._queue.remove(request_id), reason, error=error)

    def step(self, beside_others: bool) -> list[SequenceOutput]:
        """One pass, where there is something for it.

        Args:
            beside_others: somebody waits for the next token of a text.
        """
        taken = self._queue.take(beside_others)
        if taken and self._watch is not None:
            self._watch.admitted([request.request_id for request in taken])
        return self._run(taken) if taken else []

    def _run(self, requests: list[Request]) -> list[SequenceOutput]:
        try:
            vectors = self._embedder.run([r.prompt_token_ids for r in requests], requests[0].adapters)
        except Exception as error:
            if len(requests) > 1:  # so that only the culprit fails
                return [output for request in requests for output in self._run([request])]
            return [_finished(requests[0], FinishReason.ERROR, error=describe(error))]
        return [_finished(r, FinishReason.STOP, vector) for r, vector in zip(requests, vectors, strict=True)]

    def uses_adapter(self, name: str) -> bool:
        """Does anything that waits?"""
        return self._queue.uses(name)

    def forget_adapter(self, name: str) -> None:
        """Takes it off the context, so that it can be freed."""
        self._embedder.forget_adapter(name)

    def close(self) -> None:
        self._embedder.close()


def _finished(
    request: Request, reason: FinishReason, embedding: array[float] | None = None, error: str | None = None
) -> SequenceOutput:
    total = time.perf_counter() - request.arrival_s
    nothing = CompletionOutput(0, "", (), reason)
    output = RequestOutput(
        request.request_id,
        request.prompt,
        request.prompt_token_ids,
        (nothing,),
        error,
        Timings(total_s=total),
        embedding=embedding,
    )
    return SequenceOutput(request.request_id, (), "", output)
