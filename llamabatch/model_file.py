"""Which file a model's name means, and whether it can be a model at all, before anything native sees it."""

from __future__ import annotations

import re
import struct
from importlib import resources
from pathlib import Path

from llamabatch.checks import show
from llamabatch.errors import ModelFileError

TINY = "tiny"
HUB = "hf:"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_PARTS = 1024
_HEADER = struct.Struct("<4sIQQ")  # magic, version, tensors, key-value pairs
_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf)$", re.IGNORECASE)  # llama.cpp, llama_split_path
_MAX_COUNT = 10_000_000  # a file that claims more entries than this is damaged


def resolve(model: str) -> Path:
    """The path of a model: a file, the first part of one in several files, the bundled one for "tiny", or one on the
    hub for "hf:owner/repo:Q4_K_M".

    Raises:
        ModelFileError: it, or a part of it, is missing, a directory, unreadable, or its header is not GGUF's.
        SetupError: it is on the hub, and huggingface_hub is not installed.
    """
    if model == TINY:
        path = Path(str(resources.files("llamabatch.models") / "tiny.gguf"))
    elif model.startswith(HUB):
        from llamabatch.hub import fetch_reference  # needs an extra

        path = fetch_reference(model)
    else:
        path = Path(model)
    try:
        path = path.expanduser()
        parts = _parts(path)
        if path != parts[0] and path.exists():
            raise ModelFileError(f"{path} is one of {len(parts)} parts of a model; give the first, {parts[0].name}")
        for part in parts:
            if part != path and path.exists() and not part.exists():
                raise ModelFileError(f"{part} is missing: {path.name} is the first of {len(parts)} parts of a model")
            _check(part)
    except (OSError, RuntimeError, ValueError) as error:  # no such home, a name too long, a NUL in it, no permission
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{show(model)} cannot be read: {error}") from error
    return path


def local(model: str) -> str:
    """The same model by a name that asks no network: the path of what is on the hub. Raises as resolve."""
    return str(resolve(model)) if model.startswith(HUB) else model


def file_bytes(path: Path) -> int:
    """Size of a model's file, or of all its parts. Raises OSError."""
    return sum(part.stat().st_size for part in _parts(path))


def part_names(name: str) -> list[str]:
    """Names of the files of a model that was split (`model-00001-of-00003.gguf`), the first in front; else the name
    itself."""
    match = _PART.search(name)
    if match is None or not 1 <= int(match[2]) <= _MAX_PARTS:
        return [name]
    return [f"{name[: match.start()]}-{n:05d}-of-{match[2]}{match[3]}" for n in range(1, int(match[2]) + 1)]


def _parts(path: Path) -> list[Path]:
    return [path.with_name(name) for name in part_names(path.name)] if path.name else [path]


def _check(path: Path) -> None:
    if path.is_dir():
        raise ModelFileError(f"{path} is a directory; give the path of a .gguf file, or 'tiny'")
    if not path.exists():
        raise ModelFileError(f"{path} does not exist; give the path of a .gguf file, or 'tiny' for the bundled model")
    if not path.is_file():
        raise ModelFileError(f"{path} is no regular file; give the path of a .gguf file, or 'tiny'")
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        raise ModelFileError(f"{path} is not a GGUF file: it starts with {header[:4]!r}, not {_MAGIC!r}")
    if len(header) < _HEADER.size:
        raise ModelFileError(f"{path} is truncated: it has {len(header)} bytes, less than a GGUF header")
    _, version, tensors, pairs = _HEADER.unpack(header)
    if version not in _VERSIONS:
        raise ModelFileError(f"{path} is GGUF version {version}; allowed are 2 and 3")
    if tensors > _MAX_COUNT or pairs > _MAX_COUNT:
        raise ModelFileError(f"{path} is damaged: its header claims {tensors} tensors and {pairs} metadata entries")
