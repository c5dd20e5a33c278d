"""The model runner: executes a scheduler's decisions (copies, cuts, decodes) and samples the output rows."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from llamabatch.config import ResolvedConfig
from llamabatch.errors import ConfigError, EngineClosedError, EngineError, describe
from llamabatch.llama import devices
from llamabatch.llama.batch import Batch, count_passes
from llamabatch.llama.context import Context, DecodeCode
from llamabatch.llama.growth import Growth, largest_context
from llamabatch.llama.library import has_equal_rows, load
from llamabatch.llama.model import Model
from llamabatch.llama.positions import SlotPositions
from llamabatch.llama.slot_moves import SlotMoves
from llamabatch.request.logprobs import RowLogprobs
from llamabatch.request.media import MediaRun
from llamabatch.request.reasoning import ReasoningTags
from llamabatch.request.request import Request
from llamabatch.sampling.prepared_params import PreparedParams
from llamabatch.sampling.reasoning import ReasoningTokens, ReasoningTracker
from llamabatch.sampling.row_logprobs import accepted_logprobs, sample_with_logprobs
from llamabatch.sampling.sampler import NO_TOKEN, NOTHING_MAY_COME, SamplerState, sample_rows
from llamabatch.sampling.top_rows import TopRows, is_enough
from llamabatch.sampling.verify_drafts import accepted_tokens
from llamabatch.scheduler.output import (
    Call,
    DecodeStatus,
    Limits,
    ScheduledSpan,
    SchedulerOutput,
    SpanOutput,
)
from llamabatch.scheduler.thread_choice import ThreadChoice

if TYPE_CHECKING:
    from llamabatch.sampling.grammar_matcher import Compiled, GrammarMasks

logger = logging.getLogger(__name__)

Logits = npt.NDArray[np.float32]
Rows = Logits | TopRows
_Read = Callable[[list[ScheduledSpan], list[SamplerState], Any], list[SpanOutput]]
# Sampling returns to the device after this many calls in which no request needed whole rows. Each switch between host
# and device costs the time of some steps, so switches must be rare.
CALLS_UNTIL_TOP = 32
# The maximum seconds of an encoder in one step. The first value is for a step that computes nothing else. This value
# limits how long a new request waits. The second value is for a step that also computes text, if nobody reads its
# tokens one by one. The encoder then takes most of the step, so that more rows share each later step.
_ENCODER_ALONE_S, _ENCODER_BESIDE_S = 0.1, 1.0
_MOST_TAGS = 16  # maximum number of pairs of reasoning tags whose tokens are kept
_OK = DecodeStatus.OK  # saves a look-up of 0.1 us for each row before Python 3.12
_COMPUTED = SpanOutput(_OK)  # the result of a span without output rows


@dataclass
class RunnerCounts:
    """The counters of a runner since the start.

    Attributes:
        decode_calls: calls that continue sequences.
        decode_rows: rows of these calls, one for each continued sequence.
        decode_passes: passes of these calls over the weights.
        prefill_calls, prefill_passes: calls with prompt tokens only, and their passes.
        prefill_tokens: prompt tokens, also the prompt tokens in calls with decode rows.
        dummy_rows: rows that are computed only to keep the slot ids of a call dense.
        adapter_switches: number of times that the context got other adapters.
    """

    decode_calls: int = 0
    decode_rows: int = 0
    decode_passes: int = 0
    prefill_calls: int = 0
    prefill_tokens: int = 0
    prefill_passes: int = 0
    dummy_rows: int = 0
    adapter_switches: int = 0


class ModelRunner:
    """Drives one context of one model. Only one thread may use it at a time.

    The context begins with config.start_slots slots, and gets all slots when the scheduler needs more. The reason is
    that llama.cpp zeroes all cells of a new context. For 32 slots of 4,096 tokens this may take longer than the load of
    a small model.
    """

    def __init__(self, model: Model, config: ResolvedConfig, n_slots: int) -> None:
        if model.cannot_generate is not None:
            raise ConfigError(f"{model.path.name} cannot generate text: it is {model.cannot_generate}")
        plain = not model.is_recurrent
        if config.row_ladder == "on" and not (plain and config.kv == "split"):
            why = "its state is recurrent" if config.kv == "split" else "only a unified KV cache fits"
            raise ConfigError(f"row_ladder is 'on', but {model.path.name} cannot have dummy rows: {why}; give 'auto'")
        self.model = model
        self.counts = RunnerCounts()
        self._n_ubatch = config.n_ubatch
        self._config = config
        self._growth: Growth | None = None
        start = min(config.start_slots, n_slots)
        self._context = largest_context(model, config, start)
        if self._context.n_slots < start:
            n_slots = start = self._context.n_slots
        if not self._context.has_memory:  # decoding would abort the process
            self._context.close()
            raise ConfigError(f"{model.path.name} cannot generate text: llama.cpp gives its architecture no memory")
        self._positions = SlotPositions()
        marks_prompts = self._context.takes_prompts and not config.batch_invariant
        self._batch = Batch(load(), config.n_batch, self._positions, marks_prompts)
        self._states: dict[str, SamplerState] = {}  # the states of all added requests, by request id
        self._whole_rows: set[str] = set()  # ids of requests that need whole rows
        self._calls_since_whole = 0  # calls with output rows since the last call that needed whole rows
        self._reasoning_tokens: dict[ReasoningTags, ReasoningTokens] = {}
        self._grammar_masks: GrammarMasks | None = None
        cuts = model.uncuttable(config) is None
        self._moves = SlotMoves(self._context, self._batch, self._positions, can_cut=cuts)
        self.limits = Limits(
            n_slots=n_slots,
            n_batch=config.n_batch,
            n_ubatch=self._n_ubatch,
            prefill_budget=config.prefill_budget,
            prefill_share=config.prefill_share,
            n_outputs=config.output_rows(n_slots, model.n_vocab),
            n_cells=config.kv_cells or None,
            can_share=model.can_copy(config),
            can_cut=cuts,
            has_window=model.has_window,
            state_bytes=config.cache_ram * 2**20 if model.can_copy(config) else 0,
            can_pad=plain and config.kv != "unified",
            can_shift=self._context.can_shift and model.can_shift(config.type_k),
            keeps_prefixes=config.cache_prefix and model.can_copy(config),
            prompt_rows=config.prompt_rows(model.n_vocab),
            start_slots=start,
            is_ragged=self._context.is_ragged,
            on_device=config.n_gpu_layers != 0 and bool(devices.used(config, load())),
            row_ladder=config.row_ladder,
        )
        # The number of threads may change only if one row has the same kernels as many rows (has_equal_rows). Otherwise
        # the bits of a row would depend on this number. On a GPU the number does not matter, so it stays fixed.
        chooses = has_equal_rows() and not self.limits.on_device
        self._thread_choice = ThreadChoice(max(config.n_threads, config.n_threads_batch), chooses)
        self._began = 0.0  # time.perf_counter() at the start of the current step
        self._has_rows = False  # True if the current step also computes text
        self._encoder_share = 1.0  # the encoder's share of the current step's time
        self._can_carry = plain and not model.has_window  # kv_state.move needs a single KV cache

    def close(self) -> None:
        if self._growth is not None:
            self._growth.end()
            self._growth = None
        self._context.close()

    def add(self, request: Request, prepared: PreparedParams) -> None:
        """Makes the sampler state of a request. `remove` frees the state.

        Call `add` before the scheduler gets the sequence.
        """
        state = prepared.sampler_state(request)
        if request.follows_reasoning:
            state.reasoning = self._tracker(request)
        self._states[request.request_id] = state
        if not is_enough(request, state):
            self._whole_rows.add(request.request_id)

    def _tracker(self, request: Request) -> ReasoningTracker:
        assert request.reasoning is not None
        tags = request.reasoning.tags
        if tags not in self._reasoning_tokens:
            if len(self._reasoning_tokens) >= _MOST_TAGS:
                self._reasoning_tokens.clear()
            self._reasoning_tokens[tags] = ReasoningTokens(tags, self.model)
        budget = request.params.thinking_token_budget
        return ReasoningTracker(self._reasoning_tokens[tags], request.reasoning, budget)

    def constrain(self, request_id: str, grammar: Compiled) -> None:
        """Makes the output of an added request follow a grammar. If the thinking is tracked, the grammar starts after
        it."""
        from llamabatch.sampling.grammar_matcher import GrammarMatcher  # imported late, because it imports a library

        state = self._states[request_id]
        state.constrain(GrammarMatcher(grammar, state.reasoning), self.model.n_vocab)

    def remove(self, request_id: str) -> None:
        """Frees the sampler state of an ended request, if there is one."""
        self._states.pop(request_id, None)
        self._whole_rows.discard(request_id)

    @property
    def request_ids(self) -> Set[str]:
        """Ids of the requests with a sampler state."""
        return self._states.keys()

    def forget_adapter(self, name: str) -> None:
        """Removes an adapter from the context, before the adapter is unloaded."""
        if any(name == held for held, _ in self._context.adapters):
            self._context.set_adapters(())

    def grow(self, n_slots: int, held: Iterable[int], *, wait: bool) -> tuple[int, frozenset[int]] | None:
        """Replaces the context with a context of `n_slots` slots, and carries over the cells of the slots `held`.

        A thread makes the larger context. Until it is ready, the steps use the old context.

        Args:
            wait: block until the larger context is ready.

        Returns:
            None while the larger context is not ready. Afterwards the number of slots (the old number if llama.cpp
            cannot make more) and the slots whose cells were carried over.
        """
        if self._growth is None:
            self._growth = Growth(lambda: Context(self.model, self._config, n_slots))
        if not wait and (self._moves.unflushed or not self._growth.is_done):
            return None
        growth, self._growth = self._growth, None
        try:
            larger = growth.context()
        except EngineError as error:
            logger.warning("%s; continuing with %d slot(s)", error, self._context.n_slots)
            return self._context.n_slots, frozenset()
        carried = self._moves.grow_into(larger, held, can_carry=self._can_carry)
        self._context = larger
        return n_slots, carried

    def run(self, batch: SchedulerOutput) -> list[SpanOutput]:
        """Executes a step. Returns one result for each span of the batch, in the order of the spans."""
        began = self._began = time.perf_counter()
        self._encoder_share = batch.encoder_share
        self._has_rows = bool(batch.calls) and batch.calls[0].media is None
        rows = batch.output_rows
        self._context.use_threads(self._thread_choice.threads_of(rows))
        self._moves.execute(batch)
        run_call = self._run_filled if self._moves.unfilled else self._run_call
        results = [result for call in batch.calls for result in run_call(call)]
        self._thread_choice.observe(rows, time.perf_counter() - began)
        return results

    def _run_filled(self, call: Call) -> list[SpanOutput]:
        """Runs a call. A span gets an error if llama.cpp refused the saved prefix of its slot."""
        unfilled = self._moves.unfilled
        unfilled.difference_update(span.slot for span in call.spans if span.start == 0)
        lost = {id(span) for span in call.spans if span.slot in unfilled}
        spans = tuple(span for span in call.spans if id(span) not in lost)
        ran = iter(self._run_call(replace(call, spans=spans)) if spans else ())
        error = "llama.cpp refuses the saved prefix that this prompt begins with; unload it"
        return [SpanOutput(DecodeStatus.FAILED, error=error) if id(s) in lost else next(ran) for s in call.spans]

    def state(self, slot: int, count: int) -> tuple[bytes, tuple[MediaRun, ...]] | None:
        """Returns what a file needs to save a slot: the slot's state, and the pictures in its first `count` cells that
        take fewer positions than cells. Returns None while copies wait for the next decode. Raises InputError if the
        format of the state is not known."""
        return None if self._moves.unflushed else (self._context.state(slot), self._positions.runs(slot, count))

    def _run_call(self, call: Call) -> list[SpanOutput]:
        """Computes a call. After an error, computes the spans one by one, so that only the faulty span fails."""
        try:
            return self._compute(call)
        except EngineClosedError:
            raise
        except Exception as error:
            if len(call.spans) > 1:
                logger.warning("a call failed; its rows are tried one by one", exc_info=True)
            return self._one_by_one(call, describe(error))

    def _compute(self, call: Call) -> list[SpanOutput]:
        if call.adapters != self._context.adapters:
            self._context.set_adapters(call.adapters)
            self.counts.adapter_switches += 1
        if self._positions:
            for each in call.spans:
                if each.start == 0:
                    self._positions.cut(each.slot, 0)
        if call.media is not None:
            return self._compute_media(call, call.media)
        struct, outputs = self._batch.fill(call)
        if outputs and (self._context.can_sample or self._context.samples_on_device):
            self._choose_rows(outputs)
        code = self._context.decode(struct)
        self._clear_dummies(call)
        if code is not DecodeCode.OK:
            return self._recover(call, code)
        self._moves.end_with(call)
        self._count(call)
        if not outputs:
            return [_COMPUTED] * len(call.spans)
        states = [self._states[span.sequence.request.request_id] for span in outputs]
        self._make_grammar_masks(outputs, states)  # before the logits are read, while a GPU still computes them
        logits = self._rows(call, outputs)
        if isinstance(logits, TopRows) and self.limits.can_cut and logits.is_ambiguous(states):
            return self._compute_again(call)
        read: _Read = self._verify if call.n_guesses else self._sample
        try:
            found = read(outputs, states, logits)
        except Exception:  # the spans are independent, so each span is sampled alone
            logger.warning("the rows of a call could not be sampled together", exc_info=True)
            ends = itertools.accumulate(map(_n_rows, outputs))
            found = [
                _read_alone(read, span, state, logits[end - _n_rows(span) : end])
                for span, state, end in zip(outputs, states, ends, strict=True)
            ]
        if len(outputs) == len(call.spans) and call.is_decode:  # `outputs` and the spans are in slot order
            return found
        results = dict(zip(map(id, outputs), found, strict=True))
        return [results.get(id(span), _COMPUTED) for span in call.spans]

    def _compute_media(self, call: Call, run: MediaRun) -> list[SpanOutput]:
        """Computes a call with tokens of a picture. The call has no output rows, because text follows each picture."""
        [span] = call.spans
        projector = self.model.projector
        if projector is None:
            raise EngineError("a prompt has a picture or a sound, and no mmproj was given")
        own = slice(span.start - run.start, span.start - run.start + span.length)
        began = time.perf_counter()
        encoded = projector.embeddings(span.sequence.request.media[run.media], run.chunk, self._encoder_s())
        encoder_s = time.perf_counter() - began
        if encoded is None:
            return [SpanOutput(DecodeStatus.NOT_YET, encoder_s=encoder_s)]
        positions = encoded.positions(self._positions.of(span.slot, run.start), own)
        self._positions.add(span.slot, run)
        decode = self._context.decode if run.is_causal else self._context.decode_whole
        code = decode(self._batch.fill_media(span.slot, encoded.rows[own], positions))
        if code is not DecodeCode.OK:
            return self._recover(call, code)
        self._moves.end_with(call)
        self._count(call)
        return [SpanOutput(_OK, encoder_s=encoder_s)]

    def _encoder_s(self) -> float:
        """Returns the maximum seconds of an encoder in this step. If the step also computes text, the limit depends on
        `encoder_share`."""
        if not self._has_rows:
            return _ENCODER_ALONE_S
        if self._encoder_share >= 1:
            return _ENCODER_BESIDE_S
        spent = time.perf_counter() - self._began
        return spent * self._encoder_share / (1 - self._encoder_share)

    def _rows(self, call: Call, outputs: list[ScheduledSpan]) -> Rows:
        """Returns the output rows of the last decode in the order of `outputs`, without dummy rows."""
        if not call.is_decode:
            return self._context.rows(sum(map(_n_rows, outputs)))
        if not (call.is_padded and call.dummy_slots):
            return self._context.rows(len(outputs))
        rows = self._context.rows(len(outputs) + len(call.dummy_slots))
        if call.dummy_slots[0] > outputs[-1].slot:
            return rows[: len(outputs)]
        order = sorted([*((span.slot, True) for span in outputs), *((slot, False) for slot in call.dummy_slots)])
        return rows[np.array([is_own for _, is_own in order])]

    def _choose_rows(self, outputs: list[ScheduledSpan]) -> None:
        """Chooses whether the next decode returns the device's likeliest tokens or whole rows. llama.cpp copies all
        logits of a pass as soon as one row needs them, and each switch costs the time of some steps. So a request that
        needs whole rows switches all requests to whole rows. They switch back after no request has needed whole rows
        for a while."""
        needs_whole = not self._context.can_sample or any(
            span.sequence.request.request_id in self._whole_rows or span.sequence.logprobs is not None
            for span in outputs
        )
        if needs_whole:
            self._calls_since_whole = 0
            self._context.sample_on_device(False)
        elif not self._context.samples_on_device and not self._whole_rows:
            self._calls_since_whole += 1
            if self._calls_since_whole >= CALLS_UNTIL_TOP:
                self._context.sample_on_device(True)

    def _compute_again(self, call: Call) -> list[SpanOutput]:
        """Computes a call again with whole rows, because the device may have left out a token that is as likely as a
        token that it returned."""
        self._calls_since_whole = 0
        self._context.sample_on_device(False)
        if not all(self._moves.clear(span.slot, span.start) for span in call.spans):
            raise EngineError("the model's state cannot be cut back")
        return self._compute(call)

    def _sample(self, spans: list[ScheduledSpan], states: list[SamplerState], logits: Rows) -> list[SpanOutput]:
        """Samples the output rows of a call.

        Args:
            spans: the spans with output rows, in the order of `states`.
            logits: float32 of shape (rows of all spans, vocabulary), or the likeliest tokens of these rows, if the
                device found them.
        """
        n_threads = self._config.n_threads_batch
        is_scored = False
        for span, state in zip(spans, states, strict=True):
            sequence = span.sequence
            if span.output:
                state.advance(sequence.num_output, sequence.token_ids)
            if sequence.logprobs is not None:
                is_scored = True
        if isinstance(logits, TopRows):
            tokens = logits.sample(states, n_threads)
        elif is_scored:
            found = sample_with_logprobs(logits, spans, states, n_threads)
            return [_result(state, *each) for state, each in zip(states, found, strict=True)]
        else:
            tokens = sample_rows(logits, states, n_threads)
        if NO_TOKEN in tokens:
            return [_result(state, token) for state, token in zip(states, tokens, strict=True)]
        return [SpanOutput(_OK, (token,)) for token in tokens]

    def _make_grammar_masks(self, spans: list[ScheduledSpan], states: list[SamplerState]) -> None:
        """Makes the next masks of all sequences with a grammar, in one call."""
        constrained = [
            (state.grammar, span.num_output, span.token_ids)
            for span, state in zip(spans, states)  # noqa: B905  # the lengths are equal, and `strict` takes time
            if state.grammar is not None and span.output
        ]
        if not constrained:
            return
        if self._grammar_masks is None:
            from llamabatch.sampling.grammar_matcher import GrammarMasks  # imported late, because it imports a library

            self._grammar_masks = GrammarMasks(self.model.n_vocab, self._config.n_threads_batch)
        self._grammar_masks.fill(constrained)

    def _verify(self, spans: list[ScheduledSpan], states: list[SamplerState], logits: Logits) -> list[SpanOutput]:
        """Samples the rows of a verify call and clears the cells of rejected guesses."""
        n_threads = self._config.n_threads_batch
        for span, state in zip(spans, states, strict=True):
            state.advance(span.num_output, span.token_ids)
        accepted = accepted_tokens(logits, spans, states, n_threads)
        logprobs = accepted_logprobs(logits, spans, states, accepted, n_threads)
        results = []
        for span, state, tokens, found in zip(spans, states, accepted, logprobs, strict=True):
            if not tokens:
                results.append(_result(state, NO_TOKEN))
                continue
            if len(tokens) < span.length:
                if not self._moves.clear(span.slot, span.start + len(tokens)):
                    results.append(SpanOutput(DecodeStatus.FAILED, error="the model's state cannot be cut back"))
                    continue
                if not self.limits.can_cut:
                    self._moves.rolled_back.add(span.slot)
            results.append(SpanOutput(DecodeStatus.OK, tokens, None, found))
        return results

    def _recover(self, call: Call, code: DecodeCode) -> list[SpanOutput]:
        """Tries the spans of a failed call one by one. Returns their results.

        llama.cpp may have completed some passes of the call. So each slot is first cut back to the start of its span.
        After NO_ROOM the spans are not tried: the context is unchanged, and the scheduler will make room.
        """
        if code is DecodeCode.NO_ROOM:
            return [SpanOutput(DecodeStatus.NO_ROOM)] * len(call.spans)
        return self._one_by_one(
            call, f"llama_decode failed: {code.name.lower()} ({code.value})", is_whole=code is DecodeCode.INVALID
        )

    def _one_by_one(self, call: Call, error: str, is_whole: bool = False) -> list[SpanOutput]:
        """Computes each span of a failed call in a separate call. If the call has only one span, or if a slot cannot be
        cut back, all spans fail with `error`.

        Args:
            is_whole: True if nothing of the call was computed.
        """
        self._clear_dummies(call)
        whole = is_whole or all(self._moves.clear(span.slot, span.start) for span in call.spans)
        if len(call.spans) == 1 or not whole:
            return [SpanOutput(DecodeStatus.FAILED, error=error)] * len(call.spans)
        return [
            result
            for span in call.spans
            for result in self._run_call(replace(call, spans=(span,), dummy_slots=(), dummy_starts=()))
        ]

    def _clear_dummies(self, call: Call) -> None:
        """Drops the cells of dummy rows. Raises EngineError if the slots cannot be cut."""
        for slot, start in call.dummies:
            if not self._moves.clear(slot, start):
                raise EngineError(f"slot {slot} cannot be cut back to {start} tokens")

    def _count(self, call: Call) -> None:
        counts, limits = self.counts, self.limits
        passes = count_passes(call, self._n_ubatch, unified=limits.is_unified, ragged=limits.is_ragged)
        counts.dummy_rows += len(call.dummy_slots)
        rows = len(call.spans) if call.is_decode else sum(map(_continues, call.spans))
        if rows:
            counts.decode_calls += 1
            counts.decode_rows += rows
            counts.decode_passes += passes
        else:
            counts.prefill_calls += 1
            counts.prefill_passes += passes
        if rows < len(call.spans):
            counts.prefill_tokens += sum(span.length for span in call.spans if not _continues(span))


def _continues(span: ScheduledSpan) -> bool:
    """Returns True if a span generates tokens, with or without guesses; False if the span computes a prompt."""
    return span.draft is not None or (span.length == 1 and span.num_output > 0)


def _n_rows(span: ScheduledSpan) -> int:
    """Returns the number of logits rows of a span with outputs."""
    return span.prompt_rows + span.output if span.draft is None else 1 + len(span.draft)


def _read_alone(read: _Read, span: ScheduledSpan, state: SamplerState, rows: Rows) -> SpanOutput:
    try:
        [result] = read([span], [state], rows)
    except Exception as error:
        return SpanOutput(DecodeStatus.FAILED, error=describe(error))
    return result


def _result(state: SamplerState, token: int | None, logprobs: tuple[RowLogprobs, ...] = ()) -> SpanOutput:
    """Returns the output of a span. `token` is None if the span samples no token."""
    if token == NO_TOKEN:
        return SpanOutput(DecodeStatus.FAILED, error=state.why_no_token)
    if not all(row.token_ids for row in logprobs):
        return SpanOutput(DecodeStatus.FAILED, error=NOTHING_MAY_COME)
    return SpanOutput(DecodeStatus.OK, () if token is None else (token,), None, logprobs)


class NoRunner:
    """Takes the place of the ModelRunner for a model that only gives embeddings or scores. Nothing is scheduled for
    it."""

    limits = Limits(n_slots=1, n_batch=1, n_ubatch=1, prefill_budget=1, can_share=False, keeps_prefixes=False)

    def __init__(self) -> None:
        self.counts = RunnerCounts()

    def close(self) -> None:
        pass

    def state(self, slot: int, count: int) -> tuple[bytes, tuple[MediaRun, ...]] | None:
        """Returns None, because there are no slots."""
        return None

    def forget_adapter(self, name: str) -> None:
        pass

    def add(self, request: Request, prepared: PreparedParams) -> None:
        raise AssertionError("nothing is there to run")

    def constrain(self, request_id: str, grammar: Compiled) -> None:
        raise AssertionError("nothing is there to run")

    def remove(self, request_id: str) -> None:
        """Does nothing, because no request was added."""

    @property
    def request_ids(self) -> Set[str]:
        return frozenset()

    def grow(self, n_slots: int, held: Iterable[int], *, wait: bool) -> tuple[int, frozenset[int]] | None:
        raise AssertionError("nothing is there to run")

    def run(self, batch: SchedulerOutput) -> list[SpanOutput]:
        assert not batch.calls
        return []
