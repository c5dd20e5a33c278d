"""Finds beginnings of prompts that need not be computed: in finished sequences, running sequences and stored prefixes.
Pure Python."""

from __future__ import annotations

import itertools
import math
from collections import abc
from collections.abc import Callable
from typing import Any

from llamabatch.request.outputs import FinishReason
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.batch_builder import MAX_DUMMY_GAP
from llamabatch.scheduler.common_prefix import MIN_SHARED, ShareKey, best_source, common_length, share_key
from llamabatch.scheduler.kv_cache import MOST_OPENING, CachedPrefix, KVCacheManager, Placement
from llamabatch.scheduler.output import Limits, Restore, Save
from llamabatch.scheduler.preemption import copy_candidates
from llamabatch.scheduler.prefix_store import MIN_CHECKPOINT, MIN_GAIN, DiskTier, PrefixStore, StoredPrefix
from llamabatch.scheduler.step_costs import StepCosts

# A second pass over the weights costs as much as this many prompt tokens (0.5B Q8_0: a pass 23 ms, a token 1.3 ms).
PASS_IN_TOKENS = 18
# The time to copy a cell to main memory, divided by the time to compute the cell. The value is used until both times
# are measured (0.5B Q8_0 on two cores: a token has 12 kB, takes 4 to 12 us to copy, and 1.3 ms to compute).
_COPY_SHARE = 1 / 150
_COPY_TOKENS = 10  # computing this many tokens takes as long as a copy of a recurrent state of 20 MB (0.8B shape)
_LEAST_GAIN = 8  # minimum number of tokens that a copy must save
# If a copy takes at most the share _LITTLE of the sequence's computing time, the copy is made even if its use is
# unlikely. The chance of use must still be at least _LEAST_CHANCE. The chance falls below this value after some 200
# texts that nobody continues.
_LITTLE = 1 / 32
_LEAST_CHANCE = 1 / 64


class PrefixCache:
    """Gives each admitted sequence the longest useful beginning of its prompt: cached cells, a copy, or a stored
    prefix.

    Args:
        n_slots: slots that the context starts with.
        token_s: returns the measured seconds for a prompt token; None: not known.

    Attributes:
        kv_cache: the slots and their cells.
        store: prefixes loaded from files, and checkpoints.
        cuts_anywhere: True if the contents of a slot can be cut to any number of tokens.
        num_shared_tokens: number of tokens copied from running sequences.
        num_prefix_hits: number of sequences that began with cells of a finished sequence, or with a stored prefix.
        num_prefix_tokens: number of tokens that these sequences did not have to compute.
        num_restored_tokens: the part of num_prefix_tokens that came from the store.
        num_read_tokens: the part of num_prefix_tokens that came from the store's disk.
    """

    def __init__(
        self,
        limits: Limits,
        n_slots: int,
        costs: StepCosts,
        token_s: Callable[[], float | None] = lambda: None,
        disk: DiskTier | None = None,
    ) -> None:
        self.kv_cache = KVCacheManager(n_slots, limits, costs)
        self._costs = costs
        self._token_s = token_s
        self.cuts_anywhere = limits.can_cut and not limits.has_window
        self.store = PrefixStore(limits.state_bytes, is_exact=not self.cuts_anywhere, disk=disk)
        if self.store.keeps_checkpoints:
            self.kv_cache.on_loss = self._on_loss
        self._stops_early = self.store.keeps_checkpoints and not limits.can_cut and limits.keeps_prefixes
        # request id -> the token counts at which checkpoints of its sequence are made, in ascending order
        self._places: dict[str, list[int]] = {}
        self._saves: list[Save] = []
        self.num_shared_tokens = 0
        self.num_prefix_hits = 0
        self.num_prefix_tokens = 0
        self.num_restored_tokens = 0
        self.num_read_tokens = 0
        self._limits = limits
        # request id -> (the stored prefix for the sequence's slot, the number of its tokens to use)
        self._restoring: dict[str, tuple[StoredPrefix, int]] = {}
        self._fetched: set[StoredPrefix] = set()  # prefixes in _restoring that are read from disk
        self._tried: dict[int, CachedPrefix] = {}  # slot -> the cells that next_write has already considered
        # request id -> (the source of a copy, or None if the source was preempted; the number of tokens to copy)
        self._sources: dict[str, tuple[Sequence | None, int]] = {}

    def stats(self) -> dict[str, Any]:
        """Returns the fields of EngineStats that this cache counts."""
        return {
            "shared_tokens": self.num_shared_tokens,
            "prefix_hits": self.num_prefix_hits,
            "prefix_tokens": self.num_prefix_tokens,
            "restored_tokens": self.num_restored_tokens,
            "read_tokens": self.num_read_tokens,
            "cache_ram_bytes": self.store.n_bytes,
        }

    def admit(self, sequence: Sequence, running: abc.Sequence[Sequence], placement: Placement) -> None:
        """Leases a slot for a sequence. Chooses the cells that the sequence begins with: cells of a finished or
        running sequence, or a stored prefix."""
        cached = source = stored = None
        if self._limits.can_share and sequence.request.params.skip_reading_prefix_cache:
            source = self._best_source(sequence, siblings(sequence, running))
        elif self._limits.can_share:
            cached, source = self.kv_cache.find(sequence), self._best_source(sequence, running)
            known = max((found[1] for found in (cached, source) if found is not None), default=0)
            stored = self._find_stored(sequence, known)
            if self._stops_early and not sequence.scores:
                self._choose_places(sequence, running, known if stored is None else stored[1])
        if stored is not None:
            sequence.admit(self.kv_cache.lease(placement))
            self._await_restore(sequence, stored)
            return
        if cached is not None and (source is None or cached[1] >= source[1]):
            sequence.least_cut = self.kv_cache.cached[cached[0]].least_cut
            sequence.admit(self.kv_cache.lease_prefix(*cached, placement))
            self._count_hit(sequence, cached[1])
            return
        sequence.admit(self.kv_cache.lease(placement))
        if source is not None:
            self._sources[sequence.request.request_id] = source

    @property
    def n_waiting(self) -> int:
        """The number of sequences that wait for cells; see `waits`."""
        return len(self._sources) + len(self._restoring)

    def waits(self, sequence: Sequence) -> bool:
        """True while a sequence waits for cells that another sequence computes, or for a stored prefix."""
        return sequence.request.request_id in self._sources or sequence.request.request_id in self._restoring

    def restores(self, running: abc.Sequence[Sequence]) -> tuple[Restore, ...]:
        """Returns the restores of this step. They are for admitted sequences whose stored prefix is now in main
        memory."""
        if not self._restoring:
            return ()
        restores = []
        for sequence in running:
            prefix, count = self._restoring.get(sequence.request.request_id, (None, 0))
            if prefix is None or (prefix.state is None and not prefix.is_dropped):
                continue
            del self._restoring[sequence.request.request_id]
            if prefix.is_dropped and (other := self._find_stored(sequence, 0)) is not None:
                self._await_restore(sequence, other)
            elif not prefix.is_dropped and sequence.slot is not None:
                restores.append(Restore(sequence.slot, prefix, count))
                self.kv_cache.fill(sequence.slot)
                self.kv_cache.count_use(count, prefix.n_prompt)
                sequence.least_cut = 0 if self.cuts_anywhere else count
                self._count_hit(sequence, count)
                self.num_restored_tokens += count
                self.num_read_tokens += count if prefix.is_on_disk else 0
        return tuple(restores)

    def _find_stored(self, sequence: Sequence, known: int) -> tuple[StoredPrefix, int] | None:
        return self.store.find(sequence, known, sequence.most_cells if self._limits.is_unified else None)

    def _await_restore(self, sequence: Sequence, stored: tuple[StoredPrefix, int]) -> None:
        """Plans to fill the sequence's slot from a stored prefix in a later step. By then the state is in memory, and
        no copy reads or fills the slot."""
        if stored[0].is_on_disk and self.store.disk is not None:
            self._fetched.add(stored[0])
            self.store.disk.fetch(stored[0])
        self._restoring[sequence.request.request_id] = stored

    @property
    def reads(self) -> bool:
        """True while a sequence waits for a state that is being read from disk."""
        awaited = (prefix for prefix, _ in self._restoring.values())
        return any(each.is_on_disk and each.state is None and not each.is_dropped for each in awaited)

    def settle(self) -> None:
        """Ends the step: stores the saved checkpoints. Frees each state that was read from disk, if no sequence waits
        for it."""
        self.store.settle()
        if self._fetched and self.store.disk is not None:
            awaited = {prefix for prefix, _ in self._restoring.values()}
            for prefix in self._fetched - awaited:
                self._fetched.discard(prefix)
                self.store.disk.release(prefix)

    def next_write(self) -> Save | None:
        """Returns a Save that writes cached cells to disk. Returns None if no cached cells would save enough time, or
        if another file is being written. The engine calls this method while it has nothing to compute."""
        disk = self.store.disk
        if disk is None or disk.is_busy or self.store.write_next():
            return None
        for slot, cached in sorted(self.kv_cache.cached.items(), key=lambda item: -item[1].used):
            if self._tried.get(slot) is cached or not self.kv_cache.is_settled(slot):
                continue
            self._tried[slot] = cached
            if cached.count < self._least_gain(cached.count, self.kv_cache.continued):
                continue
            tokens = cached.token_ids[: cached.count]
            prefix = StoredPrefix(tokens, None, cached.key, n_prompt=min(cached.n_prompt, cached.count))
            if disk.wants(prefix):
                return Save(slot, prefix, lambda prefix, n_bytes: True)
        return None

    def copy_ready(self, running: abc.Sequence[Sequence]) -> None:
        """Copies prefixes whose sources have computed enough tokens. Replaces lost sources with other sources."""
        if not self._sources:
            return
        for sequence in running:
            request_id = sequence.request.request_id
            if request_id not in self._sources or sequence.slot is None:
                continue
            source, count = self._sources[request_id]
            if source is None or source.slot is None or _ended_early(source) or not self._may_reach(source, count):
                self._stop_waiting(sequence)
                self._find_other_source(sequence, running)
            elif source.num_computed >= count:
                self._stop_waiting(sequence)
                if not self._limits.can_cut:
                    self._save(source, 1)
                self.kv_cache.copy(source.slot, sequence.slot, count)
                sequence.begin_at(count)
                sequence.least_cut = source.least_cut
                sequence.shared_from = source.number if source.shared_from is None else source.shared_from
                self.num_shared_tokens += count

    def stops(self, running: abc.Sequence[Sequence]) -> dict[Sequence, int]:
        """Returns a dict: sequence -> the token count at which the sequence stops for a step, so that its cells can be
        copied to another sequence or saved in a checkpoint. The dict is empty if cells can be cut."""
        found: dict[Sequence, int] = {}
        if self._limits.can_cut:
            return found
        for source, count in self._sources.values():
            if source is not None and source.num_computed < count < found.get(source, count + 1):
                found[source] = count
        if self._places:
            for sequence in running:
                for place in self._places.get(sequence.request.request_id, ()):
                    if sequence.num_computed < place < found.get(sequence, place + 1):
                        found[sequence] = place
        return found

    def save_reached(self, running: abc.Sequence[Sequence]) -> None:
        """Makes checkpoints of sequences that have reached a token count from `_choose_places`. Call it in each step,
        before slots get other cells."""
        if not self._places:
            return
        for sequence in running:
            places = self._places.get(sequence.request.request_id)
            if not places or sequence.num_computed < places[0]:
                continue
            if sequence.num_computed in places:
                self._save(sequence, MIN_GAIN)
            self._places[sequence.request.request_id] = [p for p in places if p > sequence.num_computed]

    def keep_preempted(self, sequence: Sequence) -> None:
        """Makes a checkpoint of a sequence that is about to lose its slot, so that it can continue where it stopped."""
        if self._limits.can_share and not sequence.num_discarded:
            self._save(sequence, self._least_gain(sequence.num_computed, chance=1))

    def pop_saves(self) -> tuple[Save, ...]:
        """Returns the checkpoints that this step makes."""
        saves, self._saves = tuple(self._saves), []
        return saves

    def _save(self, sequence: Sequence, gain: int) -> None:
        """Makes a checkpoint of a sequence's computed tokens. Does nothing if the checkpoint would save fewer than
        `gain` tokens in addition to those that stored prefixes save."""
        slot, count = sequence.slot, sequence.num_computed
        if slot is None or not self.kv_cache.is_settled(slot):
            return
        n_prompt = min(sequence.num_prompt, count)
        self._save_tokens(slot, sequence.token_ids[:count], share_key(sequence.request), n_prompt, gain)

    def _save_tokens(self, slot: int, token_ids: abc.Sequence[int], key: ShareKey, n_prompt: int, gain: int) -> None:
        prefix = self.store.checkpoint(token_ids, key, gain)
        if prefix is not None:
            prefix.n_prompt = n_prompt
            self._saves.append(Save(slot, prefix, self.store.make_room))

    def _on_loss(self, slot: int, cached: CachedPrefix, kept: int) -> None:
        """Makes a checkpoint of a finished sequence before its cells are overwritten. With a sliding window, only the
        prompt is saved. The reason is that a saved state cannot be cut, and a chat template may remove the thinking of
        earlier turns from the next prompt."""
        gain = self._least_gain(cached.count, self.kv_cache.continued, cached.n_computed)
        if self.cuts_anywhere:
            if cached.count - kept >= gain:
                self._save_tokens(slot, cached.token_ids[: cached.count], cached.key, cached.n_prompt, gain)
            return
        cuts = self._limits.can_cut and self._limits.has_window
        count = cached.n_prompt if cuts and cached.n_prompt >= cached.least_cut else cached.count
        if kept or (count < cached.count and self.kv_cache.is_copied(slot)):
            return  # the save comes before the copies of this step, and would cut cells that a copy needs
        self._save_tokens(slot, cached.token_ids[:count], cached.key, cached.n_prompt, gain)

    def _least_gain(self, count: int, chance: float, computed: int = 0) -> int:
        """Returns the minimum number of tokens that a copy of `count` cells must save to be worth its time. The saved
        time is the time to compute the tokens, multiplied by `chance`, the chance that the text continues. If the copy
        takes little time compared with the computation of `computed` tokens, a few tokens are enough."""
        compute_s, copy_s = self._token_s(), self.store.copy_s(count)
        if compute_s is not None and copy_s is not None:
            tokens = copy_s / compute_s
        else:
            tokens = count * _COPY_SHARE if self.cuts_anywhere else _COPY_TOKENS
        if tokens <= _LITTLE * computed and chance >= _LEAST_CHANCE:
            return _LEAST_GAIN
        return max(_LEAST_GAIN, math.ceil(tokens / chance))

    def _choose_places(self, sequence: Sequence, running: abc.Sequence[Sequence], known: int) -> None:
        """Chooses the token counts at which checkpoints of a sequence are made. One is the end of its prompt, or of the
        last turn in the prompt. The other is the end of the longest beginning that another sequence or stored prefix
        shares. The tokens after the last turn are left out, because a template may write other tokens there in the next
        request.

        Args:
            known: number of tokens that the sequence does not have to compute.
        """
        tokens, n_prompt = sequence.token_ids, sequence.num_prompt
        if n_prompt < MIN_CHECKPOINT:
            return
        key, head = share_key(sequence.request), tokens[:MIN_SHARED]
        common = self.store.longest_common(tokens, key)
        others: list[tuple[abc.Sequence[int], ShareKey]]
        others = [(other.token_ids, share_key(other.request)) for other in running]
        others += [(cached.token_ids, cached.key) for cached in self.kv_cache.cached.values()]
        for known_ids, other_key in others:
            if other_key == key and known_ids[:MIN_SHARED] == head:
                common = max(common, common_length(tokens, known_ids))
        # a later request with the same prompt computes the last token again, so the state is saved before that token
        places = {sequence.whole(min(place, n_prompt - 1)) for place in (common, sequence.last_turn(MOST_OPENING))}
        places = {place for place in places if place >= MIN_CHECKPOINT and place >= known + MIN_GAIN}
        if places:
            self._places[sequence.request.request_id] = sorted(places)

    def source_slot(self, sequence: Sequence) -> int | None:
        """Returns the slot from which `sequence` will copy a prefix; None if it does not wait for a copy."""
        source, _ = self._sources.get(sequence.request.request_id, (None, 0))
        return None if source is None else source.slot

    def source_slots(self) -> set[int]:
        """Returns the slots with computed cells that will still be copied."""
        sources = (source for source, _ in self._sources.values() if source is not None and source.num_computed)
        return {source.slot for source in sources if source.slot is not None}

    def forget(self, sequence: Sequence) -> None:
        """Drops the planned copies, restores and checkpoints of a sequence that has ended or lost its slot."""
        self._stop_waiting(sequence)
        self._places.pop(sequence.request.request_id, None)

    def _stop_waiting(self, sequence: Sequence) -> None:
        self._sources.pop(sequence.request.request_id, None)
        self._restoring.pop(sequence.request.request_id, None)

    def on_preempted(self, sequence: Sequence) -> None:
        """Cancels copies from a preempted sequence. Otherwise two sequences could wait for copies from each other."""
        self.forget(sequence)
        for request_id, (source, count) in self._sources.items():
            if source is sequence:
                self._sources[request_id] = (None, count)

    def reset(self) -> None:
        """Drops the cells of all finished sequences, and all checkpoints. Cells of running sequences and loaded
        prefixes stay."""
        self.drop(lambda key: True)

    def drop(self, unwanted: Callable[[ShareKey], bool]) -> None:
        """Drops cached cells and checkpoints with an unwanted key. This includes checkpoints on disk."""
        self.kv_cache.evict_keys(unwanted)
        self.drop_checkpoints(unwanted)
        if self.store.disk is not None:
            self.store.disk.discard(lambda prefix: unwanted(prefix.key))

    def drop_checkpoints(self, unwanted: Callable[[ShareKey], bool]) -> None:
        """Drops checkpoints with an unwanted key, including evicted checkpoints for which a slot still waits."""
        self.store.drop(unwanted)
        for prefix, _ in self._restoring.values():
            if prefix.path is None and not prefix.is_on_disk and unwanted(prefix.key):
                prefix.is_dropped = True

    def evict_between(self, decoding: abc.Sequence[Sequence], occupied: set[int]) -> None:
        """Evicts cached cells between the slots of decoding sequences, so that dummy rows can fill the gap. With a gap,
        each step needs a second pass until the longest sequence ends. Cells stay if they will probably save more time
        than these passes take.

        Args:
            occupied: slots that contain cells. This method adds the slots whose cached cells stay.
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

    def _best_source(self, sequence: Sequence, others: abc.Iterable[Sequence]) -> tuple[Sequence, int] | None:
        least_cut = None if self.cuts_anywhere else self._least_cut
        return best_source(sequence, copy_candidates(sequence, others), least_cut)

    def _least_cut(self, source: Sequence) -> int:
        """Returns the minimum number of tokens to which a sequence's cells can be cut. If the sequence waits for cells,
        the number applies once it has them."""
        request_id = source.request.request_id
        if request_id in self._restoring:
            return self._restoring[request_id][1]
        awaited, count = self._sources.get(request_id, (None, 0))
        if not self._limits.can_cut:
            return max(source.num_computed, count)
        return source.least_cut if awaited is None else self._least_cut(awaited)

    def _may_reach(self, source: Sequence, count: int) -> bool:
        """True if `source` has, or will have, cells of the first `count` tokens, and these cells can be copied."""
        return source.num_shareable >= count >= self._least_cut(source)

    def _find_other_source(self, sequence: Sequence, running: abc.Sequence[Sequence]) -> None:
        """Finds other cells for a sequence whose source is lost: cached cells, or cells of a sequence that was admitted
        earlier. Sequences that were admitted later are left out, because two sequences could wait for each other
        forever."""
        assert sequence.slot is not None
        earlier: abc.Iterator[Sequence] = itertools.takewhile(lambda other: other is not sequence, running)
        cached = None
        if sequence.request.params.skip_reading_prefix_cache:
            earlier = siblings(sequence, earlier)
        else:
            cached = self.kv_cache.find(sequence)
        source = self._best_source(sequence, earlier)
        if cached is not None and (source is None or cached[1] >= source[1]):
            self.kv_cache.copy(cached[0], sequence.slot, cached[1])
            sequence.least_cut = self.kv_cache.cached[cached[0]].least_cut
            self._count_hit(sequence, cached[1])
        elif source is not None:
            self._sources[sequence.request.request_id] = source

    def _count_hit(self, sequence: Sequence, count: int) -> None:
        sequence.begin_at(count)
        self.num_prefix_hits += 1
        self.num_prefix_tokens += count


def siblings(sequence: Sequence, others: abc.Iterable[Sequence]) -> abc.Iterator[Sequence]:
    """Yields the other sequences that are continuations of the same request."""
    request, _, index = sequence.request.request_id.partition("\0")  # see ParallelSampling.split
    return (other for other in others if index and other.request.request_id.partition("\0")[0] == request)


def _ended_early(source: Sequence) -> bool:
    return source.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
