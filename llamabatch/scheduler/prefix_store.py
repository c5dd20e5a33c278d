"""Prefixes beyond the slots, for requests that begin with their tokens: loaded files, and states of slots. Pure Python.

A checkpoint is the state of a slot at one moment: of a sequence that stopped there, or of cells that give way to
others. Loaded files stay until they are unloaded; checkpoints have a number of bytes, and the least valuable go first.
A DiskTier holds checkpoints in a folder, where later processes find them.
"""

from __future__ import annotations

import itertools
import statistics
from array import array
from collections import abc, deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Protocol

from llamabatch.errors import InputError
from llamabatch.request.media import MediaRun
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.common_prefix import MIN_SHARED, PLAIN, ShareKey, common_length, share_key
from llamabatch.utils.paths import one_line

# A recurrent state has so many tokens at least, and saves so many more than another one of the same tokens: a copy of
# its 20 MB takes about as long as computing 10 tokens (0.8B shape).
MIN_CHECKPOINT = 256
MIN_GAIN = 128
_TOKEN_BYTES = 4  # of the array that a checkpoint has of its tokens
# A state on disk saves so many tokens more than what is at hand: to read 12 kB a token and to check them takes about
# 30 us (0.5B Q8_0), some 40 times less than computing it.
MIN_READ = 64
_LATEST = 5  # measured times whose median counts


@dataclass(eq=False)
class StoredPrefix:
    """One prefix.

    Attributes:
        token_ids: its tokens.
        state: all that a slot holds of these tokens, in a form that only the model runner reads; None: not saved yet.
        key: only requests of this key may use it.
        path: the file that it was loaded from; None: it is a checkpoint.
        used: when it was last of use, as a number that rises.
        n_prompt: of its tokens, those of the prompt that it began with.
        save_s: seconds that the copy of its state took; 0: not measured.
        is_dropped: it was unloaded, or dropped with others of its key, and fills no slot any more. One that only gave
            way to others may still fill the slot that waits for it.
        is_refused: llama.cpp did not take its state.
        media_runs: the pictures among its tokens that take fewer positions than cells.
        is_on_disk: its state is in a file of the DiskTier, and here only between `fetch` and `release`.
    """

    token_ids: abc.Sequence[int]
    state: Sized | None = None
    key: ShareKey = PLAIN
    path: str | None = None
    used: int = field(default=0, repr=False)
    n_prompt: int = 0
    save_s: float = field(default=0.0, repr=False)
    is_dropped: bool = False
    is_refused: bool = False
    media_runs: tuple[MediaRun, ...] = ()
    is_on_disk: bool = False

    def __post_init__(self) -> None:
        self.token_ids = array("i", self.token_ids)

    @property
    def n_bytes(self) -> int:
        """Bytes of its state and its tokens."""
        return _TOKEN_BYTES * len(self.token_ids) + (0 if self.state is None else len(self.state))


class DiskTier(Protocol):
    """Checkpoints in a folder (engine/prefix_folder.py). Files are written and read on a thread of its own."""

    def alike(self, token_ids: abc.Sequence[int], key: ShareKey) -> abc.Iterable[StoredPrefix]:
        """Its prefixes that may begin with the same tokens."""

    @property
    def is_busy(self) -> bool:
        """True while it writes a file: it takes one at a time."""

    def wants(self, prefix: StoredPrefix) -> bool:
        """True if this prefix is worth a file beside those that it has."""

    def keep(self, prefix: StoredPrefix) -> None:
        """Begins to write a prefix with its state."""

    def fetch(self, prefix: StoredPrefix) -> None:
        """Begins to read the state of one of its prefixes; one whose file is lost or damaged is dropped."""

    def release(self, prefix: StoredPrefix) -> None:
        """The state that was fetched is not needed any more."""

    def discard(self, unwanted: Callable[[StoredPrefix], bool]) -> None:
        """Drops such prefixes, with their files."""


class PrefixStore:
    """Loaded prefixes by the path of their file, and checkpoints by how they begin.

    Args:
        most_bytes: bytes of all checkpoints in main memory at most; 0: none is kept.
        is_exact: a state is of use at its very end alone; else also cut to fewer tokens.
        disk: a tier below main memory; None: there is none.

    Attributes:
        n_bytes: bytes of all checkpoints, without those of this step.
        n_saved: checkpoints so far.
    """

    def __init__(self, most_bytes: int = 0, is_exact: bool = False, disk: DiskTier | None = None) -> None:
        self.n_bytes = 0
        self.n_saved = 0
        self._most_bytes = most_bytes
        self._is_exact = is_exact
        self._files: dict[str, StoredPrefix] = {}
        self._checkpoints: dict[tuple[ShareKey, tuple[int, ...]], list[StoredPrefix]] = {}
        self._pending: list[StoredPrefix] = []  # the model runner saves them in this step
        self._pending_bytes = 0  # that these may take
        self.disk = disk
        self._unwritten: dict[StoredPrefix, None] = {}  # checkpoints that the disk may still get, the newest last
        self._uses = 0
        self._token_times: deque[float] = deque(maxlen=_LATEST)  # seconds of a token in the last copies of states

    @property
    def keeps_checkpoints(self) -> bool:
        return self._most_bytes > 0

    @property
    def token_s(self) -> float | None:
        """Seconds that the copy of a token takes; None: not known yet."""
        return statistics.median(self._token_times) if self._token_times else None

    def load(self, path: str, token_ids: abc.Sequence[int], state: bytes) -> None:
        """Holds a prefix until it is unloaded; it replaces an earlier one of that path."""
        self._let_go(path)
        self._files[path] = StoredPrefix(token_ids, state, PLAIN, path)

    def unload(self, path: str) -> None:
        """Frees a prefix. Raises InputError if it is not loaded."""
        if not self._let_go(path):
            raise InputError(f"no prefix of {one_line(path)} is loaded")

    def _let_go(self, path: str) -> bool:
        """Frees the prefix of a file; False: none is loaded."""
        prefix = self._files.pop(path, None)
        if prefix is not None:
            prefix.is_dropped = True
        return prefix is not None

    def find(self, sequence: Sequence, known: int, most: int | None = None) -> tuple[StoredPrefix, int] | None:
        """The prefix that saves the most work and how many of its tokens do; None if none does.

        Args:
            known: tokens that need not be computed without the store; a prefix must save MIN_SHARED more.
            most: tokens of a prefix at most, all of which fill cells before they are cut; None: any number.
        """
        best = None
        token_ids = array("i", sequence.token_ids)
        for prefix in self._alike(token_ids, share_key(sequence.request)):
            if most is not None and len(prefix.token_ids) > most:
                continue
            shared = sequence.whole(min(common_length(token_ids, prefix.token_ids), sequence.most_shared))
            if shared < len(prefix.token_ids) and self._is_exact:
                continue
            gain = MIN_SHARED if best is None else 1
            if prefix.is_on_disk and (best is None or not best[0].is_on_disk):
                gain = MIN_READ
            if shared >= known + gain:
                best, known = (prefix, shared), shared
        if best is not None:
            self._uses += 1
            best[0].used = self._uses
        return best

    def longest_common(self, token_ids: abc.Sequence[int], key: ShareKey) -> int:
        """Tokens that these have in common with a prefix at most, whether its state is of use there or not."""
        ids = array("i", token_ids)
        return max((common_length(ids, prefix.token_ids) for prefix in self._alike(ids, key)), default=0)

    def checkpoint(self, token_ids: abc.Sequence[int], key: ShareKey, gain: int) -> StoredPrefix | None:
        """A checkpoint of these tokens, which the model runner is to save in this step; `settle` takes it in.

        Args:
            gain: tokens that it must save beyond those that the store has already.

        Returns:
            None where it would save fewer.
        """
        count = len(token_ids)
        if not self.keeps_checkpoints or count < max(gain, MIN_SHARED):
            return None
        pending = (prefix for prefix in self._pending if prefix.key == key)
        ids = array("i", token_ids)
        for other in itertools.chain(self._alike(ids, key), pending):
            reach = common_length(ids, other.token_ids)
            if (reach == len(other.token_ids) or not self._is_exact) and reach > count - max(gain, 1):
                self._uses += 1
                other.used = self._uses
                return None
        prefix = StoredPrefix(ids, None, key)
        self._pending.append(prefix)
        return prefix

    def make_room(self, prefix: StoredPrefix, n_bytes: int) -> bool:
        """Frees the least valuable checkpoints, so that a new one has room; False: it would have none by itself.

        Args:
            prefix: one that `checkpoint` has given in this step.
            n_bytes: of its state, which is copied next.
        """
        needed = self._pending_bytes + prefix.n_bytes + n_bytes
        if needed > self._most_bytes:
            return False
        self._pending_bytes = needed
        self._evict_to(self._most_bytes - needed)
        return True

    def settle(self) -> None:
        """The step is over: takes in the checkpoints that were saved."""
        for prefix in self._pending:
            if prefix.state is not None and not prefix.is_dropped:
                self._take_in(prefix)
        self._pending.clear()
        self._pending_bytes = 0
        self.write_next()

    def write_next(self) -> bool:
        """Lets the disk have the newest checkpoint that it wants; True if there was one."""
        while self.disk is not None and self._unwritten:
            prefix = next(reversed(self._unwritten))
            if self.disk.is_busy:
                return False
            del self._unwritten[prefix]
            if self.disk.wants(prefix):
                self.disk.keep(prefix)
                return True
        return False

    def _take_in(self, prefix: StoredPrefix) -> None:
        self._uses += 1
        self.n_saved += 1
        prefix.used = self._uses
        if prefix.save_s:
            self._token_times.append(prefix.save_s / len(prefix.token_ids))
        alike = self._checkpoints.setdefault(_head(prefix.token_ids, prefix.key), [])
        if not self._is_exact:  # those that it begins with are of no use any more
            for other in [each for each in alike if each.token_ids == prefix.token_ids[: len(each.token_ids)]]:
                self.n_bytes -= other.n_bytes
                alike.remove(other)
                self._unwritten.pop(other, None)
        alike.append(prefix)
        if self.disk is not None:
            self._unwritten[prefix] = None
        self.n_bytes += prefix.n_bytes

    def drop(self, unwanted: Callable[[ShareKey], bool]) -> None:
        """Frees all checkpoints of such keys, and takes none in that was begun."""
        for prefix in list(self._all()):
            if unwanted(prefix.key):
                self._free(prefix)
                prefix.is_dropped = True
        for prefix in self._pending:
            prefix.is_dropped = prefix.is_dropped or unwanted(prefix.key)

    def discard(self, prefix: StoredPrefix) -> None:
        """Frees a checkpoint that is of no use, if it has not given way yet; it fills no slot any more."""
        prefix.is_dropped = True
        if prefix.is_on_disk and self.disk is not None:
            self.disk.discard(lambda other: other is prefix)
        if prefix in self._checkpoints.get(_head(prefix.token_ids, prefix.key), ()):
            self._free(prefix)

    def check_integrity(self) -> None:
        """Raises ValueError if bytes are counted wrongly, or are too many."""
        total = sum(prefix.n_bytes for prefix in self._all())
        if total != self.n_bytes or total > self._most_bytes:
            raise ValueError(f"checkpoints have {total} bytes; {self.n_bytes} are counted of {self._most_bytes}")

    def _alike(self, token_ids: abc.Sequence[int], key: ShareKey) -> Iterator[StoredPrefix]:
        """Prefixes that may begin with the same tokens."""
        if key == PLAIN:
            yield from self._files.values()
        if self._checkpoints and len(token_ids) >= MIN_SHARED:
            yield from self._checkpoints.get(_head(token_ids, key), ())
        if self.disk is not None:
            yield from self.disk.alike(token_ids, key)

    def _all(self) -> Iterator[StoredPrefix]:
        return (prefix for alike in self._checkpoints.values() for prefix in alike)

    def _evict_to(self, n_bytes: int) -> None:
        """Frees the least valuable checkpoints: fewest tokens for their bytes and their age."""
        if self.n_bytes <= n_bytes:
            return
        for prefix in sorted(self._all(), key=self._value):
            if self.n_bytes <= n_bytes:
                break
            self._free(prefix)

    def _value(self, prefix: StoredPrefix) -> float:
        return len(prefix.token_ids) / prefix.n_bytes / (self._uses + 1 - prefix.used)

    def _free(self, prefix: StoredPrefix) -> None:
        head = _head(prefix.token_ids, prefix.key)
        alike = self._checkpoints[head]
        alike.remove(prefix)
        self._unwritten.pop(prefix, None)
        if not alike:
            del self._checkpoints[head]
        self.n_bytes -= prefix.n_bytes


def _head(token_ids: abc.Sequence[int], key: ShareKey) -> tuple[ShareKey, tuple[int, ...]]:
    return key, tuple(token_ids[:MIN_SHARED])
