"""Paths from a caller, resolved once; and the cache folder for files that llamabatch can make again: wheels, verdicts,
profiles.

`native_build/tools.py` runs before anything is installed and so has its own copy of `cache_dir`; a test
holds the two together.
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
AUTO = "auto"  # of mmproj
HUB = "hf:"
_ON_THE_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[^:]+)?(:.+)?", re.ASCII)


def absolute(path: str | os.PathLike[str]) -> str:
    """The path of the same file for any process and after any os.chdir: `~` is expanded, the working directory stands
    in front, and ".." leads where the system would go.

    Raises:
        ConfigError: the path is relative, and the working directory is gone; or no file can have this name.
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
    folder, name = os.path.split(text)  # ".." after a symbolic link is not the folder that holds the link
    if name in ("", os.curdir, os.pardir):
        return os.path.realpath(text)
    return os.path.join(os.path.realpath(folder), name)


def model_name(model: str | os.PathLike[str]) -> str:
    """A model's absolute path; "tiny", addresses and names on the hub stay as they are, and "owner/repo:Q4_K_M", unless
    it is a path of something here, gets the prefix of the hub's. Raises ConfigError as absolute."""
    name = os.fspath(model)
    if name == TINY or not name or is_remote(name):
        return name
    if isinstance(model, str) and _ON_THE_HUB.fullmatch(name) and not _is_path(name):
        return f"{HUB}{name}"
    return absolute(name)


def is_remote(name: str) -> bool:
    """True for an address and for a name on the hub with its prefix."""
    return name.startswith((HUB, "https://", "http://"))


def _is_path(name: str) -> bool:
    """True for a name of the form owner/repo that means a file: by its ending, or since it is there."""
    return (name.lower().endswith(".gguf") and ":" not in name) or os.path.lexists(name)


def shown(path: str | os.PathLike[str]) -> str:
    """A resolved path for messages, as one_line, and relative if it lies below the working directory."""
    text = os.fspath(path)
    with contextlib.suppress(OSError):
        folder = os.path.join(os.getcwd(), "")
        text = text[len(folder) :] if text.startswith(folder) and text != folder else text
    return one_line(text)


def one_line(path: str | os.PathLike[str]) -> str:
    """A path for messages: on one line, and visible on a terminal. Names may hold anything."""
    return visible(os.fspath(path)).replace("\n", r"\n").replace("\t", r"\t")


def cache_dir() -> Path:
    """The user's cache folder for llamabatch; `LLAMABATCH_CACHE` overrides it. The folder need not exist yet."""
    override = os.environ.get("LLAMABATCH_CACHE")
    if override:
        return _at_first(override)
    return of_user(platformdirs.user_cache_dir)


def of_user(find: Callable[..., str]) -> Path:
    """A folder of llamabatch's by platformdirs. Where nobody has a home, as a number without a name in a container, it
    is one that cannot be made, so that nothing is kept."""
    try:
        return Path(find("llamabatch", appauthor=False))
    except RuntimeError:
        return Path(os.sep, "nonexistent", "llamabatch")


@functools.cache
def _at_first(override: str) -> Path:
    """The folder that the variable named at its first use, even after os.chdir."""
    return Path(absolute(override))


def hub_home() -> Path:
    """The folder of Hugging Face's token and cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.path.expanduser(os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")))


def bundled_model() -> Path:
    """The file behind the name `tiny`. It is missing in a checkout that has not built it."""
    return Path(__file__).parents[1] / "bundled" / "tiny.gguf"
