"""Stores tuned profiles on disk, one small JSON file each in the user's cache.

A profile is looked up before llama_cpp is imported, since libgomp reads its spin count when it is loaded.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
from pathlib import Path

from llamabatch.config import EngineConfig
from llamabatch.errors import ModelFileError, SetupError
from llamabatch.gguf.shape import read_shape
from llamabatch.planning import binding_choice
from llamabatch.planning.cpu import cpu_flags, cpu_name
from llamabatch.planning.machine import Machine
from llamabatch.planning.profile import Profile, ProfileKey
from llamabatch.utils import paths
from llamabatch.utils.atomic_file import write_text

logger = logging.getLogger(__name__)

_LIBRARIES = (".so", ".dylib", ".dll")


def folder() -> Path:
    """Returns the folder of profiles, which may not exist."""
    return paths.cache_dir() / "profiles"


def find(model: Path, config: EngineConfig) -> Profile | None:
    """Returns the profile of a model file with these options on this machine; None if no profile can be read."""
    if not os.path.isdir(folder()):
        return None  # Without profiles the header of the model need not be read.
    try:
        key = key_of(model, config)
    except (OSError, ModelFileError) as error:
        logger.debug("the model has no profile: %s", error)
        return None
    profile = _read(file_of(key))
    if profile is not None and profile.key != key:
        logger.warning("%s is ignored: it is the profile of another model or machine", file_of(key))
        return None
    return profile


def keep(profile: Profile) -> Path:
    """Writes a profile over the previous one, atomically, and returns its file. Raises SetupError."""
    target = file_of(profile.key)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, json.dumps(profile.to_json(), indent=1))
    except OSError as error:
        raise SetupError(f"the profile cannot be written to {target}: {error.strerror}; {_CURE}") from error
    return target


def check_writable() -> None:
    """Raises SetupError if profiles cannot be written. Called before a measurement, which takes minutes."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder()):
            pass
    except OSError as error:
        raise SetupError(f"profiles cannot be written to {folder()}: {error.strerror}; {_CURE}") from error


_CURE = "set LLAMABATCH_CACHE to a folder that you may write"


def here() -> list[Profile]:
    """Returns all profiles of this machine and library, for any model, newest first."""
    try:
        files = sorted(folder().glob("*.json"))
    except OSError:
        return []
    found = [profile for profile in map(_read, files) if profile is not None]
    if not found:
        return []
    machine = _machine_key()
    mine = [p for p in found if (p.key.cpu, p.key.cpu_flags, p.key.cores, p.key.library) == machine]
    return sorted(mine, key=lambda profile: profile.created, reverse=True)


def key_of(model: Path, config: EngineConfig) -> ProfileKey:
    """Returns the profile key of a model file with these options on this machine. Raises OSError and ModelFileError."""
    return ProfileKey(read_shape(model), *_machine_key(), config.type_k, config.type_v, config.speed_changes)


def file_of(key: ProfileKey) -> Path:
    return folder() / f"{key.digest}.json"


def _read(file: Path) -> Profile | None:
    try:
        return Profile.from_json(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        logger.warning("the profile %s is ignored: %s", file, error)
        return None


def _machine_key() -> tuple[str, str, int, str]:
    flags = hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:16]
    return cpu_name(), flags, Machine.here().cores, library_id()


def library_id() -> str:
    """Returns the version of the binding in use and a digest of the sizes of its libraries; "none" without a binding.
    The sizes differ between builds with other flags or patches. The binding is not imported."""
    try:
        build = binding_choice.choose().build
        sizes = sorted((f.name, f.stat().st_size) for f in build.libraries.iterdir() if f.suffix in _LIBRARIES)
    except (OSError, SetupError):
        return "none"
    return f"{_version(build)} {hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:12]}"


def _version(build: binding_choice.Build) -> str:
    if build.is_ours:
        return str((build.marker or {}).get("version", "unknown"))
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return "none"
