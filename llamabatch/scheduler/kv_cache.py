"""The slots of a context: leases, cached cells of finished sequences in free slots, copies and cuts.

Pure Python. The cells of a finished sequence stay in its slot until another sequence needs the slot. A request that
begins with the same tokens starts from these cells. Only free slots have cached cells. So caching never makes gaps
between the slots of running sequences.
"""

from __future__ import annotations

import heapq
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, replace

from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.common_prefix import MIN_SHARED, PLAIN, ShareKey, common_length, share_key
from llamabatch.scheduler.output import Cut, Limits, PrefixCopy
from llamabatch.scheduler.step_costs import StepCosts

# A copy of a slot takes as long as computing this many tokens (0.5B Q8_0: a copy takes 6 ms with slots of 512 cells, 15
# to 35 ms with 4,096; a token takes 1.3 ms). Cached cells move to another slot if they will probably save at least this
# many tokens.
COPY_IN_TOKENS = 16
# After the last turn, a template opens the model's answer with at most this many tokens.
MOST_OPENING = 32
# The chance that a prefix is used again, assumed before any use is counted: 1 use of 8 prefixes.
_FIRST_USES = (1, 8)
# The chance that the text of a kept prefix is continued, assumed before any use is counted: 4 of 32 prefixes. These two
# counts are larger, so that the chance changes more slowly. The reason is that many chats may begin before one of them
# goes on.
_FIRST_CONTINUED = (4, 32)
_REMEMBERED = 256  # maximum number of prefixes that are counted; above it, both numbers of a chance are halved


@dataclass(frozen=True)
class CachedPrefix:
    """Cells that a finished sequence has left in its slot.

    Attributes:
        token_ids: the tokens of the sequence; the first `count` of them have cells.
        n_prompt: number of the `count` tokens that belong to the prompt.
        least_cut: minimum number of tokens to which the cells can be cut; see Sequence.
        n_computed: number of the `count` tokens that the sequence computed itself. The cells of the other tokens were
            copied or restored.
        key: only requests with this key may use the cells.
        used: serial number of the last use of the cells. Later uses have higher numbers.
    """

    token_ids: abc.Sequence[int]
    count: int
    key: ShareKey
    used: int
    n_prompt: int = 0
    least_cut: int = 0
    n_computed: int = 0


@dataclass(frozen=True)
class Placement:
    """The slots near which a sequence should get its slot, so that the slot ids of each call are dense.

    Attributes:
        peers: slots of the running sequences in the same passes as this sequence; None: all leased slots.
        from_top: True: the search begins at the highest slot, because background sequences use the highest slots.
        neighbours: the sequence gets the free slot that is nearest to any of these slots, or the highest free slot if
            the list is empty; None: neighbours are ignored.
    """

    peers: abc.Sequence[int] | None = None
    from_top: bool = False
    neighbours: abc.Sequence[int] | None = None


ANYWHERE = Placement()


class KVCacheManager:
    """Leases slots, caches the cells of finished sequences, and collects the copies and cuts of a step.

    Attributes:
        slots: the seq ids.
        cached: free slot -> the cells of a finished sequence in it.
        on_loss: called before cached cells are lost, while the slot still has them. Its arguments are the slot, its
            cached cells, and the number of these cells that stay in use.
    """

    def __init__(self, n_slots: int, limits: Limits, costs: StepCosts | None = None) -> None:
        self.slots = SlotPool(n_slots)
        self._costs = costs or StepCosts(limits)
        self.cached: dict[int, CachedPrefix] = {}
        self._is_unified = limits.is_unified
        self._can_cut = limits.can_cut
        self._caches_prefixes = limits.keeps_prefixes and limits.can_share
        self._uses = 0
        self._n_used_again, self._n_ever_cached = _FIRST_USES
        self._n_continued, self._n_kept = _FIRST_CONTINUED
        self.on_loss: Callable[[int, CachedPrefix, int], None] | None = None
        self._unsettled: set[int] = set()  # slots that get other cells in this step
        # slot with moved cells -> the former slot of these cells. A save comes before the move, so it reads the former
        # slot.
        self._origins: dict[int, int] = {}
        self._copies: list[PrefixCopy] = []
        self._cuts: dict[int, int] = {}  # slot -> number of tokens that stay

    @property
    def n_cached_cells(self) -> int:
        """The number of cached cells of finished sequences in all slots."""
        return sum(cached.count for cached in self.cached.values())

    def find(self, sequence: Sequence) -> tuple[int, int] | None:
        """Returns the slot whose cached cells save the most tokens, and the number of these tokens; None if no slot
        saves enough."""
        most = sequence.most_shared
        if not self.cached or most < MIN_SHARED:
            return None
        known, key = sequence.token_ids, share_key(sequence.request)
        head = known[:MIN_SHARED]
        best: tuple[int, int, int] | None = None
        for slot, cached in self.cached.items():
            if cached.key != key or cached.token_ids[:MIN_SHARED] != head:
                continue
            shared = sequence.whole(min(common_length(known, cached.token_ids), cached.count, most))
            if shared < (cached.least_cut if self._can_cut else cached.count):
                continue
            rank = (shared, -cached.count, slot)  # if two slots save equally many tokens, the one with fewer cells wins
            if shared >= MIN_SHARED and (best is None or rank > best):
                best = rank
        return None if best is None else (best[2], best[0])

    def slot_of(self, token_ids: abc.Sequence[int]) -> int | None:
        """Returns the slot that caches exactly these tokens, without adapters and cache_salt; None: no slot does."""
        wanted = list(token_ids)
        for slot, cached in self.cached.items():
            if cached.count == len(wanted) and cached.key == PLAIN and list(cached.token_ids[: cached.count]) == wanted:
                return slot
        return None

    def grow(self, n_slots: int, carried: abc.Set[int]) -> None:
        """Adds the slots of a larger context. Evicts the cached cells of slots that are not in `carried`, because the
        new context does not have them."""
        self.slots.grow(n_slots)
        for slot in self.cached.keys() - carried:
            self.evict(slot, is_lost=True)

    def lease(self, placement: Placement = ANYWHERE, *, spared: int | None = None) -> int:
        """Leases and empties a free slot that keeps the slot ids dense. Of several such slots, it leases the slot with
        the least valuable cells.

        Args:
            spared: a slot whose cells must stay; None: there is none.
        """
        neighbours, top = placement.neighbours, placement.from_top
        if neighbours is not None:
            distance = (lambda slot: min(abs(slot - one) for one in neighbours)) if neighbours else (lambda slot: -slot)
            return self.lease_this(min(self.slots.free, key=distance), spared)
        if not self.cached:
            return self.slots.lease(top=top)
        leased: abc.Collection[int] = self.slots.leased if placement.peers is None else placement.peers
        if self._is_unified:  # with a unified cache, a pass accepts any slot ids
            leased = ()
        low, high = min(leased, default=self.slots.n_slots if top else 0), max(leased, default=self.slots.n_slots)

        def cost(slot: int) -> tuple[int, float, int]:
            return max(low - slot, slot - high, 0), self.value(slot), -slot if top else slot

        return self.lease_this(min((slot for slot in self.slots.free if slot != spared), key=cost), spared)

    def lease_this(self, slot: int, spared: int | None = None) -> int:
        """Leases a free slot. Its cached cells move to a slot of less value if the move saves time. Otherwise they are
        lost."""
        cached = self.cached.get(slot)
        if cached is not None and self.expected_saving(slot) >= self._costs.copy_in_rows(COPY_IN_TOKENS):
            value, leased = self.value(slot), self.slots.leased
            others = [s for s in self.slots.free if s not in (slot, spared) and self.value(s) < value]
            if others:  # the best target is an empty slot above all leased slots
                high = max(leased, default=-1)
                target = min(others, key=lambda other: (self.value(other), other < high, other))
                self.evict(target)
                self.copy(slot, target, cached.count)
                self._origins[target] = self._origins.pop(slot, slot)
                self.cached[target] = self.cached.pop(slot)
                self._cuts[slot] = 0
        self.evict(slot)
        return self.slots.lease(slot)

    def lease_prefix(self, slot: int, count: int, placement: Placement = ANYWHERE) -> int:
        """Leases a slot for a sequence whose first `count` tokens are cached in the free slot `slot`.

        If the other cells of `slot` may be useful and a slot of less value is free, another slot is leased and gets a
        copy of the tokens. Otherwise `slot` itself is leased.
        """
        cached = self.cached[slot]
        self._uses += 1
        self.count_use(count, cached.n_prompt)
        self.cached[slot] = replace(cached, used=self._uses)
        if cached.count - count >= MIN_SHARED and any(self.value(s) < self.value(slot) for s in self.slots.free):
            target = self.lease(replace(placement, neighbours=None), spared=slot)
            self.copy(slot, target, count)
            return target
        del self.cached[slot]
        if count < cached.count:
            self._lose(slot, cached, count)
            self._cuts[slot] = count
        return self.slots.lease(slot)

    def vacate(self, slot: int) -> None:
        """Frees a slot. The slot is emptied before the next call."""
        self.slots.release(slot)
        self._cuts[slot] = 0

    def cache(self, slot: int, sequence: Sequence) -> None:
        """Frees the slot of a finished sequence. Its cells stay if other requests may use them."""
        if not self._caches_prefixes or sequence.num_computed < MIN_SHARED or sequence.num_discarded:
            self.vacate(slot)
            return
        self.slots.release(slot)
        self._uses += 1
        self._n_ever_cached += 1
        if self._n_ever_cached > _REMEMBERED:
            self._n_used_again, self._n_ever_cached = (self._n_used_again + 1) // 2, self._n_ever_cached // 2
        self._n_kept += 1
        if self._n_kept > _REMEMBERED:
            self._n_continued, self._n_kept = (self._n_continued + 1) // 2, self._n_kept // 2
        key = share_key(sequence.request)
        n_prompt = min(sequence.num_prompt, sequence.num_computed)
        count, least_cut = sequence.num_computed, sequence.least_cut
        n_computed = count - sequence.num_cached
        self.cached[slot] = CachedPrefix(sequence.token_ids, count, key, self._uses, n_prompt, least_cut, n_computed)

    def value(self, slot: int) -> float:
        """Returns the value of the cells cached in a free slot: their number divided by their age; 0 without cells."""
        cached = self.cached.get(slot)
        return 0.0 if cached is None else cached.count / (self._uses + 1 - cached.used)

    def count_use(self, count: int, n_prompt: int) -> None:
        """Counts one more use of a kept prefix. Its cells come from its slot or from main memory.

        Args:
            count: number of tokens of the prefix that are used.
            n_prompt: number of prompt tokens at the beginning of the prefix.
        """
        self._n_used_again += 1
        self._n_continued += count > n_prompt - MOST_OPENING

    @property
    def continued(self) -> float:
        """The share (0 to 1) of kept prefixes whose text was continued. Other prefixes were used only in part, or never
        again."""
        return min(1.0, self._n_continued / self._n_kept)

    def expected_saving(self, slot: int) -> float:
        """Returns the number of tokens that the cells cached in a slot will probably save: the number of these cells
        times the share of reused prefixes."""
        cached = self.cached.get(slot)
        return 0.0 if cached is None else cached.count * min(1.0, self._n_used_again / self._n_ever_cached)

    def evict(self, slot: int, *, is_lost: bool = False) -> None:
        """Drops the cells cached in a slot, if there are any.

        Args:
            is_lost: True if the cells cannot be used any more or are already gone. on_loss is then not called.
        """
        cached = self.cached.pop(slot, None)
        if cached is None:
            return
        self._cuts[slot] = 0
        if not is_lost:
            self._lose(slot, cached, 0)

    def _lose(self, slot: int, cached: CachedPrefix, kept: int) -> None:
        origin = self._origins.pop(slot, slot)
        if self.on_loss is not None and (origin != slot or self.is_settled(slot)):
            self.on_loss(origin, cached, kept)

    def evict_keys(self, unwanted: Callable[[ShareKey], bool]) -> None:
        """Drops all cells that are cached under an unwanted key."""
        for slot in [slot for slot, cached in self.cached.items() if unwanted(cached.key)]:
            self.evict(slot, is_lost=True)

    def evict_to(self, n_cells: int) -> None:
        """Drops the least valuable cached cells until at most `n_cells` cells are left."""
        excess = self.n_cached_cells - n_cells
        if excess > 0:
            for slot in sorted(self.cached, key=self.value):
                if excess > 0:
                    excess -= self.cached[slot].count
                    self.evict(slot)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copies the first `count` tokens of slot `source` to slot `target` in this step."""
        self._copies.append(PrefixCopy(source, target, count))
        self.fill(target)
        self._cuts.pop(target, None)  # the copy replaces all cells of the target

    def fill(self, slot: int) -> None:
        """Notes that a slot gets other cells in this step."""
        self._unsettled.add(slot)
        self._origins.pop(slot, None)

    def is_settled(self, slot: int) -> bool:
        """True if the slot gets no other cells in this step."""
        return slot not in self._unsettled

    def is_copied(self, slot: int) -> bool:
        """True if another slot gets cells of this slot in this step."""
        return any(copy.source == slot for copy in self._copies)

    def cut(self, slot: int, count: int) -> None:
        """Cuts a freed slot to the `count` tokens of its ended sequence, unless a cut of this slot is already
        planned."""
        self._cuts.setdefault(slot, count)

    def pop_actions(self) -> tuple[tuple[PrefixCopy, ...], tuple[Cut, ...]]:
        """Returns the copies, in the order of execution, and the cuts. Forgets both."""
        copies, self._copies = tuple(self._copies), []
        cuts = tuple(Cut(slot, count) for slot, count in sorted(self._cuts.items())) if self._cuts else ()
        self._cuts.clear()
        self._unsettled.clear()
        self._origins.clear()
        return copies, cuts

    def check_integrity(self) -> None:
        """Raises ValueError if cells are cached in a slot that is not free."""
        self.slots.check_integrity()
        if not self.cached.keys() <= set(self.slots.free):
            raise ValueError("a leased slot has a cached prefix")


class SlotPool:
    """The seq ids of a context, 0 .. n_slots - 1.

    Foreground sequences lease the lowest free id, so that their ids stay dense. Background sequences lease the highest
    free id. The methods raise ValueError for wrong use. This is always a bug of llamabatch, never of its user.
    """

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
        """The free ids, in ascending order."""
        return sorted(self._free)

    def lease(self, slot: int | None = None, *, top: bool = False) -> int:
        """Leases and returns the free id `slot`. If `slot` is None, leases the lowest free id, or with `top` the
        highest."""
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
        self._free.extend(range(self.n_slots, n_slots))  # the new ids are the largest, so the list stays a heap
        self.n_slots = n_slots

    def release(self, slot: int) -> None:
        if slot not in self._leased:
            raise ValueError(f"slot {slot} is not leased")
        self._leased.remove(slot)
        heapq.heappush(self._free, slot)

    def check_integrity(self) -> None:
        """Raises ValueError unless each id is listed exactly once, as free or as leased."""
        ids = sorted([*self._free, *self._leased])
        if ids != list(range(self.n_slots)):
            raise ValueError(f"slots leaked or doubled: free {sorted(self._free)}, leased {sorted(self._leased)}")
