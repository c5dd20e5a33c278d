"""Paths from a caller, and the cache folder for files that llamabatch can make again: wheels, verdicts, profiles.

`native_build/tools.py` runs before anything is installed, so it has its own copy of `cache_dir`. A test checks that the
two are equal.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

import platformdirs

from llamabatch.errors import ConfigError, visible
from llamabatch.utils.checks import show

TINY = "tiny"
AUTO = "auto"  # this value of mmproj means the file next to the model or in its repository
HUB = "hf:"
_ON_THE_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[^:]+)?(:.+)?", re.ASCII)


def absolute(path: str | os.PathLike[str]) -> str:
    """Returns an absolute path that means the same file in any process and after any os.chdir.

    `~` is expanded. The working directory is put before a relative path. ".." is resolved as the system resolves it.

    Raises:
        ConfigError: the path is relative and the working directory is gone, or no file can have this name.
    """
    text = os.fspath(path)
    try:
        if b"\0" in os.fsencode(text):
            raise ConfigError(f"{show(text)} is no path: it has a NUL, which ends names of files")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{show(text)} is no path: half of a surrogate pair is no character") from error
    text = os.path.expanduser(text)
    if not os.path.isabs(text):
        try:
            text = os.path.join(os.getcwd(), text)
        except OSError as error:
            raise ConfigError(
                f"{show(text)} is a relative path, and the working directory is gone; give an absolute path"
            ) from error
    if os.pardir not in text.split(os.sep):
        return os.path.normpath(text)
    folder, name = os.path.split(text)  # ".." after a symbolic link means the parent folder of the link's target
    if name in ("", os.curdir, os.pardir):
        return os.path.realpath(text)
    return os.path.join(os.path.realpath(folder), name)


def model_name(model: str | os.PathLike[str]) -> str:
    """Returns the absolute path of a model. "tiny", addresses and names with the prefix "hf:" stay unchanged.
    "owner/repo:Q4_K_M" gets the prefix "hf:", unless a file or folder has this path. Raises ConfigError as absolute
    does."""
    name = os.fspath(model)
    if name == TINY or not name or is_remote(name):
        return name
    if isinstance(model, str) and _ON_THE_HUB.fullmatch(name) and not _is_path(name):
        return f"{HUB}{name}"
    return absolute(name)


def is_remote(name: str) -> bool:
    """Returns True for an address and for a hub name with the prefix "hf:"."""
    return name.startswith((HUB, "https://", "http://"))


def _is_path(name: str) -> bool:
    """Returns True if a name of the form owner/repo is a path: it ends with ".gguf", or a file has this name."""
    return (name.lower().endswith(".gguf") and ":" not in name) or os.path.lexists(name)


def shown(path: str | os.PathLike[str]) -> str:
    """Returns a path for messages, as one_line does. An absolute path below the working directory becomes relative."""
    text = os.fspath(path)
    with contextlib.suppress(OSError):
        folder = os.path.join(os.getcwd(), "")
        text = text[len(folder) :] if text.startswith(folder) and text != folder else text
    return one_line(text)


def one_line(path: str | os.PathLike[str]) -> str:
    """Returns a path for messages. Control characters and line breaks in it are escaped."""
    return visible(os.fspath(path)).replace("\n", r"\n").replace("\t", r"\t")


def cache_dir() -> Path:
    """Returns llamabatch's cache folder, which `LLAMABATCH_CACHE` overrides. The folder need not exist."""
    override = os.environ.get("LLAMABATCH_CACHE")
    if override:
        return _at_first(override)
    return of_user(platformdirs.user_cache_dir)


def of_user(find: Callable[..., str]) -> Path:
    """Returns a folder for llamabatch from platformdirs. A user without a home, such as a user id without a name
    in a container, gets a folder that cannot be made. Nothing is stored then."""
    try:
        return Path(find("llamabatch", appauthor=False))
    except RuntimeError:
        return Path(os.sep, "nonexistent", "llamabatch")


@functools.cache
def _at_first(override: str) -> Path:
    """Returns the absolute path of LLAMABATCH_CACHE. os.chdir after the first call does not change the result."""
    return Path(absolute(override))


def hub_home() -> Path:
    """Returns the folder of Hugging Face's token and cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.path.expanduser(os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")))


def bundled_model() -> Path:
    """Returns the path of the model `tiny`. A checkout has no such file until the file is built."""
    return Path(__file__).parents[1] / "bundled" / "tiny.gguf"
