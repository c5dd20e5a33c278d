"""Ids that have been used, of millions of rows, in little memory."""

from __future__ import annotations

from array import array

_MASK = 2**64 - 1


class Ids:
    """Which row has which id.

    An id is kept as Python's 64-bit hash of it, which is keyed anew in each process, in a table with open addressing:
    16 bytes a slot, 24 to 48 bytes an id. Two ids that differ have the same hash once in 3.7e7 lists of a million. Rows
    without an id have their number as text, which takes one bit.
    """

    def __init__(self) -> None:
        self._keys = array("Q", bytes(8 * 1024))  # 0: free
        self._numbers = array("Q", bytes(8 * 1024))
        self._used = 0
        self._automatic = bytearray()  # a bit for each row whose id is its number
        self._explicit_numerals = False

    def claim(self, identity: str, number: int) -> int | None:
        """Gives an id to a row, unless a row has it: then the number of that one."""
        if _is_numeral(identity):
            self._explicit_numerals = True
            value = int(identity)
            if self._is_automatic(value):
                return value
        key = hash(identity) & _MASK or 1
        slot = self._slot(key)
        if self._keys[slot]:
            return self._numbers[slot]
        self._keys[slot], self._numbers[slot] = key, number
        self._used += 1
        if self._used * 3 > len(self._keys) * 2:
            self._grow()
        return None

    def claim_number(self, number: int) -> int | None:
        """The same for a row without an id: its number as text."""
        if self._explicit_numerals:
            slot = self._slot(hash(str(number)) & _MASK or 1)
            if self._keys[slot]:
                return self._numbers[slot]
        byte, bit = divmod(number, 8)
        if byte >= len(self._automatic):
            self._automatic.extend(bytes(byte + 1 - len(self._automatic) + 4096))
        self._automatic[byte] |= 1 << bit
        return None

    def _is_automatic(self, number: int) -> bool:
        byte, bit = divmod(number, 8)
        return byte < len(self._automatic) and bool(self._automatic[byte] >> bit & 1)

    def _slot(self, key: int) -> int:
        """Where a key stands, or the free slot where it would."""
        keys, mask = self._keys, len(self._keys) - 1
        slot = key & mask
        while keys[slot] and keys[slot] != key:
            slot = slot + 1 & mask
        return slot

    def _grow(self) -> None:
        keys, numbers = self._keys, self._numbers
        self._keys = array("Q", bytes(16 * len(keys)))
        self._numbers = array("Q", bytes(16 * len(keys)))
        for key, number in zip(keys, numbers, strict=True):
            if key:
                slot = self._slot(key)
                self._keys[slot], self._numbers[slot] = key, number


def _is_numeral(identity: str) -> bool:
    """Is it how a row's number would be written?"""
    return len(identity) < 19 and identity.isascii() and identity.isdigit() and (identity == "0" or identity[0] != "0")
