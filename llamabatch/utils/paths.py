"""Paths from a caller, resolved once; and the cache folder for files that llamabatch can make again: wheels, verdicts,
profiles.

`native_patches/build.py` runs before anything is installed and so has its own copy of `cache_dir`; a test
holds the two together.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

import platformdirs

from llamabatch.errors import ConfigError
from llamabatch.utils.checks import show

TINY = "tiny"
HUB = "hf:"


def absolute(path: str | os.PathLike[str]) -> str:
    """The path of the same file for any process and after any os.chdir: `~` is expanded, the working directory stands
    in front, and ".." leads where the system would go.

    Raises:
        ConfigError: the path is relative, and the working directory is gone.
    """
    text = os.fspath(path)
    with contextlib.suppress(
        ValueError
    ):  # a name that no system can have; the first use of the path fails with a message
        text = os.path.expanduser(text)
    if not os.path.isabs(text):
        try:
            text = os.path.join(os.getcwd(), text)
        except OSError as error:
            raise ConfigError(
                f"{show(text)} is a relative path, and the working directory is gone; give an absolute path"
            ) from error
    if "\0" in text:
        return text
    if os.pardir not in text.split(os.sep):
        return os.path.normpath(text)
    folder, name = os.path.split(text)  # ".." after a symbolic link is not the folder that holds the link
    if name in ("", os.curdir, os.pardir):
        return os.path.realpath(text)
    return os.path.join(os.path.realpath(folder), name)


def model_name(model: str | os.PathLike[str]) -> str:
    """A model's absolute path; "tiny" and names on the hub stay as they are. Raises ConfigError as absolute."""
    name = os.fspath(model)
    return name if name == TINY or name.startswith(HUB) or not name else absolute(name)


def shown(path: str | os.PathLike[str]) -> str:
    """A resolved path for messages: relative if it lies below the working directory."""
    text = os.fspath(path)
    try:
        folder = os.path.join(os.getcwd(), "")
    except OSError:
        return text
    return text[len(folder) :] if text.startswith(folder) and text != folder else text


def cache_dir() -> Path:
    """The user's cache folder for llamabatch; `LLAMABATCH_CACHE` overrides it. The folder need not exist yet."""
    override = os.environ.get("LLAMABATCH_CACHE")
    if override:
        return _at_first(override)
    return Path(platformdirs.user_cache_dir("llamabatch", appauthor=False))


@functools.cache
def _at_first(override: str) -> Path:
    """The folder that the variable named at its first use, even after os.chdir."""
    return Path(absolute(override))


def bundled_model() -> Path:
    """The file behind the name `tiny`. It is missing in a checkout that has not built it."""
    return Path(__file__).parents[1] / "models" / "tiny.gguf"
