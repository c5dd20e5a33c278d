"""Finds common beginnings of token lists: their length, families of prompts, and the best source of a copy."""

from __future__ import annotations

from array import array
from collections import abc
from collections.abc import Callable, Iterable
from typing import NamedTuple

from llamabatch.request.adapters import AdapterSet
from llamabatch.request.request import Request
from llamabatch.request.sequence import Sequence

# The minimum number of shared tokens. A copy always moves the whole slot, which may take as long as computing this many
# tokens (0.5B Q8_0: 32 tokens take 40 ms; a copy takes 6 ms with slots of 512 cells, 15 to 35 ms with 4,096).
MIN_SHARED = 32
_FIRST_SLICE = 64  # number of tokens that are compared first: most lists differ early


def common_length(a: abc.Sequence[int], b: abc.Sequence[int]) -> int:
    """Returns the length of the common beginning. Compares slices of doubling length at C speed, then bisects."""
    low, most, width = 0, min(len(a), len(b)), _FIRST_SLICE
    while low < most and a[low : min(low + width, most)] == b[low : min(low + width, most)]:
        low, width = min(low + width, most), 2 * width
    high = min(low + width, most)
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def prefix_families(prompts: abc.Sequence[abc.Sequence[int]]) -> list[list[int]]:
    """Groups prompts that start with the same text. Returns lists of indices. Families and their members are in order
    of index.

    Two neighbours in sorted order belong to one family if they share at least MIN_SHARED tokens and at least half of
    the shorter prompt. Each prompt is in one family.
    """
    # any order works if it puts equal beginnings side by side; raw bytes compare fastest
    raw = [array("i", prompt).tobytes() for prompt in prompts]
    order = sorted(range(len(raw)), key=raw.__getitem__)
    families: list[list[int]] = []
    for before, i in zip([None, *order], order, strict=False):
        if before is None or not _are_family(prompts[before], prompts[i]):
            families.append([])
        families[-1].append(i)
    return sorted(sorted(family) for family in families)


def _are_family(a: abc.Sequence[int], b: abc.Sequence[int]) -> bool:
    needed = max(MIN_SHARED, (min(len(a), len(b)) + 1) // 2)
    return min(len(a), len(b)) >= needed and a[:needed] == b[:needed]


class ShareKey(NamedTuple):
    """The key of a request's cells. Cells of different keys are never shared.

    Attributes:
        adapters: the adapters with which the cells were computed.
        cache_salt: the salt of the request that computed the cells.
    """

    adapters: AdapterSet = ()
    cache_salt: str | None = None


PLAIN = ShareKey()


def share_key(request: Request) -> ShareKey:
    """Returns the key of a request's cells."""
    return ShareKey(request.adapters, request.params.cache_salt)


def best_source(
    sequence: Sequence, running: Iterable[Sequence], least_cut: Callable[[Sequence], int] | None = None
) -> tuple[Sequence, int] | None:
    """Returns the running sequence whose cells save the most tokens, and the number of these tokens; None if no
    sequence saves enough.

    Args:
        least_cut: returns the minimum number of tokens to which the cells of a sequence can be cut; None: all cells can
            be cut to any number of tokens.
    """
    prompt, most, key = sequence.token_ids, sequence.most_shared, share_key(sequence.request)
    if most < MIN_SHARED:
        return None
    head = prompt[:MIN_SHARED]
    best: tuple[Sequence, int] | None = None
    for other in running:
        if other is sequence or other.token_ids[:MIN_SHARED] != head or share_key(other.request) != key:
            continue
        shared = sequence.whole(min(common_length(prompt, other.token_ids), other.num_shareable, most))
        if least_cut is not None and least_cut(other) > shared:
            continue
        if shared >= MIN_SHARED and (best is None or shared > best[1]):
            best = (other, shared)
    return best
