"""The embedding requests of an engine: their queue, the pass of a step, and their outputs."""

from __future__ import annotations

import time
from array import array
from collections import deque

from llamabatch.config import ResolvedConfig
from llamabatch.engine.hooks import EngineHooks
from llamabatch.engine.validation import longest_text
from llamabatch.errors import EngineClosedError, describe
from llamabatch.llama.embedder import MAX_TEXTS, Embedder
from llamabatch.llama.model import Model
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput, Timings
from llamabatch.request.request import Request

# While sequences generate, a step embeds at most MOST_BESIDE tokens of texts. After STEPS_BETWEEN such steps, one step
# has a full pass of texts. With a model of 0.5B in Q8_0, a decode step of 16 rows takes 45 ms, and 64 tokens of a text
# take 80 ms.
MOST_BESIDE = 64
STEPS_BETWEEN = 29
# Maximum seconds for encoding pictures and audio in one step. The second number applies while sequences generate.
ENCODER_S, ENCODER_BESIDE_S = 0.2, 0.02
LOOK_AHEAD = 256  # a step looks at this many waiting texts at most, so that a long queue does not slow steps down


class Embeddings:
    """The embedding requests of an engine. Each step runs at most one pass, so that generation continues.

    Args:
        hooks: callbacks for admitted requests.
    """

    def __init__(self, model: Model, config: ResolvedConfig, hooks: EngineHooks | None = None) -> None:
        self._hooks = hooks
        self._queue = EmbedQueue(min(config.n_ubatch, longest_text(config)))
        self._embedder = Embedder(model, config)
        self.counts = self._embedder.counts

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._queue

    def add(self, request: Request) -> None:
        """Queues a request accepted by `validate`."""
        self._queue.add(request)

    def abort(self, request_id: str, error: str | None) -> SequenceOutput:
        """Ends a waiting request, with finish_reason "error" if an error is given."""
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        return _finished(self._queue.remove(request_id), reason, error=error)

    def step(self, generating: bool) -> list[SequenceOutput]:
        """Runs one pass if a text waits, and returns the outputs.

        Args:
            generating: True: the engine also has sequences to compute.
        """
        try:
            is_encoded = self._encode(ENCODER_BESIDE_S if generating else ENCODER_S)
        except EngineClosedError:
            raise
        except Exception as error:
            return [_finished(self._queue.pop_encoded(), FinishReason.ERROR, error=describe(error))]
        taken = [self._queue.pop_encoded()] if is_encoded else self._queue.take(generating)
        if taken and self._hooks is not None:
            self._hooks.admitted([request.request_id for request in taken])
        return self._run(taken) if taken else []

    def _run(self, requests: list[Request]) -> list[SequenceOutput]:
        try:
            if requests[0].media_runs:
                vectors = [self._embedder.run_media(requests[0])]
            else:
                vectors = self._embedder.run([r.prompt_token_ids for r in requests], requests[0].adapters)
        except EngineClosedError:
            raise
        except Exception as error:
            if len(requests) > 1:  # the texts run one by one, so that only the text with the error fails
                return [output for request in requests for output in self._run([request])]
            return [_finished(requests[0], FinishReason.ERROR, error=describe(error))]
        return [_finished(r, FinishReason.STOP, vector) for r, vector in zip(requests, vectors, strict=True)]

    def _encode(self, seconds: float) -> bool:
        """Encodes pictures and audio of the request in `encoding`. Returns True once all of them are encoded."""
        request = self._queue.encoding
        return request is not None and self._embedder.encodes(request, seconds)

    def uses_adapter(self, name: str) -> bool:
        """Returns True if a waiting request uses this adapter."""
        return self._queue.uses(name)

    def forget_adapter(self, name: str) -> None:
        """Removes an adapter from the context, so that the adapter can be freed."""
        self._embedder.forget_adapter(name)

    def close(self) -> None:
        self._embedder.close()


class EmbedQueue:
    """A queue of the waiting requests, in order of arrival.

    Args:
        n_pack: maximum number of tokens in a pass of several texts. A longer text gets a larger pass of its own.

    Attributes:
        encoding: the oldest request with pictures or audio. Once its media are encoded, this request has a pass of its
            own. Texts do not wait for this request.
    """

    def __init__(self, n_pack: int) -> None:
        self._n_pack = n_pack
        self._waiting: deque[Request] = deque()
        self._ids: set[str] = set()
        self._since = STEPS_BETWEEN
        self.encoding: Request | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request: Request) -> None:
        self._waiting.append(request)
        self._ids.add(request.request_id)

    def remove(self, request_id: str) -> Request:
        """Removes a waiting request from the queue, and returns it."""
        if self.encoding is not None and self.encoding.request_id == request_id:
            return self.pop_encoded()
        self._ids.remove(request_id)
        found = next(request for request in self._waiting if request.request_id == request_id)
        self._waiting.remove(found)
        return found

    def pop_encoded(self) -> Request:
        """Removes and returns the request in `encoding`."""
        request, self.encoding = self.encoding, None
        assert request is not None
        self._ids.remove(request.request_id)
        return request

    def uses(self, name: str) -> bool:
        """Returns True if a waiting request uses this adapter."""
        requests = self._waiting if self.encoding is None else (self.encoding, *self._waiting)
        return any(name == used for request in requests for used, _ in request.adapters)

    def take(self, generating: bool) -> list[Request]:
        """Removes and returns the texts of the next pass: the oldest text that fits, and younger texts that fit and
        have the same adapters. The oldest request with pictures or audio moves to `encoding`.

        Args:
            generating: True: the engine also has sequences to compute. A step then has at most MOST_BESIDE tokens of
                texts, except for a full pass every 30 steps.
        """
        is_full_pass = not generating or self._since >= STEPS_BETWEEN
        self._since = STEPS_BETWEEN if not generating else 0 if is_full_pass else self._since + 1
        room = self._n_pack if is_full_pass else min(MOST_BESIDE, self._n_pack)
        taken: list[Request] = []
        passed: list[Request] = []
        while self._waiting and len(taken) < MAX_TEXTS and len(passed) < LOOK_AHEAD and room > 0:
            request = self._waiting.popleft()
            n = len(request.prompt_token_ids)
            if request.media_runs:
                if self.encoding is None:
                    self.encoding = request
                else:
                    passed.append(request)
                continue
            alike = not taken or request.adapters == taken[0].adapters
            if alike and (n <= room or (is_full_pass and not taken)):
                taken.append(request)
                room -= n
            else:
                passed.append(request)
        self._waiting.extendleft(reversed(passed))
        self._ids.difference_update(request.request_id for request in taken)
        return taken


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
