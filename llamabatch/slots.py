"""Slots: the seq ids of a context, leased lowest first so that the running ones stay dense; background sequences take
the highest, so that those in front stay dense without them."""

from __future__ import annotations

import heapq


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
