"""What the slots hold: whose they are, what finished sequences have left in free ones, and what is copied and cut.

Pure Python. The cells of a finished sequence stay in its slot until somebody else needs the slot; a request that begins
with the same tokens starts from them. What is kept stands in free slots only, so that running ids stay as dense as they
would be without.
"""

from __future__ import annotations

import heapq
from collections import abc
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace

from llamabatch.request.adapters import AdapterSet
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.common_prefix import MIN_SHARED, common_length, share_key
from llamabatch.scheduler.output import Cut, Limits, PrefixCopy

# ----------------------------------------------------------------------------------------------------
# Slots: the seq ids of a context, leased lowest first so that the running ones stay dense; background sequences
# take the highest, so that those in front stay dense without them.


class SlotPool:
    """Leases the ids 0 .. n_slots - 1. Raises ValueError on misuse: that is a bug of ours, never of a caller."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self._free = list(range(n_slots))  # a heap
        self._leased: set[int] = set()

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def leased(self) -> frozenset[int]:
        return frozenset(self._leased)

    @property
    def free(self) -> list[int]:
        """The ids that nobody has, rising."""
        return sorted(self._free)

    def lease(self, slot: int | None = None, *, top: bool = False) -> int:
        """The lowest free id, or the highest, or this one."""
        if not self._free:
            raise ValueError("no slot is free")
        if slot is None and top:
            slot = max(self._free)
        if slot is None:
            slot = heapq.heappop(self._free)
        elif slot in self._free:
            self._free.remove(slot)
            heapq.heapify(self._free)
        else:
            raise ValueError(f"slot {slot} is not free")
        self._leased.add(slot)
        return slot

    def grow(self, n_slots: int) -> None:
        """Adds free ids, up to n_slots - 1."""
        self._free.extend(range(self.n_slots, n_slots))  # larger than all others: it stays a heap
        self.n_slots = n_slots

    def release(self, slot: int) -> None:
        if slot not in self._leased:
            raise ValueError(f"slot {slot} is not leased")
        self._leased.remove(slot)
        heapq.heappush(self._free, slot)

    def check_integrity(self) -> None:
        """Every id is either free or leased, once."""
        ids = sorted([*self._free, *self._leased])
        if ids != list(range(self.n_slots)):
            raise ValueError(f"slots leaked or doubled: free {sorted(self._free)}, leased {sorted(self._leased)}")


# A copy of a slot costs as much as computing this many tokens (0.5B Q8_0: 6 ms with slots of 512 cells, 15 to 35 ms of
# 4,096, and 770 tokens/s): what is kept moves out of the way if it is expected to save more.
COPY_IN_TOKENS = 16
# How likely a prefix is used again, before anything is known: one in eight.
_KNOWN_AT_FIRST = (1, 8)
_REMEMBERED = 256  # prefixes kept of which the likelihood is made; then both counts are halved


@dataclass(frozen=True)
class CachedPrefix:
    """What a finished sequence left in its slot.

    Attributes:
        token_ids: the first `count` are those of the cells.
        key: what cells depend on beside their tokens; see prefix.share_key.
        used: when they were last of use, as a number that rises.
    """

    token_ids: abc.Sequence[int]
    count: int
    key: AdapterSet
    used: int


class KVCacheManager:
    """Leases slots and keeps prefixes. A step's actions are collected here: the copies in their order, then cuts."""

    def __init__(self, n_slots: int, limits: Limits) -> None:
        self.slots = SlotPool(n_slots)
        self.cached: dict[int, CachedPrefix] = {}
        self._is_unified = limits.is_unified
        self._keeps = limits.keeps_prefixes and limits.can_share
        self._uses = 0
        self._n_used_again, self._n_kept_ever = _KNOWN_AT_FIRST
        self._copies: list[PrefixCopy] = []
        self._cuts: dict[int, int] = {}  # slot -> tokens that stay

    def grow(self, n_slots: int, carried: Set[int]) -> None:
        """A larger context has taken over the cells of the slots `carried`; what others keep is lost."""
        self.slots.grow(n_slots)
        for slot in self.cached.keys() - carried:
            self.evict(slot)

    @property
    def n_cached_cells(self) -> int:
        """Cells that finished sequences hold."""
        return sum(kept.count for kept in self.cached.values())

    def best(self, sequence: Sequence) -> tuple[int, int] | None:
        """The slot of a finished sequence that saves the most work, and how many tokens; None: nobody's does."""
        most = sequence.most_shared
        if not self.cached or most < MIN_SHARED:
            return None
        known, key = sequence.token_ids, share_key(sequence.request)
        head = known[:MIN_SHARED]
        best: tuple[int, int, int] | None = None
        for slot, kept in self.cached.items():
            if kept.key != key or kept.token_ids[:MIN_SHARED] != head:
                continue
            shared = min(common_length(known, kept.token_ids), kept.count, most)
            rank = (shared, -kept.count, slot)  # where two save as much, the one that has less to lose
            if shared >= MIN_SHARED and (best is None or rank > best):
                best = rank
        return None if best is None else (best[2], best[0])

    def slot_of(self, token_ids: abc.Sequence[int]) -> int | None:
        """The slot that keeps exactly these tokens, computed without adapters."""
        wanted = list(token_ids)
        for slot, kept in self.cached.items():
            if kept.count == len(wanted) and not kept.key and list(kept.token_ids[: kept.count]) == wanted:
                return slot
        return None

    # --- slots --------------------------------------------------------------------------------------------------

    def lease(
        self,
        *,
        own: Iterable[int] | None = None,
        top: bool = False,
        spared: int | None = None,
        beside: abc.Sequence[int] | None = None,
    ) -> int:
        """The free slot that keeps the ids dense and, among several, costs the least of what is kept; it is emptied.

        Args:
            own: the leased slots that it shares its passes with; None: all.
            top: from the highest down, as background sequences stand.
            spared: not this one.
            beside: the one nearest to these instead, the highest where they are none.
        """
        if beside is not None:
            distance = (lambda slot: min(abs(slot - one) for one in beside)) if beside else (lambda slot: -slot)
            return self.lease_this(min(self.slots.free, key=distance), spared)
        if not self.cached:
            return self.slots.lease(top=top)
        # a unified cache takes any ids into a pass
        leased = () if self._is_unified else self.slots.leased if own is None else tuple(own)
        low, high = min(leased, default=self.slots.n_slots if top else 0), max(leased, default=self.slots.n_slots)

        def cost(slot: int) -> tuple[int, float, int]:
            return max(low - slot, slot - high, 0), self.value(slot), -slot if top else slot

        return self.lease_this(min((slot for slot in self.slots.free if slot != spared), key=cost), spared)

    def lease_this(self, slot: int, spared: int | None = None) -> int:
        """A free slot; what is kept there moves to where less is kept, if it is worth that, or is lost."""
        kept = self.cached.get(slot)
        if kept is not None and self.expected_saving(slot) >= COPY_IN_TOKENS:
            value, leased = self.value(slot), self.slots.leased
            others = [s for s in self.slots.free if s not in (slot, spared) and self.value(s) < value]
            if others:  # best of all an empty one outside the range of those that are leased
                high = max(leased, default=-1)
                target = min(others, key=lambda other: (self.value(other), other < high, other))
                self.evict(target)
                self.copy(slot, target, kept.count)
                self.cached[target] = kept
        self.evict(slot)
        return self.slots.lease(slot)

    def lease_prefix(self, slot: int, count: int, *, own: Iterable[int] | None = None, top: bool = False) -> int:
        """A slot that begins with `count` tokens of what free slot `slot` keeps: that slot itself, unless others may
        want the rest of it and a slot with less is free. `own` and `top` are those of lease."""
        kept = self.cached[slot]
        self._uses += 1
        self._n_used_again += 1
        self.cached[slot] = replace(kept, used=self._uses)
        if kept.count - count >= MIN_SHARED and any(self.value(s) < self.value(slot) for s in self.slots.free):
            target = self.lease(own=own, top=top, spared=slot)
            self.copy(slot, target, count)
            return target
        del self.cached[slot]
        if count < kept.count:
            self._cuts[slot] = count
        return self.slots.lease(slot)

    def vacate(self, slot: int) -> None:
        """Nobody's any more, and emptied before the next call."""
        self.slots.release(slot)
        self._cuts[slot] = 0

    def keep(self, slot: int, sequence: Sequence) -> None:
        """Nobody's any more; the cells stay, if they are of use to others."""
        if not self._keeps or sequence.num_computed < MIN_SHARED or sequence.num_discarded:
            self.vacate(slot)
            return
        self.slots.release(slot)
        self._uses += 1
        self._n_kept_ever += 1
        if self._n_kept_ever > _REMEMBERED:
            self._n_used_again, self._n_kept_ever = (self._n_used_again + 1) // 2, self._n_kept_ever // 2
        self.cached[slot] = CachedPrefix(
            sequence.token_ids, sequence.num_computed, share_key(sequence.request), self._uses
        )

    def value(self, slot: int) -> float:
        """What a free slot keeps is worth: its length by its age; 0 where it is empty."""
        kept = self.cached.get(slot)
        return 0.0 if kept is None else kept.count / (self._uses + 1 - kept.used)

    def expected_saving(self, slot: int) -> float:
        """Tokens that what a slot keeps will save: its length times the share of prefixes that were used again."""
        kept = self.cached.get(slot)
        return 0.0 if kept is None else kept.count * min(1.0, self._n_used_again / self._n_kept_ever)

    # --- giving up ----------------------------------------------------------------------------------------------

    def evict(self, slot: int) -> None:
        """Gives up what is kept in a slot, if anything is."""
        if self.cached.pop(slot, None) is not None:
            self._cuts[slot] = 0

    def evict_keys(self, unwanted: Callable[[AdapterSet], bool]) -> None:
        """Gives up what is kept under such keys."""
        for slot in [slot for slot, kept in self.cached.items() if unwanted(kept.key)]:
            self.evict(slot)

    def evict_to(self, n_cells: int) -> None:
        """Gives up the least valuable until the rest takes no more than so many cells."""
        excess = self.n_cached_cells - n_cells
        if excess > 0:
            for slot in sorted(self.cached, key=self.value):
                if excess > 0:
                    excess -= self.cached[slot].count
                    self.evict(slot)

    # --- a step's actions ---------------------------------------------------------------------------------------

    def copy(self, source: int, target: int, count: int) -> None:
        """The first `count` tokens of slot `source` become those of slot `target`."""
        self._copies.append(PrefixCopy(source, target, count))
        self._cuts.pop(target, None)  # the copy replaces what stood there

    def cut(self, slot: int, count: int) -> None:
        """A slot that was given back holds more than the `count` tokens that its sequence was left with."""
        self._cuts.setdefault(slot, count)

    def pop_actions(self) -> tuple[tuple[PrefixCopy, ...], tuple[Cut, ...]]:
        """What has come together since the last call."""
        copies, self._copies = tuple(self._copies), []
        cuts = tuple(Cut(slot, count) for slot, count in sorted(self._cuts.items())) if self._cuts else ()
        self._cuts.clear()
        return copies, cuts

    def check_integrity(self) -> None:
        """Raises ValueError if something is kept in a slot that is not free."""
        self.slots.check_integrity()
        if not self.cached.keys() <= set(self.slots.free):
            raise ValueError("prefixes are kept in leased slots")
