"""Refusing bad values by name, with the value and the allowed range."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Iterable

from llamabatch.errors import InputError


def show(value: object) -> str:
    """A value for a message: short, whatever it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python does not print whole numbers of more than 4,300 digits
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__


def counted(count: int, noun: str) -> str:
    """For a message: 1 row, 2,000 rows."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def integer(error: type[InputError], name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise error(f"{name} is {show(value)}; give a whole number from {low} to {high}")


def number(error: type[InputError], name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or abs(value) == math.inf:
        raise error(f"{name} is {show(value)}; give a number from {low:g} to {high:g}")
    if not low <= value <= high:
        raise error(f"{name} is {show(value)}; it must lie from {low:g} to {high:g}")


def boolean(error: type[InputError], name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise error(f"{name} is {show(value)}; give True or False")


def choice(error: type[InputError], name: str, value: object, known: Iterable[str]) -> None:
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise error(f"{name} is {show(value)}{nearest(str(value), names)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of a message about an unknown name: what is known, and which of it may have been meant."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return f"{meant} (known: {', '.join(names)})" if len(names) <= 12 or not meant else meant
