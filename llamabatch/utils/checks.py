"""Checks of values from callers. The error messages name the argument, its value and the allowed range."""

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

_MOST_NAMES = 40  # maximum number of names in an error message, about half a screen
_LONGEST_NAME = 100  # maximum number of characters of an unknown name that are compared with known names
_MOST_BITS = 1000  # the digits of a longer number are not shown; Python prints at most 4,300 digits


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return f"a number of {x.bit_length()} bits" if x.bit_length() > _MOST_BITS else super().repr_int(x, level)


_short = _Short()


def show(value: object) -> str:
    """Returns a value as a short text on one line, for messages."""
    try:
        text = _short.repr(value)
    except Exception:  # a caller's class can raise anything
        return f"a {type(value).__name__}"
    return " ".join(text.split()) if "\n" in text else text


def reason(error: BaseException) -> str:
    """Returns an error's text without the file's name, for a message that already names the file."""
    text = getattr(error, "strerror", None) or str(error)
    if getattr(error, "errno", None) == errno.EMFILE:
        return f"{text}; this process has as many files open as it may (ulimit -n)"
    return str(text)


def present(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON object without its null fields, because null means the same as a missing field here."""
    return {name: value for name, value in values.items() if value is not None}


def counted(count: int, noun: str) -> str:
    """Returns a number and its noun for a message: 1 row, 2,000 rows."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def integer(error: type[InputError], name: str, value: object, low: int, high: int, other: str = "") -> int:
    """Returns a whole number (also of numpy) from `low` to `high` as a plain int. Raises `error` otherwise.

    Args:
        other: end of the message, if another value is allowed: ", or None", for example.
    """
    whole = plain(value)
    if isinstance(whole, bool) or not isinstance(whole, int) or not low <= whole <= high:
        raise error(f"{name} is {show(value)}; give a whole number from {low} to {high}{other}")
    return whole


def number(error: type[InputError], name: str, value: object, low: float, high: float, other: str = "") -> float:
    """Returns a number (also of numpy) as a plain float or int. Arguments and errors are as for `integer`."""
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or found != found or abs(found) == math.inf:
        raise error(f"{name} is {show(value)}; give a number from {low:g} to {high:g}{other}")
    if not low <= found <= high:
        raise error(f"{name} is {show(value)}; it must lie from {low:g} to {high:g}{other}")
    return found


def boolean(error: type[InputError], name: str, value: object) -> bool:
    """Returns a bool (also of numpy) as a plain bool. Raises `error` otherwise."""
    found = plain(value)
    if not isinstance(found, bool):
        raise error(f"{name} is {show(value)}; give True or False")
    return found


def choice(error: type[InputError], name: str, value: object, known: Iterable[str]) -> str:
    """Returns the value as a plain str if it is one of `known`. Raises `error` otherwise."""
    names = list(known)
    text = string(value)
    if text is None or text not in names:
        raise error(f"{name} is {show(value)}{nearest(show(value) if text is None else text, names)}")
    return text


def string(value: object) -> str | None:
    """Returns a str (also of a subclass) as a plain str, or None for any other value."""
    return str.__str__(value) if isinstance(value, str) else None


def items(value: object, most: int) -> list[Any] | None:
    """Returns the first `most` items of a list, array, Series or other iterable. Returns None for a text, a mapping, a
    value that is not iterable, and a value that raises when its items are read."""
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        return None
    try:
        return list(itertools.islice(value, most))
    except Exception:  # an array without dimensions raises TypeError, and a caller's class can raise anything
        return None


def mapping(value: object) -> dict[Any, Any] | None:
    """Returns a mapping as a dict, or None for any other value and for a mapping that raises when it is read."""
    try:
        return dict(value) if isinstance(value, Mapping) else None
    except Exception:  # a caller's class can raise anything
        return None


def pairs(value: object, most: int) -> list[tuple[Any, Any]] | None:
    """Returns the first `most` entries of a mapping or of a container of pairs, or None for any other value."""
    named = mapping(value)
    entries = items(value if named is None else named.items(), most)
    if entries is None:
        return None
    found = [pair for pair in (items(entry, 3) for entry in entries) if pair is not None and len(pair) == 2]
    return [(first, second) for first, second in found] if len(found) == len(entries) else None


def plain(value: object) -> object:
    """Converts a NumPy number, or a number of a subclass, to a plain number. Returns None if the conversion raises.

    Returns any other value unchanged.
    """
    if type(value) in (int, float, bool):
        return value
    numpy = sys.modules.get("numpy")  # None: numpy is not imported, so the value is not from numpy
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
    """Searches a JSON value for a text with half a surrogate pair, which UTF-8 cannot encode. Returns the text, or
    None if there is none."""
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
    """Returns the end of a message about an unknown name: the most similar known name, and all known names if they are
    few. If they are many and none is similar, the message names the five closest."""
    names = sorted(known) if isinstance(known, (set, frozenset)) else list(known)  # sorted, to be the same in each run
    close = difflib.get_close_matches(name[:_LONGEST_NAME], names, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    if len(names) <= 12 or (not meant and len(names) <= _MOST_NAMES):
        return f"{meant} (known: {', '.join(names)})"
    least_far = difflib.get_close_matches(name[:_LONGEST_NAME], names, n=5, cutoff=0.0)
    return meant or f" ({len(names)} are known; the nearest: {', '.join(least_far)})"
