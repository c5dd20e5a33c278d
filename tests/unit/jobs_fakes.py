"""An engine without a model, for jobs: it finishes rows in any order, and records the seed of each."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

from llamabatch.engine.stats import EngineStats
from llamabatch.errors import EngineClosedError
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput, Timings
from llamabatch.request.sampling_params import SamplingParams
from tests.unit.configs import resolved

N_CTX = 128


class FakeModel:
    """A model with one token for each byte."""

    n_vocab = 256
    cannot_generate = None
    cannot_embed = "a fake"
    chat_template = None
    path = SimpleNamespace(name="fake.gguf")
    vocabulary = SimpleNamespace(bos=None)

    def can_shift(self, type_k):
        return True

    def tokenize(self, text, add_special=True, parse_special=False):
        return list(text.encode())

    def special_token(self, name):
        return ""


def finished(request, text="done", error=None, tokens=3):
    reason = FinishReason.ERROR if error else FinishReason.STOP
    completion = CompletionOutput(0, "" if error else text, () if error else tuple(range(tokens)), reason)
    times = Timings(0.0, 0.01, 0.05, tuple(0.01 * (i + 1) for i in range(tokens)))
    output = RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, (completion,), error, times)
    return SequenceOutput(request.request_id, (), "", output)


class FakeClient:
    """Finishes requests in any order: all but `held` when new ones come, and the held ones after a moment.

    Args:
        held: number of requests that it holds back.
        kept: number of requests after which it stores no more in `requests`.
        dies_after: number of rows after which it ends; None: never.
        failing: texts of prompts that end with an error.
        error: the text of the error.
    """

    def __init__(self, held=0, dies_after=None, failing=(), seed=0, kept=10_000, error="it cannot be run"):
        self.model = FakeModel()
        self.plan = SimpleNamespace(config=resolved("fake", n_ctx=N_CTX, n_slots=8))
        self.adapters = []
        self.pids = []
        self.requests = []
        self.most_in_flight = 0
        self.closed = False
        self._held = held
        self._kept = kept
        self._left = dies_after
        self._failing, self._error = failing, error
        self._rng = random.Random(seed)
        self._pending = []
        self._lock = threading.Lock()

    def submit(self, requests, sink, *, stream=False):
        if self._left is not None and self._left <= 0:
            raise EngineClosedError("the engine is gone")
        with self._lock:
            self.requests += requests if len(self.requests) < self._kept else []
            self._pending += [(request, sink) for request in requests]
            self.most_in_flight = max(self.most_in_flight, len(self._pending))
        self._finish(self._held)
        if self._held:
            threading.Timer(0.01, self._finish, (0,)).start()

    def _finish(self, held):
        with self._lock:
            self._rng.shuffle(self._pending)
            self._pending, ending = self._pending[:held], self._pending[held:]
        for request, sink in ending:
            if self._left is not None:
                self._left -= 1
                if self._left < 0:
                    sink([finished(request, error="the engine process ended: SIGKILL")])
                    continue
            error = self._error if request.prompt in self._failing else None
            sink([finished(request, text=f"of {request.prompt}", error=error)])

    def stats(self):
        if self._left is not None and self._left < 0:
            raise EngineClosedError("the engine is gone")
        return EngineStats(running=len(self._pending))

    def close(self):
        self.closed = True


def rows(n, bad=()):
    """Yields rows 0 to n - 1. Rows whose numbers are in `bad` are bad."""
    params = SamplingParams()
    for number in range(n):
        if number in bad:
            yield BadRow(number, str(number), f"rows, line {number + 1}: bad")
        else:
            yield Row(number, str(number), "completion", f"prompt {number}", params, place=f"rows, line {number + 1}")


class FakeSink:
    """The written rows, by number."""

    def __init__(self):
        self.outputs = {}
        self.errors = {}

    def done(self, row, output):
        assert row.number not in self.outputs
        self.outputs[row.number] = output

    def refused(self, row, error):
        assert row.number not in self.errors
        self.errors[row.number] = error
