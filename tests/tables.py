"""Finds all objects that contain a request's id. It follows every reference, so that no table is overlooked."""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Container
from typing import Any

from llamabatch.request.outputs import RequestOutput, SequenceOutput
from llamabatch.request.request import Request
from llamabatch.request.sequence import Sequence

_NOUNS = (Request, SequenceOutput, RequestOutput, Sequence)
_OTHERS = (types.ModuleType, types.FrameType, types.CodeType, types.CoroutineType, type)  # these belong to no engine


def tables_of(root: Any, ids: Container[str]) -> set[str]:
    """Returns the names, as Class.attribute, of collections below an object that contain one of these ids, also as a
    part of a text."""
    found: set[str] = set()
    seen = {id(root)}
    left: deque[tuple[Any, str]] = deque([(root, type(root).__name__)])
    while left:
        one, place = left.popleft()
        attributes = _attributes(one)
        is_noun = isinstance(one, _NOUNS)  # the table that contains it is named, not the object itself
        parts = [(place if is_noun else f"{type(one).__name__}.{name}", each) for name, each in attributes.items()]
        own = getattr(one, "__dict__", None)
        parts += [(place, other) for other in _referents(one) if other is not own]
        for within, other in parts:
            if isinstance(other, str):
                if other.partition("\0")[0] in ids:
                    found.add(within)
            elif id(other) not in seen and not isinstance(other, _OTHERS) and not _is_globals(other):
                seen.add(id(other))
                left.append((other, within))
    return found


def _attributes(one: Any) -> dict[str, Any]:
    found = dict(getattr(one, "__dict__", {}))
    for kind in type(one).__mro__:
        slots = vars(kind).get("__slots__", ())
        found.update((name, getattr(one, name, None)) for name in slots if isinstance(name, str) and name[:2] != "__")
    return found


def _referents(one: Any) -> list[Any]:
    if isinstance(one, dict):  # gc.get_referents leaves out keys that are texts
        return [*list(one), *list(one.values())]
    if isinstance(one, types.FunctionType):  # without its globals
        return [*(one.__closure__ or ()), *(one.__defaults__ or ())]
    found = gc.get_referents(one)
    return [one.__self__] if isinstance(one, types.MethodType) else found


def _is_globals(one: Any) -> bool:
    return isinstance(one, dict) and "__builtins__" in one
