"""Prefixes that outlive the process, in the folder of cache_disk.

Each prefix is a file in the form of prefix_file. There is a subfolder for each combination of model file, build of
llama.cpp and options, because cells depend on all of them. A separate thread writes and reads files, one at a time.
The thread deletes the least recently used files, of any process, before the folder exceeds its limit.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import threading
from array import array
from collections import abc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llamabatch.config import ResolvedConfig
from llamabatch.engine import prefix_file
from llamabatch.engine.prefix_file import PrefixFile
from llamabatch.errors import ConfigError, InputError, describe
from llamabatch.llama import kv_state
from llamabatch.llama.model import Model
from llamabatch.scheduler.common_prefix import MIN_SHARED, ShareKey, common_length
from llamabatch.scheduler.prefix_store import MIN_CHECKPOINT, MIN_GAIN, StoredPrefix
from llamabatch.utils import system
from llamabatch.utils.checks import counted
from llamabatch.utils.format import file_size
from llamabatch.utils.paths import one_line

logger = logging.getLogger(__name__)

_MIN_GROWTH = 8  # a chat is written again only if it has grown by an eighth of its tokens
_LEFT_FREE = 2**30  # bytes of the file system that are left free for other programs
_CLOSE_S = 10.0  # `close` waits only this long for the thread, because a folder in a network may hang
_LOCK_S = 60.0  # seconds to wait for the lock: longer than writing a file takes
_HEADER_BYTES = 4096  # a file has at most this many bytes in addition to tokens, state and list of pictures
_RUN_BYTES = 64  # maximum bytes of a picture's entry in the header
_SUFFIX = ".prefix"
# Patterns of the names of subfolders and files. Subfolders and files with other names are never touched.
_HOMES, _NAMES = "[0-9a-f]" * 24, "[0-9a-f]" * 32


class PrefixFolder:
    """A DiskTier that keeps prefixes as files in a folder.

    Args:
        folder: path of the folder. A missing folder is made; only this user can open it.
        most_bytes: maximum bytes of all files in the folder together, including the files of other models.
        is_exact: a saved state is useful only for all of its tokens, not for the first part of them.

    Raises:
        ConfigError: the folder cannot be made or written to, or another process keeps the folder locked.
    """

    def __init__(self, folder: Path, most_bytes: int, model: Model, config: ResolvedConfig, is_exact: bool) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._is_exact = is_exact
        self._n_ctx = config.n_ctx
        self._layout = kv_state.Layout.of(model)
        self._check: Callable[[PrefixFile], None] = lambda prefix: kv_state.check(
            model, config, prefix.token_ids, prefix.state, prefix.media_runs
        )
        self._facts = _facts(model, config)
        # Text has the same cells with any mmproj file, so the name of the subfolder does not depend on that file.
        named = json.dumps({name: value for name, value in self._facts.items() if name != prefix_file.MMPROJ})
        self._home = folder / hashlib.blake2b(named.encode(), digest_size=12).hexdigest()
        self.n_bytes = 0  # bytes of all files in the folder when it was last listed
        self._changed = threading.Condition()  # guards the attributes that follow
        self._files: dict[StoredPrefix, Path] = {}
        self._by_head: dict[tuple[str | None, bytes], list[StoredPrefix]] = {}
        self._writing: StoredPrefix | None = None
        self._awaited: dict[StoredPrefix, None] = {}  # prefixes to read, in the order of the calls of `fetch`
        self._is_unwanted = False  # True: the prefix in _writing was discarded, so its file is deleted once written
        self._has_warned = False
        self._refusal: str | None = None  # the error that has stopped writing; None: writing goes on
        self._is_closing = False
        try:
            with self._alone():
                self._all()
                self._scan()
        except OSError as error:
            reason = "this is a file" if isinstance(error, FileExistsError) else error.strerror
            raise ConfigError(f"cache_disk is {one_line(folder)}: {reason}; give a folder to write to") from error
        self._thread = threading.Thread(target=self._run, name="llamabatch-prefixes", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return self._writing is not None

    def wait(self, seconds: float) -> None:
        """Waits until the folder's thread has read or written a file, for at most `seconds`."""
        with self._changed:
            self._changed.wait(seconds)

    def alike(self, token_ids: abc.Sequence[int], key: ShareKey) -> list[StoredPrefix]:
        if key.adapters or len(token_ids) < MIN_SHARED:
            return []
        with self._changed:
            return list(self._by_head.get(_head(token_ids, _salt(key)), ()))

    def wants(self, prefix: StoredPrefix) -> bool:
        count = len(prefix.token_ids)
        # With adapters, cells also depend on the adapters' files, but the facts do not describe these files.
        if self._refusal or count < MIN_CHECKPOINT or prefix.key.adapters:
            return False
        return not any(self._covers(other, prefix) for other in self.alike(prefix.token_ids, prefix.key))

    def _covers(self, held: StoredPrefix, other: StoredPrefix) -> bool:
        """Returns True if the file of `held` spares requests nearly as many tokens as a file of `other` would."""
        count, reach = len(other.token_ids), common_length(held.token_ids, other.token_ids)
        is_of_use = reach == len(held.token_ids) or not self._is_exact
        return is_of_use and reach > count - max(MIN_GAIN, count // _MIN_GROWTH)

    def keep(self, prefix: StoredPrefix) -> None:
        with self._changed:
            self._writing, self._is_unwanted = prefix, False
            self._changed.notify_all()

    def fetch(self, prefix: StoredPrefix) -> None:
        with self._changed:
            self._awaited[prefix] = None
            self._changed.notify_all()

    def release(self, prefix: StoredPrefix) -> None:
        with self._changed:
            self._awaited.pop(prefix, None)
            prefix.state = None
            self._changed.notify_all()

    def discard(self, unwanted: Callable[[StoredPrefix], bool]) -> None:
        with self._changed:
            self._scan()  # finds files written by other processes since the last scan
            self._is_unwanted |= self._writing is not None and unwanted(self._writing)
            for prefix in [prefix for prefix in self._files if unwanted(prefix)]:
                self._delete(prefix)

    def close(self) -> None:
        """Ends the thread. The thread first finishes writing its current file."""
        with self._changed:
            self._is_closing = True
            self._awaited.clear()
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._writing or self._next_read())
                reading, writing = self._next_read(), self._writing
            if reading is not None:
                self._read(reading)
            elif writing is not None:
                self._write(writing)
            else:
                return

    def _next_read(self) -> StoredPrefix | None:
        """Returns the next prefix to read; None while a state has been read but not yet copied to a slot."""
        if any(prefix.state is not None for prefix in self._awaited):
            return None
        return next((prefix for prefix in self._awaited if not prefix.is_dropped), None)

    def _read(self, prefix: StoredPrefix) -> None:
        found, path = None, self._files.get(prefix)
        try:
            if path is not None:
                found = prefix_file.read(path, self._facts, most_tokens=self._n_ctx)
                if array("i", found.token_ids) != prefix.token_ids:
                    raise InputError(f"{one_line(path)} holds other tokens than when it was found")
                self._check(found)
                with contextlib.suppress(OSError):
                    os.utime(path)  # the least recently used files are deleted first
        except Exception as error:
            found = None
            if path is not None and path.exists():  # a missing file was deleted to make room
                logger.warning("a kept prefix is computed again: %s", describe(error))
        with self._changed:
            if found is None:
                self._delete(prefix)
            elif prefix in self._awaited:
                prefix.state, prefix.media_runs = found.state, found.media_runs
            self._changed.notify_all()

    def _write(self, prefix: StoredPrefix) -> None:
        try:
            self._write_file(prefix)
        except TimeoutError as error:
            logger.warning("a prefix is not kept in %s: %s", one_line(self._folder), error.strerror)
        except Exception as error:
            self._refusal = describe(error)
            logger.warning("no more prefixes are written to %s: %s", one_line(self._folder), self._refusal)
        finally:
            with self._changed:
                self._writing = None
                self._changed.notify_all()

    def _write_file(self, prefix: StoredPrefix) -> None:
        """Writes a prefix to a file. Raises InputError or OSError for a problem that would also affect other files."""
        ids, salt = tuple(prefix.token_ids), _salt(prefix.key)
        state: Any = prefix.state
        if isinstance(state, np.ndarray):
            state = kv_state.portable(state, self._layout)
        file = PrefixFile(ids, state, prefix.media_runs)
        self._check(file)
        name = hashlib.blake2b(array("i", ids).tobytes() + (salt or "").encode(), digest_size=16).hexdigest()
        path = self._home / f"{name}{_SUFFIX}"
        facts = {**self._facts, "n_prompt": prefix.n_prompt, "salt": salt}
        with self._alone():
            n_bytes = len(state) + 4 * len(ids) + _HEADER_BYTES + _RUN_BYTES * len(file.media_runs)
            if not self._make_room(n_bytes):
                return
            prefix_file.write(path, file, facts, mode=0o600)
            self.n_bytes += n_bytes
        with self._changed:
            found = (known for known, at in self._files.items() if at == path)  # a scan may have added the file
            kept = next(found, None) or self._take_in(path, ids, facts)
            if self._is_unwanted:
                self._delete(kept)
            for other in list(self._by_head.get(_head(ids, salt), ())):
                if other is not kept and self._covers(kept, other):
                    self._delete(other)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Locks the folder in a `with` block. Only one process writes at a time, so that the files of all processes
        together stay below the limit.

        Raises OSError; TimeoutError if another process keeps the lock for longer than writing a file takes.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have deleted the folders
        self._home.mkdir(mode=0o700, exist_ok=True)
        for folder in (self._folder, self._home):
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, f"{one_line(folder)} cannot be written to")
        with open(self._folder / ".lock", "a", opener=_own_file) as file:
            if not system.lock(file.fileno()):
                logger.info("waiting for another process that writes to %s", one_line(self._folder))
                if not system.lock(file.fileno(), patience=_LOCK_S):
                    raise TimeoutError(errno.ETIMEDOUT, f"another process has held .lock for {_LOCK_S:.0f} s")
            yield

    def _make_room(self, n_bytes: int) -> bool:
        """Deletes the least recently used files of the folder to make room for a new file. Returns False, and deletes
        nothing, if all files together would not make enough room."""
        for part in self._folder.glob(f"{_HOMES}/{_NAMES}{_SUFFIX}.*.part"):
            part.unlink(missing_ok=True)  # left by a killed process: no other process writes now
        found = self._all()
        lacks = _LEFT_FREE + n_bytes - shutil.disk_usage(self._folder).free
        surplus = max(lacks, self.n_bytes + n_bytes - self._most_bytes)  # bytes to delete
        if surplus > self.n_bytes:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "a prefix of %s is not kept in %s, which may have %s in all (cache_disk_mib) and leaves %s of the "
                    "file system free",
                    *(file_size(n_bytes), one_line(self._folder)),
                    *(file_size(self._most_bytes), file_size(_LEFT_FREE)),
                )
            return False
        with self._changed:
            known = {path: prefix for prefix, path in self._files.items()}
            for _, n, path in sorted(found):
                if surplus <= 0:
                    break
                surplus -= n
                self.n_bytes -= n
                if path in known:
                    self._delete(known[path])
                else:
                    path.unlink(missing_ok=True)
        return True

    def _all(self) -> list[tuple[float, int, Path]]:
        """Returns (time of last use, bytes, path) of each file in the folder. Sets n_bytes to the sum of the bytes."""
        found = []
        for path in self._folder.glob(f"{_HOMES}/{_NAMES}{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                if stat.S_ISREG(about.st_mode):
                    found.append((about.st_mtime, about.st_size, path))
        self.n_bytes = sum(n for _, n, _ in found)
        return found

    def _scan(self) -> None:
        """Adds the files that are not known yet. Reads only headers and tokens; `_read` checks the files later."""
        passed, reason = 0, ""
        for path in sorted(set(self._home.glob(f"{_NAMES}{_SUFFIX}")) - set(self._files.values())):
            try:
                header, ids = prefix_file.read_head(path)
                if not prefix_file.fits(header, self._facts, ids):
                    raise InputError(f"{one_line(path)} is of another engine")
                if len(ids) <= self._n_ctx:
                    self._take_in(path, ids, header)
            except (InputError, OSError, ValueError) as error:
                passed, reason = passed + 1, reason or describe(error)
        if passed:
            logger.warning("%s of cache_disk left out: %s", counted(passed, "file"), reason)

    def _take_in(self, path: Path, ids: abc.Sequence[int], header: abc.Mapping[str, Any]) -> StoredPrefix:
        n_prompt, salt = header.get("n_prompt"), header.get("salt")
        prefix = StoredPrefix(
            ids,
            key=ShareKey((), salt if isinstance(salt, str) else None),
            n_prompt=min(n_prompt, len(ids)) if isinstance(n_prompt, int) else 0,
            is_on_disk=True,
        )
        self._files[prefix] = path
        self._by_head.setdefault(_head(ids, prefix.key.cache_salt), []).append(prefix)
        return prefix

    def _delete(self, prefix: StoredPrefix) -> None:
        """Removes a prefix, and deletes its file."""
        prefix.is_dropped = True
        path = self._files.pop(prefix, None)
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        head = _head(prefix.token_ids, prefix.key.cache_salt)
        alike = self._by_head.get(head, [])
        if prefix in alike:
            alike.remove(prefix)
        if not alike:
            self._by_head.pop(head, None)


def _own_file(name: str, flags: int) -> int:
    """Opens a file for this user alone. Refuses a pipe, because it would block."""
    if os.path.exists(name) and not os.path.isfile(name):
        raise OSError(errno.EINVAL, f"{one_line(name)} is no regular file")
    return os.open(name, flags, 0o600)


def _facts(model: Model, config: ResolvedConfig) -> dict[str, Any]:
    """Returns all facts that determine the bits of KV cells, apart from the tokens."""
    return {
        **kv_state.facts(model, config),
        "kernels": kv_state.kernels(config),
        "swa_full": config.swa_full,
        "kv": config.kv,
        "n_gpu_layers": config.n_gpu_layers,
    }


def _salt(key: ShareKey) -> str | None:
    """Returns the hash of a cache_salt. Files contain only the hash, because the salt may be a secret."""
    salt = key.cache_salt
    return None if salt is None else hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _head(token_ids: abc.Sequence[int], salt: str | None) -> tuple[str | None, bytes]:
    return salt, array("i", token_ids[:MIN_SHARED]).tobytes()
