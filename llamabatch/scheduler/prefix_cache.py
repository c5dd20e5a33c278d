"""Who begins with whose cells: those that a finished sequence left, or copies of a running one's. Pure Python."""

from __future__ import annotations

import itertools
from collections import abc
from typing import Any

from llamabatch.request.outputs import FinishReason
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.batch_builder import MAX_DUMMY_GAP
from llamabatch.scheduler.common_prefix import best_source
from llamabatch.scheduler.kv_cache import KVCacheManager
from llamabatch.scheduler.output import Limits, Restore
from llamabatch.scheduler.preemption import copy_candidates
from llamabatch.scheduler.prefix_store import PrefixStore, StoredPrefix

# A second pass over the weights costs as much as this many prompt tokens (0.5B Q8_0: 23 ms, and 770 tokens/s).
PASS_IN_TOKENS = 18


class PrefixCache:
    """Finds beginnings that need not be computed, and has them copied.

    Args:
        n_slots: that the context starts with.

    Attributes:
        kv_cache: the slots and their cells.
        store: prefixes loaded from files.
        num_shared_tokens: copied from running sequences.
        num_prefix_hits, num_prefix_tokens: sequences that began with cells of finished ones, or from a file; tokens
            of these.
    """

    def __init__(self, limits: Limits, n_slots: int) -> None:
        self.kv_cache = KVCacheManager(n_slots, limits)
        self.num_shared_tokens = 0
        self.num_prefix_hits = 0
        self.num_prefix_tokens = 0
        self.store = PrefixStore()
        # request id -> the loaded prefix that the next step fills its slot with, and how many tokens of it
        self._restoring: dict[str, tuple[StoredPrefix, int]] = {}
        self._limits = limits
        # request id -> whose prefix it waits to copy, None if that one has lost its slot; how much of it
        self._sources: dict[str, tuple[Sequence | None, int]] = {}

    def stats(self) -> dict[str, Any]:
        """Fields of EngineStats."""
        return {
            "shared_tokens": self.num_shared_tokens,
            "prefix_hits": self.num_prefix_hits,
            "prefix_tokens": self.num_prefix_tokens,
        }

    def waits(self, sequence: Sequence) -> bool:
        """Does it wait for another to compute what it will copy?"""
        return sequence.request.request_id in self._sources or sequence.request.request_id in self._restoring

    def source_slots(self) -> set[int]:
        """The slots of those whose prefix others wait to copy, as far as it is computed."""
        sources = (source for source, _ in self._sources.values() if source is not None and source.num_computed)
        return {source.slot for source in sources if source.slot is not None}

    def forget(self, sequence: Sequence) -> None:
        """It ended, or lost its slot: it looks again when it comes back."""
        self._sources.pop(sequence.request.request_id, None)
        self._restoring.pop(sequence.request.request_id, None)

    def lost(self, sequence: Sequence) -> None:
        """It lost its slot. Who waits for it must look again even if it comes back before that is noticed, now behind
        them: it may then wait for one of them."""
        self.forget(sequence)
        for request_id, (source, count) in self._sources.items():
            if source is sequence:
                self._sources[request_id] = (None, count)

    def enter(
        self,
        sequence: Sequence,
        running: abc.Sequence[Sequence],
        own: abc.Sequence[int] | None,
        top: bool,
        beside: abc.Sequence[int] | None,
    ) -> None:
        """Leases a slot: where a finished sequence left its beginning, if nobody who runs has more of it.

        Args:
            own, top, beside: which slots it should stand near; see KVCacheManager.lease.
        """
        kept = source = None
        if self._limits.can_share:
            kept, source = self.kv_cache.best(sequence), best_source(sequence, copy_candidates(sequence, running))
        known = max((found[1] for found in (kept, source) if found is not None), default=0)
        stored = self.store.find(sequence, known) if self._limits.can_share else None
        if stored is not None:  # filled in the next step: nothing copies from the slot, or to it, any more
            sequence.admit(self.kv_cache.lease(own=own, top=top, beside=beside))
            self._restoring[sequence.request.request_id] = stored
            return
        if kept is not None and (source is None or kept[1] >= source[1]):
            sequence.admit(self.kv_cache.lease_prefix(*kept, own=own, top=top))
            self._count_hit(sequence, kept[1])
            return
        sequence.admit(self.kv_cache.lease(own=own, top=top, beside=beside))
        if source is not None:
            self._sources[sequence.request.request_id] = source

    def restores(self, running: abc.Sequence[Sequence]) -> tuple[Restore, ...]:
        """For those that have entered before this step and begin as a file does."""
        if not self._restoring:
            return ()
        restores = []
        for sequence in running:
            prefix, count = self._restoring.pop(sequence.request.request_id, (None, 0))
            if prefix is not None and prefix in self.store and sequence.slot is not None:
                restores.append(Restore(sequence.slot, prefix, count))
                self._count_hit(sequence, count)
        return tuple(restores)

    def _count_hit(self, sequence: Sequence, count: int) -> None:
        sequence.num_computed = count
        self.num_prefix_hits += 1
        self.num_prefix_tokens += count

    def _look_again(self, sequence: Sequence, running: abc.Sequence[Sequence]) -> None:
        """Its source was lost: what that has left may serve, or another that entered before it: two that wait for each
        other would wait for ever."""
        assert sequence.slot is not None
        earlier = itertools.takewhile(lambda other: other is not sequence, running)
        kept, source = self.kv_cache.best(sequence), best_source(sequence, copy_candidates(sequence, earlier))
        if kept is not None and (source is None or kept[1] >= source[1]):
            self.kv_cache.copy(kept[0], sequence.slot, kept[1])
            self._count_hit(sequence, kept[1])
        elif source is not None:
            self._sources[sequence.request.request_id] = source

    def copy_ready(self, running: abc.Sequence[Sequence]) -> None:
        """Copies for those whose source has computed enough."""
        if not self._sources:
            return
        for sequence in running:
            request_id = sequence.request.request_id
            if request_id not in self._sources or sequence.slot is None:
                continue
            source, count = self._sources[request_id]
            if source is None or source.slot is None or _ended_early(source) or source.num_shareable < count:
                self.forget(sequence)
                self._look_again(sequence, running)
            elif source.num_computed >= count:
                self.forget(sequence)
                self.kv_cache.copy(source.slot, sequence.slot, count)
                sequence.num_computed = count
                self.num_shared_tokens += count

    def evict_between(self, decoding: abc.Sequence[Sequence], occupied: set[int]) -> None:
        """What is kept between rows stays only where computing it again would cost more than a second pass until the
        end of one of them. `occupied` then holds the slots of what stays."""
        slots = sorted(s.slot for s in decoding if s.slot is not None)
        if not self.kv_cache.cached or not slots or slots[-1] - slots[0] < len(slots):
            return
        for left, right in itertools.pairwise(slots):
            gap = range(left + 1, right)
            kept = [slot for slot in gap if slot in self.kv_cache.cached]
            if not kept or len(gap) > MAX_DUMMY_GAP or not occupied.isdisjoint(gap):
                continue
            steps = max(s.most_steps_left for s in decoding)
            if sum(map(self.kv_cache.expected_saving, kept)) < PASS_IN_TOKENS * steps:
                for slot in kept:
                    self.kv_cache.evict(slot)
        occupied.update(self.kv_cache.cached)


def _ended_early(source: Sequence) -> bool:
    return source.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
