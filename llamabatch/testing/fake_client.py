"""FakeClient: an EngineClient without an engine. All requests of a `submit` call end before the call returns."""

from __future__ import annotations

import json
import threading
import time
from array import array
from collections import abc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from llamabatch.client.base import CLOSED, EngineMethod, Heartbeat, Outage
from llamabatch.config import EngineConfig
from llamabatch.engine.engine_state import EngineState
from llamabatch.engine.hooks import Sink
from llamabatch.engine.parallel_sampling import ParallelSampling
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import AdapterError, EngineClosedError, InputError, QueueFull, describe
from llamabatch.llama.model import Model
from llamabatch.planning.capacity import resolve
from llamabatch.planning.machine import Machine
from llamabatch.planning.model_facts import ModelFacts
from llamabatch.request.logprobs import RowLogprobs
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput, Timings
from llamabatch.request.request import Request
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.deadlines import sequence_deadline_message
from llamabatch.scheduler.slot_state import SlotState
from llamabatch.testing.answers import FakeRequest, Kind, Script
from llamabatch.testing.fake_model import EOS, LABELS, N_EMBD, N_VOCAB, FakeModel, messages_of
from llamabatch.utils.checks import show

# A model of 1 GiB on a machine with 1 TiB of free memory. The plan for "auto" is 32 slots of 4096 tokens.
_FACTS = ModelFacts("fake", 2**30, N_EMBD, N_EMBD, N_EMBD, 1, N_VOCAB, 2**17, has_head=True)
_MACHINE = Machine(cores=8, available_bytes=2**40)

# If a test gives one of these exceptions as an answer, `submit` raises it. Any other exception ends only its request.
_OF_THE_CALL = (AssertionError, QueueFull, EngineClosedError)


class FakeClient:
    """The client of a FakeLLM. All work happens in `submit`, on the caller's thread.

    Args:
        config: the options of the LLM.
        script: the answers.
        labels: names of the classes.

    Attributes:
        requests: all requests so far, in the order of their answers.
    """

    def __init__(self, config: EngineConfig, script: Script, labels: abc.Sequence[str] = LABELS) -> None:
        facts = replace(_FACTS, draft=_FACTS) if config.speculate == "draft" else _FACTS
        self.plan = resolve(config, facts, _MACHINE)
        self.model = cast(Model, FakeModel(Path(config.model), self.plan.config.pooling, labels))
        self.requests: list[FakeRequest] = []
        self._script = script
        self._n_ctx = self.plan.config.n_ctx
        self._adapters = [name for name, _ in config.adapters]
        self._prefixes: set[str] = set()
        self._in_flight: set[str] = set()
        self._aborted: set[str] = set()
        self._is_closed = False
        self._stats = EngineStats()
        self._lock = threading.Lock()

    @property
    def pids(self) -> list[int]:
        return []

    @property
    def heartbeats(self) -> list[Heartbeat]:
        return []

    @property
    def outage(self) -> Outage | None:
        return Outage(CLOSED) if self._is_closed else None

    @property
    def adapters(self) -> list[str]:
        return sorted(self._adapters)

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        self._check_open()
        ids = {request.request_id for request in requests}
        with self._lock:
            self._in_flight |= ids
        try:
            copies = ParallelSampling()
            running = [run for request in requests for run in self._runs(request, copies)]
            while running:
                events = copies.merge([self._step(run, copies) for run in running])
                shown = [event for event in events if stream or event.finished is not None]
                running = [run for run in running if not run.is_over]
                if shown:
                    sink(shown)
        finally:
            with self._lock:
                self._in_flight -= ids
                self._aborted -= ids

    def abort(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            self._aborted |= self._in_flight.intersection(request_ids)

    def stats(self) -> EngineStats:
        self._check_open()
        with self._lock:
            n_slots, running = self.plan.config.n_slots, len(self._in_flight)
            return replace(self._stats, running=running, free_slots=max(0, n_slots - running))

    def states(self) -> list[EngineState]:
        self._check_open()
        with self._lock:
            in_flight = sorted(self._in_flight)
        n_slots = self.plan.config.n_slots
        slots = [SlotState(slot, in_flight[slot] if slot < len(in_flight) else None) for slot in range(n_slots)]
        n_waiting = max(0, len(in_flight) - n_slots)
        return [EngineState(tuple(slots), n_waiting=n_waiting, n_ctx=self.plan.config.n_ctx)]

    def call(self, method: EngineMethod, *arguments: Any) -> Any:
        self._check_open()
        return getattr(self, f"_{method}")(*arguments)

    def close(self) -> None:
        self._is_closed = True

    def again(self, config: EngineConfig) -> FakeClient:
        """Resets this client after close() and returns it. A real client would be replaced by a new one."""
        self._adapters, self._prefixes = [name for name, _ in config.adapters], set()
        self._is_closed, self._stats = False, EngineStats()
        return self

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError(CLOSED)

    def _load_adapter(self, name: str, path: str) -> None:
        if name in self._adapters:
            raise AdapterError(f"an adapter {name!r} is loaded already; unload it, or choose another name")
        self._adapters.append(name)

    def _unload_adapter(self, name: str) -> None:
        if name not in self._adapters:
            raise AdapterError(f"there is no adapter {name!r}")
        self._adapters.remove(name)

    def _save_prefix(self, token_ids: list[int], path: str) -> bool:
        try:
            Path(path).write_text(json.dumps(token_ids), encoding="utf-8")
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from error
        return True

    def _load_prefix(self, path: str) -> int:
        try:
            n_tokens = len(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{show(path)} is no prefix that a FakeLLM has saved") from error
        self._prefixes.add(path)
        return n_tokens

    def _unload_prefix(self, path: str) -> None:
        if path not in self._prefixes:
            raise InputError(f"{show(path)} is not loaded")
        self._prefixes.remove(path)

    def _reset_prefix_cache(self) -> bool:
        return True

    def _runs(self, request: Request, copies: ParallelSampling) -> list[_Run]:
        """Returns the continuations of a request, each with its answer. Raises the exceptions of _OF_THE_CALL."""
        several = request.params.n_copies > 1 and not request.embed
        return [self._run(part, index) for index, part in enumerate(copies.split(request) if several else [request])]

    def _run(self, request: Request, index: int) -> _Run:
        sequence = Sequence(request, self.model.vocabulary, self._n_ctx)
        run = _Run(sequence)
        fake = self._fake_request(request, index)
        with self._lock:
            self.requests.append(fake)
            self._stats = replace(self._stats, prompt_tokens=self._stats.prompt_tokens + len(request.prompt_token_ids))
        try:
            if fake.kind == "rerank":
                run.embedding = array("f", [self._script.relevance(fake)])
            elif request.classify:
                run.embedding = array("f", self._script.classes(fake, self.model.labels))
            elif request.embed:
                run.embedding = array("f", self._script.embedding(fake))
            elif request.score_from is not None:
                run.score = self._script.score(fake, len(request.prompt_token_ids) - request.score_from)
            else:
                answer = self.model.tokenize(self._script.answer(fake), add_special=False)
                run.tokens = _tokens(answer, sequence)
        except _OF_THE_CALL:
            raise
        except Exception as error:
            sequence.fail(describe(error))
        return run

    def _fake_request(self, request: Request, index: int) -> FakeRequest:
        ids = request.prompt_token_ids
        kind: Kind = "embed" if request.embed else "generate" if request.score_from is None else "score"
        prompt, continuation, messages = request.prompt, "", None
        if request.classify:
            kind = "classify"
            if ids[-1] == EOS and EOS in ids[:-1]:  # the ids are a query, EOS, a document, and EOS
                kind, at = "rerank", ids.index(EOS)
                prompt = self.model.detokenize(list(ids[:at]))
                continuation = request.prompt or self.model.detokenize(list(ids[at:]))
        if prompt is None or request.score_from is not None:
            prompt = self.model.detokenize(list(ids[: request.score_from]))
        if request.score_from is not None:
            continuation = self.model.detokenize(list(ids[request.score_from :]))
        elif kind == "generate" and (messages := messages_of(prompt)) is not None:
            kind = "chat"
        return FakeRequest(kind, prompt, messages, request.params, ids, index, request.adapters, continuation)

    def _step(self, run: _Run, copies: ParallelSampling) -> SequenceOutput:
        """Runs one step of a continuation. Returns its next token, or its output if it ends."""
        sequence, request = run.sequence, run.sequence.request
        now = time.perf_counter()
        if self._is_closed or copies.request_of(request.request_id) in self._aborted:
            return run.ended(sequence.abort())
        if not sequence.finished and request.is_late(now):
            return run.ended(sequence.abort(sequence_deadline_message(sequence, now)))
        if sequence.finished:
            return run.ended("")
        if not sequence.was_admitted:
            sequence.admit(0)
            run.read_prompt()
        if run.tokens is None:
            sequence.end_score()
            return run.ended("")
        token_id = next(run.tokens)
        text = sequence.accept(token_id, now)
        record = sequence.logprobs
        logprobs = None
        if record is not None:
            others = [(other, _UNLIKELY, 2) for other in record.others if other != token_id]
            logprobs = record.add([RowLogprobs([token_id], [0.0], 1, others)])
        with self._lock:
            self._stats = replace(self._stats, generated_tokens=self._stats.generated_tokens + 1)
        if sequence.finished:
            return run.ended(text, (token_id,), logprobs)
        return SequenceOutput(request.request_id, (token_id,), text, logprobs=logprobs)


class _Run:
    """A running continuation: an iterator over its tokens, or a score or vector if the request generates no tokens."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.tokens: Iterator[int] | None = None
        self.score = 0.0
        self.embedding: array[float] | None = None
        self.is_over = False

    def read_prompt(self) -> None:
        """Records the logprobs of the prompt's tokens, if requested. Each token gets an equal part of the score, or 0
        if there is no score."""
        record, request = self.sequence.logprobs, self.sequence.request
        if record is None:
            return
        n_prompt = len(request.prompt_token_ids)
        ids = record.targets(n_prompt, record.rows_of(0, n_prompt))
        logprob = self.score / len(ids) if ids else 0.0
        rank = 1 if logprob > _HALF else 2
        record.add_prompt([RowLogprobs([token_id], [logprob], rank) for token_id in ids])

    def ended(self, text: str, token_ids: tuple[int, ...] = (), logprobs: Any = None) -> SequenceOutput:
        self.is_over = True
        output = self.sequence.output()
        if self.embedding is not None and output.finish_reason is FinishReason.LENGTH:
            output = _embedded(self.sequence.request, self.embedding)
        return SequenceOutput(self.sequence.request.request_id, token_ids, text, output, logprobs=logprobs)


_UNLIKELY = -100.0  # the logprob of a token that is not in the answer
_HALF = -0.6931471805599453  # log(1/2): a token with a higher logprob is surely the likeliest


def _embedded(request: Request, embedding: array[float]) -> RequestOutput:
    completion = CompletionOutput(0, "", (), FinishReason.STOP)
    timings = Timings(total_s=time.perf_counter() - request.arrival_s)
    ids = request.prompt_token_ids
    return RequestOutput(request.request_id, request.prompt, ids, (completion,), None, timings, embedding=embedding)


def _tokens(answer: list[int], sequence: Sequence) -> Iterator[int]:
    """Yields the answer and then EOS, again and again, because min_tokens or ignore_eos may prevent the end."""
    params = sequence.request.params
    while True:
        before = sequence.num_output
        for token_id in answer:
            if sequence.num_output >= params.min_tokens or token_id not in params.stop_ids:
                yield token_id
        if sequence.num_output >= params.min_tokens:
            yield EOS
        elif sequence.num_output == before:
            raise AssertionError(f"min_tokens is {params.min_tokens}, and the answer has no token but stop tokens")
