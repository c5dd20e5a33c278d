"""Checks a model file before this process loads it: headers, digest, and a trial load in a child process.

A GGUF file is untrusted data. llama.cpp checks the data with assertions, and a failed assertion ends the process. So a
file must first pass gguf/validation.py. Then a small program loads the file (llama/trial_load.py). Only then does this
process load the file.

The verdict is kept (utils/disk_cache.py) under a hash of the headers, the sizes of the files, and the llama.cpp in use.
A second record maps a file (path, size, time of the last change, inode) to its hash. So a check of a known file takes
two reads.
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from llamabatch.errors import EngineClosedError, ModelFileError
from llamabatch.gguf.header import Header, part_paths, read_header
from llamabatch.gguf.overrides import KvOverrides, TensorOverrides
from llamabatch.gguf.validation import check_model
from llamabatch.planning import machine
from llamabatch.planning.binding_choice import for_children
from llamabatch.planning.profile_store import library_id
from llamabatch.utils import disk_cache
from llamabatch.utils.cancellation import is_cancelled
from llamabatch.utils.paths import absolute, one_line
from llamabatch.utils.subprogram import run_program
from llamabatch.utils.system import fatal_signal

logger = logging.getLogger(__name__)

VERSION = 4  # version of the checks and the trial; verdicts of other versions do not count
# The content_hash of the bundled model. This model needs no trial. A test checks the value.
BUNDLED = "e9e9506e323c7d65c18c3b84a5350069da9a6171021a07d6a51e9c7cf2d8add5"
FILES, MODELS = "file", "model"
PROGRAM = "llamabatch.llama.trial_load"
PROJECTOR_PROGRAM = "llamabatch.llama.trial_projector"
_CHUNK = 1 << 22
_PATIENCE_S = 60.0
_SLOWEST = 20e6  # bytes/s; on a slower disk, a trial may exceed its time limit
# If one of these signals ends the child, the file is the cause. Other signals may come from the system.
_OF_THE_FILE = ("SIGSEGV", "SIGILL", "SIGABRT", "SIGBUS", "SIGFPE")
_CURE = "trial='off' loads it all the same"

Identity: TypeAlias = "tuple[tuple[str, int, int, int], ...]"

# This process keeps its results here, in case the disk cache cannot be written.
_seen: dict[Identity, FileIdentity] = {}
_loadable: set[tuple[Identity, str]] = set()  # known loadable files, each with the overrides of its load


@dataclass(frozen=True)
class FileIdentity:
    """Facts about the current files of a model.

    Attributes:
        identity: path, size, time of the last change in ns, and inode of each file.
        content: the content_hash of the files; None if they have not been checked yet.
        sha256: the digest of the files one after another; None if not computed yet.
    """

    identity: Identity
    content: str | None = None
    sha256: str | None = None

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Returns the kept facts if the files are unchanged, else new facts. Raises OSError."""
        identity = []
        for part in part_paths(path):
            part = part.resolve()  # after part_paths(): link targets in the hub's cache have no part numbers
            status = part.stat()
            identity.append((str(part), status.st_size, status.st_mtime_ns, status.st_ino))
        new = cls(tuple(identity))
        if new.identity in _seen:
            return _seen[new.identity]
        kept = disk_cache.read(FILES, new.key)
        if kept is None or kept.get("version") != VERSION or kept.get("identity") != [list(each) for each in identity]:
            return new
        content, sha256 = kept.get("content"), kept.get("sha256")
        return replace(
            new, content=content if _is_digest(content) else None, sha256=sha256 if _is_digest(sha256) else None
        )

    @property
    def key(self) -> str:
        return hashlib.sha256(self.identity[0][0].encode("utf-8", "surrogateescape")).hexdigest()[:24]

    @property
    def n_bytes(self) -> int:
        return sum(size for _, size, _, _ in self.identity)

    def keep(self) -> None:
        _seen[self.identity] = self
        kept = {"version": VERSION, "identity": self.identity, "content": self.content, "sha256": self.sha256}
        disk_cache.keep(FILES, self.key, kept)


def ensure_loadable(
    path: Path,
    trial: str = "auto",
    sha256: str | None = None,
    kv_overrides: KvOverrides = (),
    override_tensor: TensorOverrides = (),
) -> None:
    """Raises an error unless llama.cpp may load the file into this process.

    Args:
        trial: "on" always loads the file in a child process first; "off" never does; "auto" does so if no verdict is
            kept.
        sha256: required digest of the file, or of its parts one after another: 64 hexadecimal digits.
        kv_overrides, override_tensor: overrides for the load. A verdict is valid only for the same overrides.

    Raises:
        ModelFileError: the file is damaged, has another digest, is refused by llama.cpp, or crashed the child.
        ConfigError: an override has another type than the file's value.
        EngineClosedError: the load was cancelled.
    """
    known = ensure_sound(path, sha256, kv_overrides)
    patterns = [pattern for pattern, _ in override_tensor]  # the child has no GPUs, so only the patterns matter
    changes = json.dumps([kv_overrides, patterns]) if kv_overrides or patterns else ""
    is_known = (known.content == BUNDLED and not changes) or (known.identity, changes) in _loadable
    if trial != "on" and (trial == "off" or is_known):
        return
    arguments = [absolute(path), str(known.n_bytes), *([changes] if changes else [])]
    _try(path, f"{known.content}{changes}", trial, known.n_bytes, PROGRAM, arguments)
    _loadable.add((known.identity, changes))


def ensure_projector_loadable(path: Path, model: Path, trial: str = "auto") -> None:
    """Does the work of ensure_loadable for an mmproj file. Call ensure_loadable for its text model first."""
    known, text = FileIdentity.of(path), FileIdentity.of(model)
    together = f"{text.content}, whose media are read"
    if trial == "off" or (trial == "auto" and (known.identity, together) in _loadable):
        return
    try:
        content = content_hash([read_header(path)])
    except OSError as error:
        raise ModelFileError(f"{one_line(path)} cannot be read: {error.strerror}") from error
    _try(path, f"{content}{together}", trial, known.n_bytes, PROJECTOR_PROGRAM, [absolute(path), absolute(model)])
    _loadable.add((known.identity, together))


def _try(path: Path, content: str, trial: str, n_bytes: int, program: str, arguments: list[str]) -> None:
    """Raises ModelFileError if a kept verdict or a new trial says that the file cannot be loaded.

    Args:
        content: text with the hashes and overrides. The verdict is kept under a hash of this text.
        n_bytes: size of the file.
    """
    key = _verdict_key(content)
    kept = disk_cache.read(MODELS, key) if trial == "auto" else None
    if kept is None or not isinstance(kept.get("loads"), bool):
        kept = _tried(path, n_bytes, program, arguments)
        if kept.pop("certain"):
            disk_cache.keep(MODELS, key, kept)
    if not kept["loads"]:
        raise ModelFileError(f"{one_line(path)} {kept.get('why')}")


def ensure_sound(path: Path, sha256: str | None = None, kv_overrides: KvOverrides = ()) -> FileIdentity:
    """Checks the headers of a file unless they are known, and the digest if one is given. Does not use llama.cpp.

    Raises:
        ModelFileError, ConfigError: as ensure_loadable.
    """
    try:
        known = FileIdentity.of(path)
        if sha256 is not None:
            known = _with_digest(path, known, sha256)
        if known.content is None:
            known = replace(known, content=content_hash(check_model(path)))
            known.keep()
        if kv_overrides:
            check_model(path, kv_overrides)
    except OSError as error:
        raise ModelFileError(f"{one_line(path)} cannot be read: {error.strerror}") from error
    return known


def content_hash(headers: Iterable[Header]) -> str:
    """Returns the SHA-256 of all data that a load parses: the headers and sizes of all parts. A load does not look at
    the values of the weights, so they are left out."""
    digest = hashlib.sha256()
    for header in headers:
        digest.update(f"{header.file_bytes} {header.header_bytes}\n".encode())
        with header.path.open("rb") as file:
            digest.update(file.read(header.header_bytes))
    return digest.hexdigest()


def _with_digest(path: Path, known: FileIdentity, wanted: str) -> FileIdentity:
    if known.sha256 is None:
        digest = hashlib.sha256()
        for part in part_paths(path):
            with part.open("rb", buffering=0) as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
        known = replace(known, sha256=digest.hexdigest())
        known.keep()
    if known.sha256 != wanted.lower():
        raise ModelFileError(f"{one_line(path)} has the SHA-256 {known.sha256}, not {wanted.lower()}")
    return known


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64


def _verdict_key(content: str) -> str:
    """Returns the key of a verdict: a hash of `content`, the library, and the version of the trial."""
    return hashlib.sha256(f"{VERSION} {content} {library_id()}".encode()).hexdigest()[:32]


def _tried(path: Path, n_bytes: int, program: str, arguments: list[str]) -> dict[str, Any]:
    """Runs a program that loads the file. Returns a verdict. The entry "certain" is True if the verdict may be kept."""
    if not sys.executable:
        logger.debug("%s is not tried out: no interpreter is known", path)
        return {"loads": True, "certain": False}
    patience_s = _PATIENCE_S + n_bytes / _SLOWEST
    try:
        child = run_program(program, *arguments, timeout_s=patience_s, without_gpus=True, environment=for_children())
    except subprocess.TimeoutExpired:
        if is_cancelled():
            raise EngineClosedError(f"the load of {one_line(path)} was cancelled") from None
        why = f"could not be loaded by a child process within {patience_s:.0f} s; {_CURE}"
        return {"loads": False, "why": why, "certain": False}
    except OSError as error:
        logger.warning("%s is loaded without a trial: no child process can be started: %s", path, error)
        return {"loads": True, "certain": False}
    lines = child.stdout.decode("utf-8", "replace").splitlines()
    if child.returncode == 0:
        return {"loads": True, "certain": True}
    name = fatal_signal(child.returncode)
    if name is not None:
        why = f"crashes the process that loads it: {_last_words(lines) or name}; {_CURE}"
        return {"loads": False, "why": why, "certain": name in _OF_THE_FILE and not _has_memory_limits()}
    refusal = _refusal(lines)
    if refusal is not None:
        return {"loads": False, "why": f"cannot be loaded: {refusal}", "certain": False}
    logger.warning("%s is loaded without a trial: the trial failed with %d: %s", path, child.returncode, lines[-1:])
    return {"loads": True, "certain": False}


def _has_memory_limits() -> bool:
    """Returns True if this process has memory limits. A child inherits these limits, and they may make it crash."""
    return machine.address_space_left() is not None or machine.data_bytes_left() is not None


def _refusal(lines: list[str]) -> str | None:
    """Returns the reason that the child process printed when it refused the file, or None."""
    for line in lines:
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(answer, dict) and isinstance(answer.get("refused"), str):
            return str(answer["refused"])
    return None


def _last_words(lines: list[str]) -> str:
    """Returns the line of an assertion or a C++ exception in the output of a crashed process, or ""."""
    for line in lines:
        if "GGML_ASSERT" in line or "fatal error" in line or "what():" in line:
            return line.strip().rsplit("/", 1)[-1][:200]
    return ""
