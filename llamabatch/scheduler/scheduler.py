"""Decides what one step computes, and applies what came of it. Pure Python: knows neither llama.cpp nor numpy."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import abc
from collections.abc import Callable, Set
from typing import Any

from llamabatch.errors import InputError, describe
from llamabatch.request.logprobs import Told
from llamabatch.request.outputs import FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.adapter_batching import AdapterScheduler
from llamabatch.scheduler.batch_builder import decode_calls, moves, prefill_calls
from llamabatch.scheduler.chunked_prefill import BACKGROUND_CHUNK, PrefillPacer
from llamabatch.scheduler.counters import SequenceCounters
from llamabatch.scheduler.deadlines import Deadlines, sequence_deadline_message
from llamabatch.scheduler.kv_cache import SlotPool
from llamabatch.scheduler.output import DecodeStatus, Limits, ScheduledSpan, SchedulerOutput, Shift, SpanOutput
from llamabatch.scheduler.policies import Policy
from llamabatch.scheduler.preemption import foreground, peer_slots, victims
from llamabatch.scheduler.prefix_cache import PrefixCache
from llamabatch.scheduler.request_queue import PREEMPTION_COUNTS, RequestQueue
from llamabatch.scheduler.spec_decode import SpecDecoder

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns the waiting queue, the running sequences and the slots.

    Args:
        preempt: a waiting request of better priority may take the slot of a running one; of background ones it always
            may.
        max_wait_s: how long the first request waits for company when nothing runs; see `wait_s`.
        on_admit: is called with each sequence that gets a slot.
    """

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        clock: Callable[[], float] = time.perf_counter,
        speculation: SpecDecoder | None = None,
        *,
        preempt: bool = False,
        max_wait_s: float = 0.0,
        on_admit: Callable[[Sequence], None] | None = None,
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.most_slots = 1 if policy.one_slot else limits.n_slots
        self.prefix_cache = PrefixCache(limits, min(self.most_slots, limits.start_slots or limits.n_slots))
        self._kv_cache = self.prefix_cache.kv_cache
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.deadlines = Deadlines()
        self.counters = SequenceCounters()
        self._clock = clock
        self._preempts = preempt
        self._max_wait_s = max_wait_s
        self._on_admit = on_admit
        self._first_s = 0.0  # when the first request came after nothing was left to do
        self._n_background = 0  # background sequences in flight
        self._began_s = 0.0  # when the step began; noted where background sequences run beside others
        self._speculation = speculation
        self._waiting = RequestQueue(policy.key, policy.by_family and limits.can_share)
        self._sequences: dict[str, Sequence] = {}
        self._prefill_pacer = PrefillPacer(limits)
        self.adapters = AdapterScheduler()
        self._shifting: set[Sequence] = set()  # those in flight that may outgrow their slot
        self._is_full = False  # the KV cache had no room for all that run
        self._step = 0

    @property
    def slots(self) -> SlotPool:
        return self._kv_cache.slots

    @property
    def num_free_slots(self) -> int:
        """Slots that further requests can take, those counted that the context has not grown to yet."""
        return self.most_slots - len(self.slots.leased)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence in; where that raises, nothing of it stays."""
        request_id = sequence.request.request_id
        if request_id in self._sequences:
            raise InputError(f"request id {request_id!r} is already in flight")
        if not self._sequences:
            self._first_s = self._clock()
        with contextlib.ExitStack() as undo:
            undo.callback(sequence.fail, "it could not be taken in")  # finished: queues pass it over
            undo.callback(self._waiting.forget, sequence)
            undo.callback(self._shifting.discard, sequence)
            self.adapters.add(sequence.request)
            undo.callback(self.adapters.remove, sequence.request)
            if sequence.shifts:
                self._shifting.add(sequence)
            self._waiting.add(sequence)
            self.deadlines.add(sequence)
            undo.pop_all()
        self._sequences[request_id] = sequence
        self._n_background += sequence.background

    def wait_s(self) -> float | None:
        """How long a step may wait for company, seconds: 0 where requests run or enough wait; None where there is
        nothing to do."""
        if not self._sequences:
            return None
        if not self._max_wait_s or self.running or len(self._waiting) >= self.most_slots:
            return 0.0
        until = min(self._first_s + self._max_wait_s, self.deadlines.next)
        return max(0.0, until - self._clock())

    def abort(self, request_id: str, error: str | None = None) -> SequenceOutput | None:
        """Ends a request now, with finish_reason "error" if an error is given; None if it is not in flight."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        if sequence.slot is None:
            self._waiting.forget(sequence)
        try:
            text = sequence.abort(error)
        except Exception as failure:  # of its held-back text; it ends all the same
            text = ""
            sequence.fail(describe(failure))
        return self._retire(sequence, (), text)

    def wanted_slots(self) -> int | None:
        """How many slots the context should have, where that is more than it has: all at once, so that it grows once
        in an engine's life."""
        needed = min(len(self.running) + len(self._waiting), self.most_slots)
        if needed <= self.slots.n_slots or not self.policy.entering(len(self.running), 1):
            return None
        return self.most_slots

    @property
    def held_slots(self) -> list[int]:
        """Slots with cells that somebody needs, rising: those of running sequences, what is kept, and what is still to
        be copied from sequences that have just ended."""
        running = {s.slot for s in self.running if s.num_computed and s.slot is not None}
        return sorted(running | self._kv_cache.cached.keys() | self.prefix_cache.source_slots())

    def grow(self, n_slots: int, carried: Set[int]) -> None:
        """A context of that many slots has taken the place of the old one; no more than before means that there is no
        memory for more.

        Args:
            carried: slots with the cells that they had. Where one of held_slots is missing, all is computed again.
        """
        if n_slots <= self.slots.n_slots:
            self.most_slots = n_slots
            return
        if not carried >= set(self.held_slots):
            for sequence in list(self.running):
                self._preempt(sequence)
            carried = frozenset()
        self._kv_cache.grow(n_slots, carried)

    def stats(self) -> dict[str, Any]:
        """Fields of EngineStats. May be called from any thread, then between two parts of a step."""
        return {
            "running": len(self.running),
            "waiting": len(self._waiting),
            "free_slots": self.num_free_slots,
            "preemptions": self.num_preemptions,
            "missed_deadlines": self.deadlines.num_missed,
            "kv_cells_used": sum(sequence.num_cells for sequence in list(self.running)),
            **self.prefix_cache.stats(),
            **self.counters.stats(),
            **(vars(self._speculation.counts) if self._speculation is not None else {}),
        }

    def cached_slot(self, token_ids: abc.Sequence[int]) -> int | None:
        """The slot where a finished request has left the cells of exactly these tokens, computed without adapters."""
        return self._kv_cache.slot_of(token_ids)

    def load_prefix(self, path: str, token_ids: abc.Sequence[int], state: bytes) -> None:
        """Holds a prefix for requests that begin with it; see PrefixStore."""
        self.prefix_cache.store.load(path, token_ids, state)

    def unload_prefix(self, path: str) -> None:
        """Frees a loaded prefix. Raises InputError if it is not loaded."""
        self.prefix_cache.store.unload(path)

    def uses_adapter(self, name: str) -> bool:
        """True if a request in flight uses this adapter."""
        return self.adapters.uses(name)

    def forget_adapter(self, name: str) -> None:
        """Evicts cached cells of an adapter that is about to be unloaded: another may take its name."""
        self._kv_cache.evict_keys(lambda key: any(name == used for used, _ in key))

    # --- decide -------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        self._step += 1
        restores = self.prefix_cache.restores(self.running)
        # before anyone enters: a source that has just finished still holds its slot's cells
        self.prefix_cache.copy_ready(self.running)
        self._admit()
        self.prefix_cache.copy_ready(self.running)
        served = self.running if not self._n_background else foreground(self.running)
        joins = self._prefill_pacer.background_joins(beside=len(served) < len(self.running))
        if self._prefill_pacer.beside:
            self._began_s = self._clock()
        ready = [s for s in (self.running if joins else served) if not self.prefix_cache.waits(s)]
        chosen = self.policy.select(self.adapters.choose(ready) if self.adapters.in_use else ready)
        if len(chosen) == len(self.running):
            self._close_holes()
        shifts = self._shifts() if self._shifting else ()
        filling = [s for s in chosen if s.num_pending > 1 or s.scores]
        prompts = [s for s in filling if not (joins and s.background)]
        decoding = [s for s in chosen if s.num_pending == 1 and not s.scores]
        somebody_waits = any(s.num_pending == 1 and not s.scores for s in served) and not _is_one_list(served)
        if prompts and not somebody_waits:
            # prompts first, so that each pass then serves as many rows as there are slots
            decoding = [s for s in decoding if joins and s.background]
        # decoding goes first: slots that are still empty can then take a dummy row
        occupied = {s.slot for s in self.running if s.num_computed and s.slot is not None}
        if self.limits.can_pad:
            self.prefix_cache.evict_between(decoding, occupied)
        if self._speculation is None:
            calls = decode_calls(decoding, occupied, self.limits)
        else:
            calls = self._speculation.calls(decoding, occupied)
        # where the policy lets one sequence compute at a time, there is nobody in this step to go easy on
        prompts, budget = self._prefill_pacer.choose(prompts, somebody_waits and bool(decoding))
        if (served and served[0].background) or (self.adapters.in_use and somebody_waits):
            # whoever comes now shall not wait for long, nor somebody with other adapters
            budget = min(budget, self.limits.prefill_budget)
        calls += prefill_calls(prompts, budget, self.limits)
        if joins and self._prefill_pacer.is_long:
            late = [s for s in filling if s.background]
            calls += prefill_calls(late, min(BACKGROUND_CHUNK, self.limits.n_batch), self.limits)
        if self.adapters.in_use:
            self.adapters.spend(calls)
        return SchedulerOutput(*self._kv_cache.pop_actions(), tuple(calls), shifts, restores)

    def _shifts(self) -> tuple[Shift, ...]:
        """Those whose slot is full forget a part, each at the same token whatever runs beside it."""
        full = [s for s in self._shifting if s.slot is not None and s.num_room == 0]
        return tuple(Shift(s.slot, *s.shift()) for s in full if s.slot is not None)

    def _admit(self) -> None:
        if self._is_full and self.running:
            return  # whoever made room would come back to the same lack of it: somebody has to finish first
        for _ in range(self.policy.entering(len(self.running), self.slots.n_free)):
            sequence = self._waiting.pop(self._has_cells_for)
            if sequence is None:
                break
            self._enter(sequence)
        while self._waiting and (self._preempts or self._n_background) and self._make_way():
            sequence = self._waiting.pop(self._has_cells_for)
            assert sequence is not None
            self._enter(sequence)

    def _make_way(self) -> bool:
        """Takes slots from running ones for the first that waits, if it may and if that is enough for it to enter."""
        first = self._waiting.first()
        if first is None or not self.policy.entering(len(self.running) - 1, 1):
            return False
        leaving = victims(first, self.running, self.slots.n_free, self.limits.n_cells, self._preempts)
        for sequence in leaving:
            sequence.overtaken += PREEMPTION_COUNTS
            self._preempt(sequence)
        return bool(leaving)

    def _has_cells_for(self, sequence: Sequence) -> bool:
        """A slot of a split cache has n_ctx cells, which the request was held to; in a unified one, whoever enters must
        find room for all that it can come to use beside all that the others can."""
        if self.limits.n_cells is None:
            return True
        return sum(s.most_cells for s in self.running) + sequence.most_cells <= self.limits.n_cells

    def _enter(self, sequence: Sequence) -> None:
        own, top = peer_slots(sequence, self.running) if self._n_background else None, sequence.background
        beside = self.adapters.beside(sequence, self.running)
        if not sequence.was_admitted:
            self.counters.count_admission(sequence, self._clock())
        self.prefix_cache.enter(sequence, self.running, own, top, beside)
        self.running.append(sequence)
        if self._on_admit is not None:
            self._on_admit(sequence)
        if self.limits.n_cells is not None:  # what is kept gives way to all that those who run can come to use
            self._kv_cache.evict_to(self.limits.n_cells - sum(s.most_cells for s in self.running))

    def _close_holes(self) -> None:
        """Moves sequences into the holes that nobody waits to fill, so that a step needs no dummy rows."""
        if self._waiting or self.limits.is_unified or not self.limits.can_share:
            return
        front = foreground(self.running) if self._n_background else self.running
        behind = [s for s in self.running if s.background] if len(front) < len(self.running) else []
        for sequences, up in ((front, False), (behind, True)):  # one after the other: both may want one hole
            for sequence, new in moves(sequences, self.slots.free, up=up):
                assert sequence.slot is not None
                old, sequence.slot = sequence.slot, self._kv_cache.lease_this(new)
                self._kv_cache.copy(old, new, sequence.num_cells)
                self._kv_cache.vacate(old)

    # --- apply --------------------------------------------------------------------------------------------------

    def update(self, batch: SchedulerOutput, results: abc.Sequence[SpanOutput]) -> list[SequenceOutput]:
        """Takes one result a span, in the order of `batch.spans`."""
        now = self._clock()
        if self._prefill_pacer.beside and all(call.is_decode for call in batch.calls):
            self._prefill_pacer.observe(now - self._began_s)
        outputs = []
        if self._speculation is not None:
            self._speculation.observe(batch, results)
        alone = len(self.running) == 1
        no_room = any(result.status is DecodeStatus.NO_ROOM for result in results)
        if no_room and self._kv_cache.cached and self.limits.is_unified:
            self._kv_cache.evict_to(0)  # and all try again in the next step
            alone = False
        elif no_room and not alone:
            # the youngest of the worst tier makes room; the others try again in the next step
            self._preempt(max(reversed(self.running), key=lambda s: s.request.tier))
            self._is_full = True
        for span, result in zip(batch.spans, results, strict=True):
            try:
                output = self._apply(span, result, now, alone)
            except Exception as error:
                output = self._failed(span.sequence, error)
            if output is not None:
                outputs.append(output)
        for late in self.deadlines.missed(now):
            ended = self.abort(late.request.request_id, sequence_deadline_message(late, now))
            assert ended is not None
            outputs.append(ended)
        self.counters.end_step(now)
        return outputs

    def _apply(self, span: ScheduledSpan, result: SpanOutput, now: float, alone: bool) -> SequenceOutput | None:
        sequence, record = span.sequence, span.sequence.logprobs
        sequence.last_step = self._step
        if sequence.slot is None or (result.status is DecodeStatus.NO_ROOM and not alone):
            return None
        if sequence.num_cells != span.start or sequence.finished:
            return None  # the piece before this one of the same prompt failed
        if result.status is not DecodeStatus.OK:
            sequence.fail(result.error or "there is no room for it in the KV cache, even alone")
            return self._retire(sequence, (), "")
        sequence.num_computed = span.start + span.length + span.shift
        if span.prompt_rows and record is not None:
            record.take_prompt(result.logprobs[: span.prompt_rows])
            if sequence.scores and record.prompt_is_read:
                sequence.end_score()
                return self._retire(sequence, (), "")
        if not result.token_ids:
            return None
        text, taken, before = "", 0, sequence.last_token_s
        for token_id in result.token_ids:
            text += sequence.accept(token_id, now)
            taken += 1
            if sequence.finished:
                break
        self.counters.count_tokens(sequence, taken, before, now)
        if span.draft is not None:  # behind the tokens taken, the cells hold guesses that did not come true
            sequence.num_computed = span.start + taken + span.shift
        accepted, told = tuple(result.token_ids[:taken]), None
        if record is not None:
            told = record.take(result.logprobs[span.prompt_rows : span.prompt_rows + taken])
        if sequence.finished:
            output = self._retire(sequence, accepted, text, told)
            if taken < len(result.token_ids):
                self._kv_cache.cut(span.slot, sequence.num_cells)
            return output
        return SequenceOutput(sequence.request.request_id, accepted, text, logprobs=told)

    def _failed(self, sequence: Sequence, error: Exception) -> SequenceOutput:
        """Ends a sequence of which a result could not be applied; the others go on."""
        if sequence.request.request_id not in self._sequences or sequence not in self.running:
            raise error  # while it left: slots and queues may be wrong
        logger.warning("the result of a step could not be applied to a request", exc_info=error)
        sequence.fail(describe(error))
        return self._retire(sequence, (), "")

    def _retire(self, sequence: Sequence, token_ids: tuple[int, ...], text: str, told: Told = None) -> SequenceOutput:
        request_id = sequence.request.request_id
        del self._sequences[request_id]
        self._n_background -= sequence.background
        self.adapters.remove(sequence.request)
        self._shifting.discard(sequence)
        self._is_full = False
        self.prefix_cache.forget(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
            assert sequence.slot is not None
            if sequence.finish_reason is FinishReason.ERROR:
                self._kv_cache.vacate(sequence.slot)
            else:
                self._kv_cache.keep(sequence.slot, sequence)
        return SequenceOutput(request_id, token_ids, text, _output_of(sequence), logprobs=told)

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.running.remove(sequence)
        self._kv_cache.vacate(sequence.slot)
        sequence.preempt()
        self.prefix_cache.lost(sequence)
        self.num_preemptions += 1
        self._waiting.add(sequence)

    def check_integrity(self) -> None:
        """Raises ValueError if slots and running sequences disagree: a bug of ours."""
        self._kv_cache.check_integrity()
        if sorted(s.slot for s in self.running if s.slot is not None) != sorted(self.slots.leased):
            raise ValueError("leased slots and running sequences differ")


def _output_of(sequence: Sequence) -> RequestOutput:
    try:
        return sequence.output()
    except Exception as error:  # of its text or logprobs; what else it has cannot be told apart any more
        return RequestOutput.failed(sequence.request, sequence.error or describe(error))


def _is_one_list(running: abc.Sequence[Sequence]) -> bool:
    """Are all of one call? Then its caller waits for the last of them, not for anybody's next token."""
    return len({s.request.group for s in running}) == 1
