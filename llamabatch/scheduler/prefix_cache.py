"""Beginnings of prompts that need not be computed: cells of finished sequences, of running ones, and of loaded files.

Pure Python.
"""

from __future__ import annotations

import itertools
from collections import abc
from typing import Any

from llamabatch.request.outputs import FinishReason
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.batch_builder import MAX_DUMMY_GAP
from llamabatch.scheduler.common_prefix import best_source
from llamabatch.scheduler.kv_cache import KVCacheManager, Placement
from llamabatch.scheduler.output import Limits, Restore
from llamabatch.scheduler.preemption import copy_candidates
from llamabatch.scheduler.prefix_store import PrefixStore, StoredPrefix
from llamabatch.scheduler.step_costs import StepCosts

# A second pass over the weights costs as much as this many prompt tokens (0.5B Q8_0: 23 ms, and 770 tokens/s).
PASS_IN_TOKENS = 18


class PrefixCache:
    """Gives each admitted sequence the slot, or the copy, that saves the most of its prompt.

    Args:
        n_slots: slots that the context starts with.

    Attributes:
        kv_cache: the slots and their cells.
        store: prefixes loaded from files.
        num_shared_tokens: tokens copied from running sequences.
        num_prefix_hits, num_prefix_tokens: sequences that began with cells of finished ones, or from a file; tokens
            of these.
    """

    def __init__(self, limits: Limits, n_slots: int, costs: StepCosts) -> None:
        self.kv_cache = KVCacheManager(n_slots, limits, costs)
        self._costs = costs
        self.store = PrefixStore()
        self.num_shared_tokens = 0
        self.num_prefix_hits = 0
        self.num_prefix_tokens = 0
        self._limits = limits
        # request id -> the loaded prefix that the next step fills its slot with, and how many tokens of it
        self._restoring: dict[str, tuple[StoredPrefix, int]] = {}
        # request id -> the sequence that computes the prefix which it will copy, None once that one was preempted;
        # how many tokens of it
        self._sources: dict[str, tuple[Sequence | None, int]] = {}

    def stats(self) -> dict[str, Any]:
        """Fields of EngineStats."""
        return {
            "shared_tokens": self.num_shared_tokens,
            "prefix_hits": self.num_prefix_hits,
            "prefix_tokens": self.num_prefix_tokens,
        }

    def admit(self, sequence: Sequence, running: abc.Sequence[Sequence], placement: Placement) -> None:
        """Leases a slot: the one where a finished sequence left its beginning, if no running one has more of it."""
        cached = source = stored = None
        if self._limits.can_share and sequence.request.params.skip_reading_prefix_cache:
            source = best_source(sequence, copy_candidates(sequence, siblings(sequence, running)))
        elif self._limits.can_share:
            cached, source = self.kv_cache.find(sequence), best_source(sequence, copy_candidates(sequence, running))
            known = max((found[1] for found in (cached, source) if found is not None), default=0)
            stored = self.store.find(sequence, known)
        if stored is not None:  # filled in the next step: nothing copies from the slot, or to it, any more
            sequence.admit(self.kv_cache.lease(placement))
            self._restoring[sequence.request.request_id] = stored
            return
        if cached is not None and (source is None or cached[1] >= source[1]):
            sequence.admit(self.kv_cache.lease_prefix(*cached, placement))
            self._count_hit(sequence, cached[1])
            return
        sequence.admit(self.kv_cache.lease(placement))
        if source is not None:
            self._sources[sequence.request.request_id] = source

    @property
    def n_waiting(self) -> int:
        """Number of sequences that wait for cells; see `waits`."""
        return len(self._sources) + len(self._restoring)

    def waits(self, sequence: Sequence) -> bool:
        """True while a sequence waits for cells: those that another computes, or those of a file."""
        return sequence.request.request_id in self._sources or sequence.request.request_id in self._restoring

    def restores(self, running: abc.Sequence[Sequence]) -> tuple[Restore, ...]:
        """Loaded prefixes for sequences that were admitted before this step."""
        if not self._restoring:
            return ()
        restores = []
        for sequence in running:
            prefix, count = self._restoring.pop(sequence.request.request_id, (None, 0))
            if prefix is not None and prefix in self.store and sequence.slot is not None:
                restores.append(Restore(sequence.slot, prefix, count))
                self._count_hit(sequence, count)
        return tuple(restores)

    def copy_ready(self, running: abc.Sequence[Sequence]) -> None:
        """Copies prefixes to the sequences that wait for them, as far as their sources have computed enough."""
        if not self._sources:
            return
        for sequence in running:
            request_id = sequence.request.request_id
            if request_id not in self._sources or sequence.slot is None:
                continue
            source, count = self._sources[request_id]
            if source is None or source.slot is None or _ended_early(source) or source.num_shareable < count:
                self.forget(sequence)
                self._find_other_source(sequence, running)
            elif source.num_computed >= count:
                self.forget(sequence)
                self.kv_cache.copy(source.slot, sequence.slot, count)
                sequence.begin_at(count)
                sequence.shared_from = source.number if source.shared_from is None else source.shared_from
                self.num_shared_tokens += count

    def source_slot(self, sequence: Sequence) -> int | None:
        """The slot that computes the prefix which `sequence` will copy; None: it waits for none."""
        source, _ = self._sources.get(sequence.request.request_id, (None, 0))
        return None if source is None else source.slot

    def source_slots(self) -> set[int]:
        """Slots with computed cells that are still to be copied."""
        sources = (source for source, _ in self._sources.values() if source is not None and source.num_computed)
        return {source.slot for source in sources if source.slot is not None}

    def forget(self, sequence: Sequence) -> None:
        """`sequence` ended, or lost its slot: it waits for no cells."""
        self._sources.pop(sequence.request.request_id, None)
        self._restoring.pop(sequence.request.request_id, None)

    def on_preempted(self, sequence: Sequence) -> None:
        """`sequence` was preempted. Cancels copies that wait for it: admitted again after their sequences, it could
        wait for one of them, and neither would ever run."""
        self.forget(sequence)
        for request_id, (source, count) in self._sources.items():
            if source is sequence:
                self._sources[request_id] = (None, count)

    def reset(self) -> None:
        """Gives up the cells of all finished sequences. Cells of running ones and prefixes from files stay."""
        self.kv_cache.evict_keys(lambda key: True)

    def evict_between(self, decoding: abc.Sequence[Sequence], occupied: set[int]) -> None:
        """Evicts cached cells between rows, unless computing them again would cost more than a second pass until the
        end of one of the sequences.

        Args:
            occupied: slots that hold cells; those of the cached cells that stay are added.
        """
        cached = self.kv_cache.cached
        slots = sorted([s.slot for s in decoding if s.slot is not None]) if cached else []
        if not slots or slots[-1] - slots[0] < len(slots):
            return
        max_gap, of_pass = (self._costs.pass_in_rows(rows) for rows in (MAX_DUMMY_GAP, PASS_IN_TOKENS))
        for left, right in itertools.pairwise(slots):
            gap = range(left + 1, right)
            within = [slot for slot in gap if slot in cached]
            if not within or len(gap) > max_gap or not occupied.isdisjoint(gap):
                continue
            steps = max(s.most_steps_left for s in decoding)
            if sum(map(self.kv_cache.expected_saving, within)) < of_pass * steps:
                for slot in within:
                    self.kv_cache.evict(slot)
        occupied.update(cached)

    def _find_other_source(self, sequence: Sequence, running: abc.Sequence[Sequence]) -> None:
        """The source of `sequence` is lost. Its cells may still be cached; else only sequences admitted before this one
        count: two that wait for each other would wait for ever."""
        assert sequence.slot is not None
        earlier: abc.Iterator[Sequence] = itertools.takewhile(lambda other: other is not sequence, running)
        cached = None
        if sequence.request.params.skip_reading_prefix_cache:
            earlier = siblings(sequence, earlier)
        else:
            cached = self.kv_cache.find(sequence)
        source = best_source(sequence, copy_candidates(sequence, earlier))
        if cached is not None and (source is None or cached[1] >= source[1]):
            self.kv_cache.copy(cached[0], sequence.slot, cached[1])
            self._count_hit(sequence, cached[1])
        elif source is not None:
            self._sources[sequence.request.request_id] = source

    def _count_hit(self, sequence: Sequence, count: int) -> None:
        sequence.begin_at(count)
        self.num_prefix_hits += 1
        self.num_prefix_tokens += count


def siblings(sequence: Sequence, others: abc.Iterable[Sequence]) -> abc.Iterator[Sequence]:
    """Those of the others that are continuations of the same request."""
    request, _, index = sequence.request.request_id.partition("\0")  # see ParallelSampling.split
    return (other for other in others if index and other.request.request_id.partition("\0")[0] == request)


def _ended_early(source: Sequence) -> bool:
    return source.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
