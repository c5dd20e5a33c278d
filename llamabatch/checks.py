"""Refusing bad values by name, with the value and the allowed range."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

from llamabatch.errors import InputError


def integer(error: type[InputError], name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise error(f"{name} is {value!r}; give a whole number from {low} to {high}")


def number(error: type[InputError], name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise error(f"{name} is {value!r}; give a number from {low:g} to {high:g}")
    if not low <= value <= high:
        raise error(f"{name} is {value!r}; it must lie from {low:g} to {high:g}")


def boolean(error: type[InputError], name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise error(f"{name} is {value!r}; give True or False")


def choice(error: type[InputError], name: str, value: object, known: Iterable[str]) -> None:
    names = list(known)
    if value not in names:
        raise error(f"{name} is {value!r}{nearest(str(value), names)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of a message about an unknown name: what is known, and which of it may have been meant."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return f"{meant} (known: {', '.join(names)})" if len(names) <= 12 or not meant else meant
