"""Adapters of a request: the names of loaded adapters, each with a scale. Pure Python.

An adapter is a LoRA or a control vector with a name. llama.cpp applies adapters to a whole context. So requests can
share a call only if they have the same set of adapters.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from llamabatch.errors import AdapterError
from llamabatch.utils.checks import counted, nearest, number, pairs, show, string
from llamabatch.utils.paths import absolute

# Pairs (name, scale), sorted by name. Pairs with the scale 0 are left out, so sets with the same effect are equal.
AdapterSet = tuple[tuple[str, float], ...]

MAX_SCALE = 1000.0
MAX_ADAPTERS = 1024  # maximum number of adapters in a set
MAX_NAME = 256  # maximum number of characters in a name


def adapter_set(adapters: object) -> AdapterSet:
    """Returns the AdapterSet of a caller's value.

    Args:
        adapters: {name: scale}, pairs (name, scale), one name (with the scale 1), or None for no adapter. An adapter
            with the scale 0 is left out.

    Raises:
        AdapterError: the value has another form, or a scale is not a number from -1000 to 1000.
    """
    if adapters is None:
        return ()
    if isinstance(adapters, str):
        adapters = ((adapters, 1.0),)
    given = pairs(adapters, MAX_ADAPTERS + 1) if isinstance(adapters, (tuple, Mapping)) else None
    if given is None:
        raise AdapterError(f"adapters is {show(adapters)}; give names and scales as {{'name': 1.0}}, or None")
    if len(given) > MAX_ADAPTERS:
        raise AdapterError(f"adapters holds more than {MAX_ADAPTERS}; at most that many are allowed")
    scales: dict[str, float] = {}
    for key, scale in given:
        name = check_name(key)
        if name in scales:
            raise AdapterError(f"adapters names {name!r} twice")
        scales[name] = float(number(AdapterError, f"the scale of adapter {name!r}", scale, -MAX_SCALE, MAX_SCALE))
    return tuple(sorted((name, scale) for name, scale in scales.items() if scale))


def adapter_sets(adapters: object, n: int) -> list[AdapterSet]:
    """Returns n AdapterSets, from one value for all prompts or a list with one value for each. Raises AdapterError."""
    if not isinstance(adapters, list):
        return [adapter_set(adapters)] * n
    if len(adapters) != n:
        raise AdapterError(
            f"{counted(len(adapters), 'set')} of adapters for {counted(n, 'prompt')}; give one, or one for each"
        )
    return [adapter_set(each) for each in adapters]


def check_name(given: object) -> str:
    """Returns the name of an adapter as a plain str. Raises AdapterError for a value that cannot be a name."""
    name = string(given)
    if name is None or not 1 <= len(name) <= MAX_NAME:
        raise AdapterError(f"the name of an adapter is {show(given)}; give a text of 1 to {MAX_NAME} characters")
    return name


def adapter_path(name: object, path: object) -> str:
    """Returns the absolute path of an adapter's file. Raises AdapterError for a value that is not a path."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text:
        raise AdapterError(f"the path of adapter {show(name)} is {show(path)}; give a str or a Path")
    return absolute(text)


def check_known(adapters: AdapterSet, known: Iterable[str]) -> None:
    """Raises AdapterError if an adapter is not among the names in `known`."""
    for name, _ in adapters:
        if name not in known:
            names = sorted(known)
            loaded = nearest(name, names) if names else " (none is loaded)"
            raise AdapterError(f"there is no adapter {name!r}{loaded}")
