"""Checks of values from callers: a message names the argument, its value and the allowed range."""

from __future__ import annotations

import difflib
import errno
import itertools
import math
import reprlib
import sys
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from llamabatch.errors import InputError

_MOST_NAMES = 40  # of an error: half a screen
_LONGEST_NAME = 100  # characters of an unknown name that are compared with the known ones
_MOST_BITS = 1000  # Python refuses to print whole numbers of more than 4,300 digits


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return f"a number of {x.bit_length()} bits" if x.bit_length() > _MOST_BITS else super().repr_int(x, level)


_short = _Short()


def show(value: object) -> str:
    """Any value for a message, short and on one line."""
    try:
        text = _short.repr(value)
    except Exception:  # a caller's class can raise anything
        return f"a {type(value).__name__}"
    return " ".join(text.split()) if "\n" in text else text


def reason(error: BaseException) -> str:
    """The text of an error for a message that names the file: Python's OSErrors name it again."""
    text = getattr(error, "strerror", None) or str(error)
    if getattr(error, "errno", None) == errno.EMFILE:
        return f"{text}; this process has as many files open as it may (ulimit -n)"
    return str(text)


def present(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a JSON object that are not null: null in a line, a table or a body means a missing field."""
    return {name: value for name, value in values.items() if value is not None}


def counted(count: int, noun: str) -> str:
    """A number and its noun for a message: 1 row, 2,000 rows."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def integer(error: type[InputError], name: str, value: object, low: int, high: int, other: str = "") -> int:
    """The value as a plain int, also of numpy's whole numbers. Raises `error`.

    Args:
        other: another allowed value, for the message: ", or None".
    """
    whole = plain(value)
    if isinstance(whole, bool) or not isinstance(whole, int) or not low <= whole <= high:
        raise error(f"{name} is {show(value)}; give a whole number from {low} to {high}{other}")
    return whole


def number(error: type[InputError], name: str, value: object, low: float, high: float, other: str = "") -> float:
    """The value as a plain float or int; arguments and errors as `integer`."""
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or found != found or abs(found) == math.inf:
        raise error(f"{name} is {show(value)}; give a number from {low:g} to {high:g}{other}")
    if not low <= found <= high:
        raise error(f"{name} is {show(value)}; it must lie from {low:g} to {high:g}{other}")
    return found


def boolean(error: type[InputError], name: str, value: object) -> bool:
    """The value as a plain bool, also of numpy's. Raises `error`."""
    found = plain(value)
    if not isinstance(found, bool):
        raise error(f"{name} is {show(value)}; give True or False")
    return found


def choice(error: type[InputError], name: str, value: object, known: Iterable[str]) -> str:
    """The value as a plain str, one of `known`. Raises `error`."""
    names = list(known)
    text = string(value)
    if text is None or text not in names:
        raise error(f"{name} is {show(value)}{nearest(show(value) if text is None else text, names)}")
    return text


def string(value: object) -> str | None:
    """A text as a plain str, also of a subclass; None for anything else."""
    return str.__str__(value) if isinstance(value, str) else None


def items(value: object, most: int) -> list[Any] | None:
    """The first `most` items of a list, array, Series or the like; None for a text, a mapping, a value without items,
    and one that raises when they are read."""
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        return None
    try:
        return list(itertools.islice(value, most))
    except Exception:  # an array without dimensions raises TypeError, a caller's class anything
        return None


def mapping(value: object) -> dict[Any, Any] | None:
    """A mapping as a dict; None for anything else, and for one that raises when it is read."""
    try:
        return dict(value) if isinstance(value, Mapping) else None
    except Exception:  # a caller's class can raise anything
        return None


def pairs(value: object, most: int) -> list[tuple[Any, Any]] | None:
    """The first `most` entries of a mapping, or of a container of pairs; None for anything else."""
    named = mapping(value)
    entries = items(value if named is None else named.items(), most)
    if entries is None:
        return None
    found = [pair for pair in (items(entry, 3) for entry in entries) if pair is not None and len(pair) == 2]
    return [(first, second) for first, second in found] if len(found) == len(entries) else None


def plain(value: object) -> object:
    """A number of numpy or of a subclass as Python's own; any other value unchanged, None if reading it raises."""
    if type(value) in (int, float, bool):
        return value
    numpy = sys.modules.get("numpy")  # if it is not imported, there are no such numbers
    try:
        if numpy is not None and isinstance(value, numpy.generic):
            return value.item()
        if isinstance(value, Integral):
            return int(value)
        if isinstance(value, Real):
            return float(value)
    except Exception:  # a caller's class can raise anything
        return None
    return value


def half_character(value: object) -> str | None:
    """The first text in a value that holds half a surrogate pair, which has no UTF-8; None: there is none."""
    stack: list[Any] = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                return value
        elif isinstance(value, Mapping):
            stack.extend((*value.values(), *value.keys()))
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
    return None


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of a message about an unknown name: the nearest known name, all known names if they are few, else the
    least far ones."""
    names = sorted(known) if isinstance(known, (set, frozenset)) else list(known)  # the same message in each run
    close = difflib.get_close_matches(name[:_LONGEST_NAME], names, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    if len(names) <= 12 or (not meant and len(names) <= _MOST_NAMES):
        return f"{meant} (known: {', '.join(names)})"
    least_far = difflib.get_close_matches(name[:_LONGEST_NAME], names, n=5, cutoff=0.0)
    return meant or f" ({len(names)} are known; the nearest: {', '.join(least_far)})"
