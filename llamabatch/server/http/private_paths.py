"""Removes the folders of this machine from messages for callers. A path becomes "…/" and its last name.

Any library may put a path into an error. Therefore messages are searched when they leave the server, not when they are
made. Messages in the log keep the whole paths.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from llamabatch.utils import paths

# First folders of absolute paths on Linux, macOS and in containers. _pattern adds folders of remembered paths.
_ROOTS = {
    *("bin", "boot", "dev", "etc", "home", "lib", "lib64", "media", "mnt", "nix", "opt", "proc", "root", "run", "sbin"),
    *("snap", "srv", "sys", "tmp", "usr", "var"),
    *("Applications", "Library", "System", "Users", "Volumes", "private"),
}
_NAME = r"[^\s/\\'\"`,;:()<>|]+"
_DRIVE = rf"\b[A-Za-z]:[\\/]+(?:{_NAME}[\\/]+)*"
_BEFORE = r"(?:(?<=file://)|(?<![\w./#~\\-]))"  # not inside a relative path, JSON pointer or URL, except after file://
# Matches the part of a message of gguf/resolve.py that lists the other models in a folder.
_NEIGHBOURS = re.compile(
    r"""; did you mean (['"])[^\n]*\.gguf\1\?|(?<=is a directory) with (?=['"])[^\n]*(?=; give the path)"""
)
_LONGEST = 4096  # maximum number of characters in a path; a longer text is not a path

_remembered: set[str] = set()


def remember(*options: object) -> None:
    """Remembers the absolute paths among the fields of option objects, and this process's own folders."""
    here = Path(__file__).parents[3]
    own = [sys.prefix, sys.base_prefix, tempfile.gettempdir(), os.path.expanduser("~"), str(here), _working_directory()]
    own += [str(paths.hub_home()), str(paths.cache_dir())]
    found = [*own, *(path for each in options for path in _paths(vars(each)))]
    _remembered.update(other for path in found for other in (path, os.path.realpath(path)))
    _pattern.cache_clear()


def without_paths(message: str) -> str:
    """Returns the message with "…/" in place of each folder, and without the lists of other models in a folder."""
    message = _NEIGHBOURS.sub("", message)
    if "/" not in message and "\\" not in message:
        return message
    return _pattern().sub("…/", message)


@cache
def _pattern() -> re.Pattern[str]:
    folders = {*_remembered, *map(os.path.dirname, _remembered)}
    exact = "|".join(re.escape(folder) for folder in sorted(folders, key=len, reverse=True) if len(folder) > 1)
    roots = {*_ROOTS, *(Path(path).parts[1] for path in folders if len(Path(path).parts) > 2)}
    names = "|".join(map(re.escape, sorted(roots)))
    forms = [
        *([rf"{_BEFORE}(?:{exact})[\\/](?:{_NAME}[\\/])*"] if exact else []),
        rf"{_BEFORE}/(?:{names})/(?:{_NAME}/)*",
    ]
    forms += [rf"{_BEFORE}~/(?:{_NAME}/)*", _DRIVE]
    forms += [rf"{_BEFORE}/(?={re.escape(path[1:])}\b)" for path in _remembered if _is_file_of_root(path)]
    return re.compile("|".join(forms))


def _is_file_of_root(path: str) -> bool:
    return os.path.dirname(path) == os.path.abspath(os.sep) and bool(os.path.splitext(path)[1])


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


def _paths(value: Any) -> Iterator[str]:
    """Yields the absolute paths in nested values, except the option `root_path`, which is part of a URL."""
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        if isinstance(text, str) and len(text) <= _LONGEST and os.path.isabs(text) and "\n" not in text:
            yield os.path.normpath(text)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            if name != "root_path":
                yield from _paths(each)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _paths(each)
