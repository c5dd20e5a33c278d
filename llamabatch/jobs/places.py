"""Numbers of rows and places in an output: those of a shard stand without gaps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Places:
    """Row `number` of shard (i, n) has place number // n, as the shard has every n-th row from row i - 1 on."""

    shard: tuple[int, int] = (1, 1)

    def of(self, number: int) -> int | None:
        """None: the row is of another shard."""
        i, n = self.shard
        return number // n if number % n == i - 1 else None

    def number(self, place: int) -> int:
        i, n = self.shard
        return place * n + i - 1
