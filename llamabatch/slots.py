"""Slots: the seq ids of a context, leased lowest first so that the running ones stay dense."""

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

    def lease(self) -> int:
        """The lowest free id."""
        if not self._free:
            raise ValueError("no slot is free")
        slot = heapq.heappop(self._free)
        self._leased.add(slot)
        return slot

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
