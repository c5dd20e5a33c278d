"""Which file a model's name means, and whether it can be a model at all, before anything native sees it."""

from __future__ import annotations

import struct
from importlib import resources
from pathlib import Path

from llamabatch.checks import show
from llamabatch.errors import ModelFileError

TINY = "tiny"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_HEADER = struct.Struct("<4sIQQ")  # magic, version, tensors, key-value pairs
_MAX_COUNT = 10_000_000  # a file that claims more entries than this is damaged


def resolve(model: str) -> Path:
    """The path of a model: a file, or the bundled one for "tiny".

    Raises:
        ModelFileError: it is missing, a directory, unreadable, or its header is not GGUF's.
    """
    if model == TINY:
        path = Path(str(resources.files("llamabatch.models") / "tiny.gguf"))
    else:
        path = Path(model)
    try:
        path = path.expanduser()
        _check(path)
    except (OSError, RuntimeError, ValueError) as error:  # no such home, a name too long, a NUL in it, no permission
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{show(model)} cannot be read: {error}") from error
    return path


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
