"""Stores prefixes outside the slots, for requests that begin with the same tokens. Pure Python.

There are two kinds: loaded files, and checkpoints. A checkpoint is a saved state of a slot. It is saved where the
sequence of the slot stopped, or before the slot's cells are overwritten. Files stay until they are unloaded.
Checkpoints share a limit in bytes, and the least valuable are evicted first. A DiskTier keeps checkpoints in a folder
for later processes.
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

# A recurrent model reads a prompt and stops for a checkpoint at MIN_CHECKPOINT tokens or later, and at least MIN_GAIN
# tokens after another checkpoint. Each stop costs one more pass over the weights, and a copy of 20 MB (0.8B shape).
MIN_CHECKPOINT = 256
MIN_GAIN = 128
_TOKEN_BYTES = 4  # bytes of a token id in StoredPrefix.token_ids
# A state on disk must save this many tokens more than the sources in memory. Reading and checking the 12 kB of a token
# takes about 30 us (0.5B Q8_0). This is some 40 times faster than computing the token.
MIN_READ = 64
_LATEST = 5  # the median of this many latest times is used


@dataclass(eq=False)
class StoredPrefix:
    """A stored prefix: its tokens and, once saved, its state.

    Attributes:
        token_ids: the tokens of the prefix.
        state: the contents of a slot with these tokens, in a format of the model runner; None: not saved yet.
        key: only requests with this key may use the prefix.
        path: the file that the prefix was loaded from; None: it is a checkpoint.
        used: serial number of the last use of the prefix. Later uses have higher numbers.
        n_prompt: number of prompt tokens at the beginning of the prefix.
        save_s: seconds that the copy of the state took; 0: not measured.
        is_dropped: True if no slot may be filled from the prefix any more. The reason: it could not be saved, or it was
            unloaded, discarded, or dropped with its key. An evicted prefix is not dropped: slots that already wait for
            it are still filled.
        is_refused: True if llama.cpp did not accept the state.
        media_runs: the pictures of the prefix that take fewer positions than cells.
        is_on_disk: True if the state is in a file of the DiskTier. `state` then has a copy only between `fetch` and
            `release`.
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
        """The number of bytes of the state and of the tokens."""
        return _TOKEN_BYTES * len(self.token_ids) + (0 if self.state is None else len(self.state))


class DiskTier(Protocol):
    """Checkpoints in a folder (engine/prefix_folder.py). A separate thread reads and writes the files."""

    def alike(self, token_ids: abc.Sequence[int], key: ShareKey) -> abc.Iterable[StoredPrefix]:
        """Returns those prefixes on disk that may begin with the same tokens as `token_ids`."""

    @property
    def is_busy(self) -> bool:
        """True while a file is being written. Only one file is written at a time."""

    def wants(self, prefix: StoredPrefix) -> bool:
        """True if this prefix should get a file."""

    def keep(self, prefix: StoredPrefix) -> None:
        """Starts to write a prefix with its state."""

    def fetch(self, prefix: StoredPrefix) -> None:
        """Starts to read the state of a prefix. Drops the prefix if its file is lost or damaged."""

    def release(self, prefix: StoredPrefix) -> None:
        """Frees the state of a prefix after `fetch`."""

    def discard(self, unwanted: Callable[[StoredPrefix], bool]) -> None:
        """Drops each prefix for which `unwanted(prefix)` is True, and deletes its file."""


class PrefixStore:
    """Stores loaded prefixes by the path of their file, and checkpoints by their first tokens.

    Args:
        most_bytes: the limit in bytes for all checkpoints in main memory; 0: no checkpoints are kept.
        is_exact: True: a state can be used only as a whole. False: a state can also be cut to fewer tokens.
        disk: also keeps checkpoints in files; None: checkpoints are kept only in main memory.

    Attributes:
        n_bytes: bytes of all checkpoints, without the checkpoints that were begun in this step.
        n_saved: number of checkpoints saved so far.
    """

    def __init__(self, most_bytes: int = 0, is_exact: bool = False, disk: DiskTier | None = None) -> None:
        self.n_bytes = 0
        self.n_saved = 0
        self._most_bytes = most_bytes
        self._is_exact = is_exact
        self._files: dict[str, StoredPrefix] = {}
        self._checkpoints: dict[tuple[ShareKey, tuple[int, ...]], list[StoredPrefix]] = {}
        self._pending: list[StoredPrefix] = []  # checkpoints that the model runner saves in this step
        self._pending_bytes = 0  # total size of the checkpoints in _pending that make_room has accepted
        self.disk = disk
        self._unwritten: dict[StoredPrefix, None] = {}  # checkpoints that may still be written to disk, newest last
        self._uses = 0
        self._save_times: deque[float] = deque(maxlen=_LATEST)  # seconds to save a token, or a state if is_exact

    @property
    def keeps_checkpoints(self) -> bool:
        return self._most_bytes > 0

    def copy_s(self, count: int) -> float | None:
        """Returns the seconds for a copy of a state with `count` tokens; None: not known yet. Recurrent states and
        states of sliding windows have about the same size for any `count`."""
        if not self._save_times:
            return None
        return statistics.median(self._save_times) * (1 if self._is_exact else count)

    def load(
        self, path: str, token_ids: abc.Sequence[int], state: bytes, media_runs: tuple[MediaRun, ...] = ()
    ) -> None:
        """Stores a prefix until it is unloaded. Replaces an earlier prefix of the same path."""
        self._let_go(path)
        self._files[path] = StoredPrefix(token_ids, state, PLAIN, path, media_runs=media_runs)

    def unload(self, path: str) -> None:
        """Frees a prefix. Raises InputError if the prefix is not loaded."""
        if not self._let_go(path):
            raise InputError(f"no prefix of {one_line(path)} is loaded")

    def _let_go(self, path: str) -> bool:
        """Frees the prefix of a file. Returns False if the file is not loaded."""
        prefix = self._files.pop(path, None)
        if prefix is not None:
            prefix.is_dropped = True
        return prefix is not None

    def find(self, sequence: Sequence, known: int, most: int | None = None) -> tuple[StoredPrefix, int] | None:
        """Returns the prefix that saves the most tokens, and the number of its tokens to use; None: no prefix saves
        enough.

        Args:
            known: number of tokens that the sequence gets without the store. A prefix must save MIN_SHARED tokens more.
                A prefix on disk must save MIN_READ tokens more.
            most: maximum number of tokens in a prefix, because all of them fill cells before the prefix is cut; None:
                no limit.
        """
        best = None
        token_ids = array("i", sequence.token_ids)
        key = share_key(sequence.request)
        for prefix in itertools.chain(self._alike(token_ids, key), self._pending_of(key)):
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
        """Returns the length of the longest beginning that `token_ids` shares with a stored prefix, even if the prefix
        cannot be cut there."""
        ids = array("i", token_ids)
        return max((common_length(ids, prefix.token_ids) for prefix in self._alike(ids, key)), default=0)

    def checkpoint(self, token_ids: abc.Sequence[int], key: ShareKey, gain: int) -> StoredPrefix | None:
        """Begins a checkpoint of these tokens. The model runner saves the checkpoint in this step, and `settle` stores
        it.

        Args:
            gain: number of tokens that the checkpoint must save in addition to the tokens that the store already has.

        Returns:
            The checkpoint; None if it would save fewer than `gain` tokens, or if no checkpoints are kept.
        """
        count = len(token_ids)
        if not self.keeps_checkpoints or count < max(gain, MIN_SHARED):
            return None
        ids = array("i", token_ids)
        for other in itertools.chain(self._alike(ids, key), self._pending_of(key)):
            reach = common_length(ids, other.token_ids)
            if (reach == len(other.token_ids) or not self._is_exact) and reach > count - max(gain, 1):
                self._uses += 1
                other.used = self._uses
                return None
        prefix = StoredPrefix(ids, None, key)
        self._pending.append(prefix)
        return prefix

    def make_room(self, prefix: StoredPrefix, n_bytes: int) -> bool:
        """Evicts checkpoints to make room for a new one. Returns False if the checkpoints of this step alone exceed the
        limit.

        Args:
            prefix: a checkpoint of this step, from `checkpoint`.
            n_bytes: size of the checkpoint's state. The caller copies this state next.
        """
        needed = self._pending_bytes + prefix.n_bytes + n_bytes
        if needed > self._most_bytes:
            return False
        self._pending_bytes = needed
        self._evict_to(self._most_bytes - needed)
        return True

    def settle(self) -> None:
        """Ends the step: stores the checkpoints that were saved."""
        for prefix in self._pending:
            if prefix.state is None:
                prefix.is_dropped = True
            elif not prefix.is_dropped:
                self._take_in(prefix)
        self._pending.clear()
        self._pending_bytes = 0
        self.write_next()

    def write_next(self) -> bool:
        """Starts to write the newest checkpoint that the disk wants. Returns False if there is none, or if the disk is
        busy."""
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
            self._save_times.append(prefix.save_s / (1 if self._is_exact else len(prefix.token_ids)))
        alike = self._checkpoints.setdefault(_head(prefix.token_ids, prefix.key), [])
        if not self._is_exact:  # the new checkpoint replaces shorter ones with the same tokens
            for other in [each for each in alike if each.token_ids == prefix.token_ids[: len(each.token_ids)]]:
                self.n_bytes -= other.n_bytes
                alike.remove(other)
                self._unwritten.pop(other, None)
        alike.append(prefix)
        if self.disk is not None:
            self._unwritten[prefix] = None
        self.n_bytes += prefix.n_bytes

    def drop(self, unwanted: Callable[[ShareKey], bool]) -> None:
        """Frees all checkpoints with an unwanted key, including checkpoints that were begun in this step."""
        for prefix in list(self._all()):
            if unwanted(prefix.key):
                self._free(prefix)
                prefix.is_dropped = True
        for prefix in self._pending:
            prefix.is_dropped = prefix.is_dropped or unwanted(prefix.key)

    def close(self) -> None:
        """Frees all states. Objects of the scheduler refer to one another, so the garbage collector would free them
        only later."""
        for prefix in itertools.chain(self._all(), self._files.values()):
            prefix.state = None

    def discard(self, prefix: StoredPrefix) -> None:
        """Frees a checkpoint that cannot be used, in memory and on disk. No slot is filled from it any more."""
        prefix.is_dropped = True
        if prefix.is_on_disk and self.disk is not None:
            self.disk.discard(lambda other: other is prefix)
        if prefix in self._checkpoints.get(_head(prefix.token_ids, prefix.key), ()):
            self._free(prefix)

    def check_integrity(self) -> None:
        """Raises ValueError if the byte count is wrong or over the limit."""
        total = sum(prefix.n_bytes for prefix in self._all())
        if total != self.n_bytes or total > self._most_bytes:
            raise ValueError(f"checkpoints have {total} bytes; {self.n_bytes} are counted of {self._most_bytes}")

    def _alike(self, token_ids: abc.Sequence[int], key: ShareKey) -> Iterator[StoredPrefix]:
        """Yields the prefixes that may begin with the same tokens as `token_ids`."""
        if key == PLAIN:
            yield from self._files.values()
        if self._checkpoints and len(token_ids) >= MIN_SHARED:
            yield from self._checkpoints.get(_head(token_ids, key), ())
        if self.disk is not None:
            yield from self.disk.alike(token_ids, key)

    def _pending_of(self, key: ShareKey) -> Iterator[StoredPrefix]:
        return (prefix for prefix in self._pending if prefix.key == key)

    def _all(self) -> Iterator[StoredPrefix]:
        return (prefix for alike in self._checkpoints.values() for prefix in alike)

    def _evict_to(self, n_bytes: int) -> None:
        """Evicts checkpoints until at most `n_bytes` bytes are left. The lowest value goes first. A value is the number
        of tokens per byte, divided by the age."""
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
