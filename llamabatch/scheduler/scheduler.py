"""The scheduler: decides one step, and applies its results. Pure Python: knows neither llama.cpp nor numpy."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import abc
from collections.abc import Callable
from typing import Any

from llamabatch.errors import InputError, describe
from llamabatch.request.logprobs import SampleLogprobs
from llamabatch.request.media import MediaRun
from llamabatch.request.outputs import FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.adapter_batching import AdapterScheduler
from llamabatch.scheduler.background import BackgroundPacer, BackgroundTurn
from llamabatch.scheduler.batch_builder import (
    MAX_DUMMY_GAP,
    MIN_STEPS_TO_MOVE,
    decode_calls,
    joined,
    moves,
    prefill_calls,
)
from llamabatch.scheduler.chunked_prefill import LEAST_CHUNK, PrefillPacer
from llamabatch.scheduler.counters import SequenceCounters
from llamabatch.scheduler.deadlines import Deadlines, sequence_deadline_message
from llamabatch.scheduler.kv_cache import Placement, SlotPool
from llamabatch.scheduler.output import (
    Call,
    DecodeStatus,
    Limits,
    Restore,
    ScheduledSpan,
    SchedulerOutput,
    Shift,
    SpanOutput,
)
from llamabatch.scheduler.policies import Policy
from llamabatch.scheduler.preemption import foreground, peer_slots, victims
from llamabatch.scheduler.prefix_cache import PrefixCache
from llamabatch.scheduler.prefix_store import DiskTier
from llamabatch.scheduler.request_queue import PREEMPTION_COUNTS, RequestQueue
from llamabatch.scheduler.row_ladder import RowLadder
from llamabatch.scheduler.selection import Selection
from llamabatch.scheduler.slot_state import SlotState, WaitingState, slot_state, waiting_state
from llamabatch.scheduler.spec_decode import SpecDecoder
from llamabatch.scheduler.step_costs import StepCosts

logger = logging.getLogger(__name__)

# The status of each row is compared with these members. Before Python 3.12, a look-up in the enum takes 0.1 us.
_OK = DecodeStatus.OK
_NO_ROOM = DecodeStatus.NO_ROOM
_NOT_YET = DecodeStatus.NOT_YET


class Scheduler:
    """Owns the waiting queue, the running sequences and the slots.

    `schedule` decides a step, a runner computes the step, and `update` applies the results. `add` adds a request. A
    request leaves by `abort`, or as a finished output of `update`.

    Args:
        preempt: True: a waiting request of better priority may take the slot of a running one. False: only background
            sequences lose their slots.
        max_wait_s: if nothing runs, the first request waits for more requests for at most this many seconds; see
            `wait_s`.
        on_admit: called with each sequence that gets a slot.
        disk: stores checkpoints in files; None: checkpoints are kept only in main memory.
    """

    def __init__(
        self,
        policy: Policy,
        limits: Limits,
        clock: Callable[[], float] = time.perf_counter,
        spec_decoder: SpecDecoder | None = None,
        *,
        preempt: bool = False,
        max_wait_s: float = 0.0,
        on_admit: Callable[[Sequence], None] | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.most_slots = 1 if policy.one_slot else limits.n_slots
        self.running: list[Sequence] = []
        self.costs = StepCosts(limits)
        start_slots = min(self.most_slots, limits.start_slots or limits.n_slots)
        self._prefill_pacer = PrefillPacer(limits, self.costs)
        times = self._prefill_pacer.times
        self.prefix_cache = PrefixCache(limits, start_slots, self.costs, lambda: times.token_s, disk)
        self.adapters = AdapterScheduler()
        self.deadlines = Deadlines()
        self.counters = SequenceCounters()
        self.num_preemptions = 0
        self._kv_cache = self.prefix_cache.kv_cache
        self.slots: SlotPool = self._kv_cache.slots
        self._waiting = RequestQueue(policy.key, policy.by_family and limits.can_share)
        self._ladder = RowLadder(limits, self.costs)
        self._background_pacer = BackgroundPacer(limits)
        self._turn = BackgroundTurn.NONE  # the turn in the current step
        self._spec_decoder = spec_decoder
        self._sequences: dict[str, Sequence] = {}  # sequences in flight, by request id
        self._shifting: set[Sequence] = set()  # sequences in flight that may outgrow their slot
        self._n_background = 0  # number of background sequences in flight
        self._is_full = False  # True if the KV cache had no room for all running sequences
        self._clock = clock
        self._preempts = preempt
        self._max_wait_s = max_wait_s
        self._on_admit = on_admit
        self._first_s = 0.0  # the time when the first request came to an idle scheduler
        self._step_s = 0.0  # the time when the last step began
        self._delays_token = False  # True if the last step decoded, and a caller waited for one of its tokens
        self._step = 0

    @property
    def num_free_slots(self) -> int:
        """The number of slots for further requests, including slots that the context will get when it grows."""
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
        """Adds a sequence. If this raises, the scheduler does not contain the sequence."""
        request_id = sequence.request.request_id
        if request_id in self._sequences:
            raise InputError(f"request id {request_id!r} is already in flight")
        if not self._sequences:
            self._first_s = self._clock()
        with contextlib.ExitStack() as undo:
            undo.callback(sequence.fail, "it could not be queued")  # the queues skip a sequence that has failed
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
        """Returns the seconds to wait for more requests. The value is 0 if requests are running or enough requests are
        waiting, and None if there are no requests."""
        if not self._sequences:
            return None
        if not self._max_wait_s or self.running or len(self._waiting) >= self.most_slots:
            return 0.0
        until = min(self._first_s + self._max_wait_s, self.deadlines.next)
        return max(0.0, until - self._clock())

    def abort(self, request_id: str, error: str | None = None) -> SequenceOutput | None:
        """Ends a request now, with finish_reason "error" if an error is given. Returns None for an unknown request."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        if sequence.slot is None:
            self._waiting.forget(sequence)
        try:
            text = sequence.abort(error)
        except Exception as failure:  # the held-back text could not be released; the request still ends
            text = ""
            sequence.fail(describe(failure))
        return self._retire(sequence, (), text)

    def wanted_slots(self) -> int | None:
        """Returns the number of slots for a larger context, or None if the context has enough slots. All slots are
        added at once, so that the context grows once in an engine's life."""
        needed = min(len(self.running) + len(self._waiting), self.most_slots)
        if needed <= self.slots.n_slots or not self.policy.admits(len(self.running), 1):
            return None
        return self.most_slots

    @property
    def held_slots(self) -> list[int]:
        """The slots with cells that are in use, in ascending order: slots of running sequences, cached slots, and slots
        of sequences that have just ended and whose cells will still be copied."""
        return sorted(self._computed_slots() | self._kv_cache.cached.keys() | self.prefix_cache.source_slots())

    def grow(self, n_slots: int, carried: abc.Set[int]) -> None:
        """Adapts to a new context of `n_slots` slots. If this is not more than before, the memory has no room for more
        slots, and the scheduler will not ask for more.

        Args:
            carried: slots whose cells the context has taken over. If one of held_slots is missing, all running
                sequences are computed again.
        """
        if n_slots <= self.slots.n_slots:
            self.most_slots = n_slots
            return
        if not carried >= set(self.held_slots):
            for sequence in list(self.running):
                self._preempt(sequence, is_lost=True)
            carried = frozenset()
        self._kv_cache.grow(n_slots, carried)
        if not self.prefix_cache.cuts_anywhere:  # these checkpoints fit only a context with the old number of slots
            self.prefix_cache.drop_checkpoints(lambda key: True)

    def cached_slot(self, token_ids: abc.Sequence[int]) -> int | None:
        """Returns the slot that caches exactly these tokens, without adapters and cache_salt; None: no slot does."""
        return self._kv_cache.slot_of(token_ids)

    def load_prefix(
        self, path: str, token_ids: abc.Sequence[int], state: bytes, media_runs: tuple[MediaRun, ...] = ()
    ) -> None:
        """Stores a prefix for requests that begin with it; see PrefixStore."""
        self.prefix_cache.store.load(path, token_ids, state, media_runs)

    def unload_prefix(self, path: str) -> None:
        """Frees a loaded prefix. Raises InputError if the prefix is not loaded."""
        self.prefix_cache.store.unload(path)

    def reset_prefix_cache(self) -> None:
        """Drops the cells of finished sequences, and all checkpoints; see PrefixCache."""
        self.prefix_cache.reset()

    def uses_adapter(self, name: str) -> bool:
        """True if a request in flight uses this adapter."""
        return self.adapters.uses(name)

    def forget_adapter(self, name: str) -> None:
        """Evicts cached cells of an adapter that is about to be unloaded, because another adapter may get its name."""
        self.prefix_cache.drop(lambda key: any(name == used for used, _ in key.adapters))

    def stats(self) -> dict[str, Any]:
        """Returns fields of EngineStats. May be called from any thread, also between two parts of a step."""
        return {
            "running": len(self.running),
            "waiting": len(self._waiting),
            "free_slots": self.num_free_slots,
            "preemptions": self.num_preemptions,
            "missed_deadlines": self.deadlines.num_missed,
            "kv_cells_used": sum(sequence.num_cells for sequence in list(self.running)),
            **self.prefix_cache.stats(),
            **self.counters.stats(),
            **(vars(self._spec_decoder.counts) if self._spec_decoder is not None else {}),
        }

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return self._step

    def slot_states(self, ids: Callable[[str], tuple[str, int]]) -> tuple[SlotState, ...]:
        """Returns the slots as they are now, by id. May be called from any thread, also between two parts of a step.

        Args:
            ids: sequence id -> (id of its request, number of its continuation, from 0).
        """
        now, states = self._clock(), {}
        for sequence in list(self.running):
            slot = sequence.slot
            if slot is not None:
                own = -1 if sequence.number is None else sequence.number
                prefix = own if sequence.shared_from is None else sequence.shared_from
                waits_for = self.prefix_cache.source_slot(sequence)
                states[slot] = slot_state(slot, sequence, prefix, waits_for, now, ids(sequence.request.request_id))
        cached = dict(self._kv_cache.cached)
        free = (SlotState(slot, n_cells=cached[slot].count if slot in cached else 0) for slot in range(self.most_slots))
        return tuple(states.get(state.id, state) for state in free)

    def waiting_states(self, count: int, ids: Callable[[str], tuple[str, int]]) -> tuple[WaitingState, ...]:
        """Returns the states of at most `count` waiting sequences, in the order of the queue. May be called from any
        thread. `ids` is as in slot_states."""
        now, reason = self._clock(), "step"
        if self._is_full:
            reason = "cells"
        elif not self.num_free_slots or not self.policy.admits(len(self.running), self.num_free_slots):
            reason = "slot"
        elif self.limits.n_cells is not None and self.running:
            reason = "cells"
        elif self._max_wait_s and not self.running and len(self._waiting) < self.most_slots:
            reason = "company"
        return tuple(waiting_state(s, reason, now, ids(s.request.request_id)) for s in self._waiting.head(count))

    def schedule(self) -> SchedulerOutput:
        """Decides one step: admits waiting sequences, selects running ones, and packs their rows into calls."""
        self._step += 1
        self._step_s = self._clock()
        restores = self._admit()
        selection = self._select()
        self._turn = selection.background
        if len(selection.runnable) == len(self.running):
            self._close_holes()
        shifts = self._shift_full_slots() if self._shifting else ()
        calls = joined(self._decode_calls(selection) + self._prefill_calls(selection), self.limits)
        if selection.rotates_adapters:
            self.adapters.count_step(calls)
        copies, cuts = self._kv_cache.pop_actions()
        share = self.limits.prefill_share if self._delays_token and selection.is_streamed else 1.0
        return SchedulerOutput(copies, cuts, tuple(calls), shifts, restores, self.prefix_cache.pop_saves(), share)

    def _admit(self) -> tuple[Restore, ...]:
        """Gives slots to waiting sequences, and gives prefixes to running sequences that wait for a prefix. Returns
        this step's restores."""
        self.prefix_cache.save_reached(self.running)
        restores = self.prefix_cache.restores(self.running)
        # copies are made before admissions and again after them, because an admission may overwrite the cells of a
        # source that has just finished
        self.prefix_cache.copy_ready(self.running)
        self._admit_waiting()
        self.prefix_cache.copy_ready(self.running)
        return restores

    def _select(self) -> Selection:
        """Selects the running sequences that compute in this step: by tier, shared prefix, adapters and policy."""
        first_tier = foreground(self.running) if self._n_background else self.running
        n_first_tier = 0 if self.running and first_tier[0].background else len(first_tier)
        turn = self._background_pacer.turn(n_first_tier, len(self.running) - n_first_tier)
        tier = self.running if turn in (BackgroundTurn.DECODE, BackgroundTurn.PREFILL) else first_tier
        waits = self.prefix_cache.waits
        ready = [s for s in tier if not waits(s)] if self.prefix_cache.n_waiting else tier
        rotates_adapters = self.adapters.in_use
        runnable = self.policy.select(self.adapters.choose(ready) if rotates_adapters else ready)
        if turn is BackgroundTurn.SHARE:
            runnable = [*runnable, *self._sharing(runnable)]
        packs_rows = self.limits.packs_any and self._spec_decoder is None  # rows with guesses have separate calls
        return Selection(runnable, first_tier, turn, rotates_adapters, packs_rows)

    def _sharing(self, runnable: abc.Sequence[Sequence]) -> list[Sequence]:
        """Returns the background sequences that compute in the same pass as these foreground sequences."""
        behind = [s for s in self.running if s.background and not self.prefix_cache.waits(s)]
        if runnable:
            behind = [s for s in behind if s.request.adapters == runnable[0].request.adapters]
        return self._background_pacer.sharing(behind)

    def _decode_calls(self, selection: Selection) -> list[Call]:
        """Returns calls with one row for each decoding sequence. With speculation, a sequence may
        also have rows for guessed tokens."""
        # decode calls come before prefill calls, so that a dummy row can still use an empty slot
        if self._ladder.is_on and self._spec_decoder is None and selection.decoding:
            call = self._ladder.call(selection.decoding, self._held_cells(selection.decoding), self.slots.n_slots)
            if call is not None:
                return [call]
        occupied = self._computed_slots()
        if self.limits.can_pad and not self.limits.packs_any:
            self.prefix_cache.evict_between(selection.decoding, occupied)
        if self._spec_decoder is None:
            max_gap = self.costs.pass_in_rows(MAX_DUMMY_GAP)
            return decode_calls(selection.decoding, occupied, self.limits, max_gap)
        return self._spec_decoder.calls(selection.decoding, occupied)

    def _prefill_calls(self, selection: Selection) -> list[Call]:
        """Returns the prefill calls of the step. They compute chunks of the selected prompts, and of background prompts
        if these get a part of the step."""
        # if no sequence decodes, a long step delays no token
        self._delays_token = selection.token_is_awaited and bool(selection.decoding)
        prompts, budget = self._prefill_pacer.choose(
            selection.prompts,
            self._delays_token,
            selection.n_foreground_rows,
            is_streamed=selection.is_streamed,
            takes_long=selection.background is not BackgroundTurn.PREFILL,
        )
        # a request must not wait for long if it arrives now or has other adapters
        if selection.is_background:
            budget = min(budget, self._background_pacer.alone_chunk)
        elif selection.rotates_adapters and selection.token_is_awaited:
            budget = min(budget, self.limits.prefill_budget)
        ends_soon = bool(prompts) and prompts[0].num_pending <= self.limits.n_ubatch
        if self.limits.packs_any and (selection.decoding or (selection.packs_rows and ends_soon)):
            # prompts get one pass, which also computes decode rows; prompts that end in this pass decode in the next
            # pass
            budget = min(budget, max(LEAST_CHUNK, self.limits.n_ubatch - len(selection.decoding)))
        stops = self.prefix_cache.stops(self.running)
        calls = prefill_calls(prompts, budget, self.limits, stops)
        if selection.background_prompts:
            times = self._prefill_pacer.times
            n_rows = len(selection.decoding) - selection.n_foreground_rows
            chunk = self._background_pacer.chunk(n_rows, times.plain_s, times.token_s)
            calls += prefill_calls(selection.background_prompts, chunk, self.limits, stops)
        return calls

    def _admit_waiting(self) -> None:
        if self._is_full and self.running:
            return  # the KV cache has no room until a running sequence has finished
        for _ in range(self.policy.admits(len(self.running), self.slots.n_free)):
            if not self._admit_next():
                break
        while self._waiting and (self._preempts or self._n_background) and self._preempt_for_next():
            admitted = self._admit_next()
            assert admitted

    def _preempt_for_next(self) -> bool:
        """Preempts sequences so that the next waiting sequence gets a slot. Returns False if preemption would not
        help."""
        first = self._waiting.first()
        if first is None or not self.policy.admits(len(self.running) - 1, 1):
            return False
        leaving = victims(first, self.running, self.slots.n_free, self.limits.n_cells, self._preempts)
        for sequence in leaving:
            sequence.overtaken += PREEMPTION_COUNTS
            self._preempt(sequence)
        return bool(leaving)

    def _has_cells_for(self, sequence: Sequence) -> bool:
        """True if the KV cache has room for all cells that the running sequences and this sequence may use.

        A split cache always has room, because no request needs more than the n_ctx cells of its slot.
        """
        return self.limits.n_cells is None or sequence.most_cells <= self.limits.n_cells - self._claimed_cells

    @property
    def _claimed_cells(self) -> int:
        """The maximum number of cells of all running sequences together."""
        return sum(s.most_cells for s in self.running)

    def _admit_next(self) -> bool:
        """Gives a slot to one of the waiting sequences. Returns False if the KV cache has room for none of them."""
        sequence = self._waiting.pop(self._has_cells_for)
        if sequence is None:
            return False
        placement = Placement(
            peer_slots(sequence, self.running) if self._n_background else None,
            from_top=sequence.background,
            neighbours=self.adapters.neighbours(sequence, self.running),
        )
        if not sequence.was_admitted:
            self.counters.count_admission(sequence, self._clock())
        self.prefix_cache.admit(sequence, self.running, placement)
        self.running.append(sequence)
        if self._on_admit is not None:
            self._on_admit(sequence)
        if self.limits.n_cells is not None:  # cached cells must not take the room of running sequences
            self._kv_cache.evict_to(self.limits.n_cells - self._claimed_cells)
        return True

    def _close_holes(self) -> None:
        """Moves sequences into holes in the slot ids, to save dummy rows. Does nothing while sequences wait, because
        they will fill the holes."""
        if self._waiting or self.limits.packs_any or not self.limits.can_share:
            return
        first_tier = foreground(self.running) if self._n_background else self.running
        behind = [s for s in self.running if s.background] if len(first_tier) < len(self.running) else []
        min_steps = 2 * self.costs.copy_in_rows(MIN_STEPS_TO_MOVE // 2)  # a move saves a dummy row in each step
        # one tier after the other, because two tiers may need the same hole
        for sequences, up in ((first_tier, False), (behind, True)):
            if not sequences or (self._ladder.is_on and self._ladder.fills(sequences)):
                continue
            for sequence, new in moves(sequences, self.slots.free, up=up, min_steps=min_steps):
                assert sequence.slot is not None
                old, sequence.slot = sequence.slot, self._kv_cache.lease_this(new)
                if sequence.num_cells:
                    self._kv_cache.copy(old, new, sequence.num_cells)
                self._kv_cache.vacate(old)

    def _shift_full_slots(self) -> tuple[Shift, ...]:
        """Returns the shifts of full slots. A shift makes a slot forget some cells. The token at which a slot is
        shifted does not depend on other slots."""
        full = [s for s in self._shifting if s.slot is not None and s.num_room == 0]
        return tuple(Shift(s.slot, *s.shift()) for s in full if s.slot is not None)

    def _computed_slots(self) -> set[int]:
        """Returns the slots of running sequences that have cells."""
        return {s.slot for s in self.running if s.num_computed and s.slot is not None}

    def _held_cells(self, decoding: abc.Sequence[Sequence]) -> dict[int, int]:
        """Returns slot -> number of tokens in it, for slots with cached cells. If some running sequences do not decode
        in this step, the slots of all running sequences are included."""
        held = {slot: cached.count for slot, cached in self._kv_cache.cached.items()}
        if len(decoding) < len(self.running):
            held.update((s.slot, s.num_cells) for s in self.running if s.slot is not None)
        return held

    def update(self, batch: SchedulerOutput, results: abc.Sequence[SpanOutput]) -> list[SequenceOutput]:
        """Applies the results of a step.

        Args:
            results: one result for each span, in the order of `batch.spans`.
        """
        now, spans = self._clock(), batch.spans
        self.prefix_cache.settle()
        self.costs.observe(batch, now - self._step_s)
        if not batch.has_media:
            self._observe(spans, now - self._step_s)
        else:
            computed = [span for span, result in zip(spans, results, strict=True) if result.status is not _NOT_YET]
            self._observe(computed, now - self._step_s - sum([result.encoder_s for result in results]))
        if self._spec_decoder is not None:
            self._spec_decoder.observe(batch, results)
        retries = self._make_room(results)
        if any(restore.prefix.is_refused for restore in batch.restores):
            self._recompute_unfilled(batch)
        outputs = []
        for span, result in zip(spans, results, strict=True):
            try:
                output = self._apply(span, result, now, retries)
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

    def _recompute_unfilled(self, batch: SchedulerOutput) -> None:
        """Drops the checkpoints that llama.cpp refused. Sequences that should have started with cells of these
        checkpoints are queued again, and computed from the beginning."""
        unfilled: set[int] = set()
        for restore in batch.restores:
            if restore.prefix.is_refused and restore.prefix.path is None:
                self.prefix_cache.store.discard(restore.prefix)
                unfilled.add(restore.slot)
        for copy in batch.copies:
            (unfilled.add if copy.source in unfilled else unfilled.discard)(copy.target)
        for slot in unfilled & self._kv_cache.cached.keys():
            self._kv_cache.evict(slot, is_lost=True)
        for sequence in [sequence for sequence in self.running if sequence.slot in unfilled]:
            sequence.begin_at(0)  # none of its tokens counts as cached any more
            self._preempt(sequence, is_lost=True)

    def _observe(self, spans: list[ScheduledSpan], seconds: float) -> None:
        """Gives the pacers the duration of a step and its numbers of foreground and background tokens."""
        turn, n_background = self._turn, 0
        if turn is not BackgroundTurn.NONE:
            n_background = sum(span.length for span in spans if span.sequence.background)
            spans = [span for span in spans if not span.sequence.background]
        chunks = [span.length for span in spans if span.length > 1 and span.draft is None]
        n_rows = len(spans) - len(chunks)
        if turn in (BackgroundTurn.NONE, BackgroundTurn.SHARE):
            self._prefill_pacer.observe(seconds, n_rows, sum(chunks), self._delays_token)
        if not chunks:
            self._background_pacer.observe(seconds, n_rows, n_background)

    def _make_room(self, results: abc.Sequence[SpanOutput]) -> bool:
        """Frees cells if a span found no free cell. Frees cached cells, or the cells of a victim if there are no cached
        cells.

        Returns True if a retry can succeed; False if the only running sequence has no room.
        """
        alone = len(self.running) == 1
        if not [result for result in results if result.status is _NO_ROOM]:
            return not alone
        if self._kv_cache.cached and self.limits.is_unified:
            self._kv_cache.evict_to(0)
            return True
        if alone:
            return False
        self._preempt(max(reversed(self.running), key=lambda s: s.request.tier))  # the youngest of the worst tier
        self._is_full = True
        return True

    def _apply(self, span: ScheduledSpan, result: SpanOutput, now: float, retries: bool) -> SequenceOutput | None:
        """Applies one result. Returns None if there is nothing to emit.

        Args:
            retries: True: a span without room is tried again in the next step. False: the sequence of the span fails.
        """
        sequence, start, status = span.sequence, span.start, result.status
        sequence.last_step = self._step
        if sequence.slot is None or status is _NOT_YET or (status is _NO_ROOM and retries):
            return None
        if sequence.num_computed - sequence.num_discarded != start or sequence.finish_reason is not None:
            return None  # an earlier piece of the same prompt has failed
        if status is not _OK:
            sequence.fail(result.error or "the KV cache is too small for this request, even alone")
            return self._retire(sequence, (), "")
        sequence.num_computed = start + span.length + span.shift
        record = sequence.logprobs
        if span.prompt_rows and record is not None:
            record.add_prompt(result.logprobs[: span.prompt_rows])
            if sequence.scores and record.prompt_is_read:
                sequence.end_score()
                return self._retire(sequence, (), "")
        return self._accept(span, result, now) if result.token_ids else None

    def _accept(self, span: ScheduledSpan, result: SpanOutput, now: float) -> SequenceOutput:
        """Appends the sampled tokens of a span to its sequence, up to the token that ends the sequence."""
        sequence, sampled = span.sequence, result.token_ids
        text, n_accepted, before = "", 0, sequence.last_token_s
        for token_id in sampled:
            text += sequence.accept(token_id, now)
            n_accepted += 1
            if sequence.finish_reason is not None:
                break
        self.counters.count_tokens(sequence, n_accepted, before, now)
        if span.draft is not None:  # the cells behind the accepted tokens contain wrong guesses
            sequence.num_computed = span.start + n_accepted + span.shift
        accepted, record, logprobs = sampled[:n_accepted], sequence.logprobs, None
        if record is not None:
            logprobs = record.add(result.logprobs[span.prompt_rows : span.prompt_rows + n_accepted])
        if sequence.finish_reason is None:
            return SequenceOutput.of_step(sequence.request.request_id, accepted, text, logprobs)
        output = self._retire(sequence, accepted, text, logprobs)
        if n_accepted < len(sampled):
            if self.limits.can_cut:
                self._kv_cache.cut(span.slot, sequence.num_cells)
            else:
                self._kv_cache.evict(span.slot, is_lost=True)
        return output

    def _failed(self, sequence: Sequence, error: Exception) -> SequenceOutput:
        """Ends a sequence whose result could not be applied. Other sequences continue."""
        if sequence.request.request_id not in self._sequences or sequence not in self.running:
            raise error  # the removal of the sequence failed, so slots and queues may be wrong
        logger.warning("the result of a step could not be applied to a request", exc_info=error)
        sequence.fail(describe(error))
        return self._retire(sequence, (), "")

    def _retire(
        self, sequence: Sequence, token_ids: tuple[int, ...], text: str, logprobs: SampleLogprobs = None
    ) -> SequenceOutput:
        """Removes a finished sequence, and returns its last output."""
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
                self._kv_cache.cache(sequence.slot, sequence)
        return SequenceOutput(request_id, token_ids, text, _output_of(sequence), logprobs=logprobs)

    def _preempt(self, sequence: Sequence, *, is_lost: bool = False) -> None:
        """Frees the slot of a running sequence, and queues the sequence again.

        Args:
            is_lost: True if the slot does not contain the sequence's cells any more.
        """
        assert sequence.slot is not None
        self.running.remove(sequence)
        if not is_lost:
            self.prefix_cache.keep_preempted(sequence)
        self._kv_cache.vacate(sequence.slot)
        sequence.preempt()
        self.prefix_cache.on_preempted(sequence)
        self.num_preemptions += 1
        self._waiting.add(sequence)

    def check_integrity(self) -> None:
        """Raises ValueError if slots and running sequences disagree. This would be a bug of llamabatch."""
        self._kv_cache.check_integrity()
        self.prefix_cache.store.check_integrity()
        if sorted(s.slot for s in self.running if s.slot is not None) != sorted(self.slots.leased):
            raise ValueError("leased slots and running sequences differ")


def _output_of(sequence: Sequence) -> RequestOutput:
    try:
        return sequence.output()
    except Exception as error:  # the text or the logprobs could not be made; the rest of the output is lost as well
        return RequestOutput.failed(sequence.request, sequence.error or describe(error))
