"""Which file a model's name means, and whether it can be a model at all, before anything native sees it."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from llamabatch.checks import show
from llamabatch.errors import ModelFileError
from llamabatch.gguf_header import check_start, part_paths
from llamabatch.paths import HUB, TINY, absolute


def resolve(model: str) -> Path:
    """The absolute path of a model: a file, the first part of one in several files, the bundled one for "tiny", or one
    on the hub for "hf:owner/repo:Q4_K_M".

    Raises:
        ConfigError: the path is relative, and the working directory is gone.
        ModelFileError: it, or a part of it, is missing, a directory, unreadable, or its header is not GGUF's.
        SetupError: it is on the hub, and huggingface_hub is not installed.
    """
    if model == TINY:
        path = Path(str(resources.files("llamabatch.models") / "tiny.gguf"))
    elif model.startswith(HUB):
        from llamabatch.hub import fetch_reference  # needs an extra

        path = fetch_reference(model)
    else:
        path = Path(absolute(model))
    try:
        parts = part_paths(path)
        if path != parts[0] and path.exists():
            raise ModelFileError(f"{path} is one of {len(parts)} parts of a model; give the first, {parts[0].name}")
        for part in parts:
            if part != path and path.exists() and not part.exists():
                raise ModelFileError(f"{part} is missing: {path.name} is the first of {len(parts)} parts of a model")
            _check(part)
    except (OSError, ValueError) as error:  # a name too long, a NUL in it, no permission
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{show(model)} cannot be read: {error}") from error
    return path


def local(model: str) -> str:
    """The same model by a name that asks no network: the path of what is on the hub. Raises as resolve."""
    return str(resolve(model)) if model.startswith(HUB) else model


def file_bytes(path: Path) -> int:
    """Size of a model's file, or of all its parts. Raises OSError."""
    return sum(part.stat().st_size for part in part_paths(path))


def _check(path: Path) -> None:
    if path.is_dir():
        raise ModelFileError(f"{path} is a directory; give the path of a .gguf file, or 'tiny'")
    if not path.exists():
        raise ModelFileError(f"{path} does not exist; give the path of a .gguf file, or 'tiny' for the bundled model")
    if not path.is_file():
        raise ModelFileError(f"{path} is no regular file; give the path of a .gguf file, or 'tiny'")
    check_start(path)
