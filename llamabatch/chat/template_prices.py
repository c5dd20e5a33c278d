"""Prices for the operations of a chat template (methods, formats, filters), and the sizes of values.

A price covers the input of an operation, and the output that the operation can make of the input.
"""

from __future__ import annotations

import re
from collections import abc
from collections.abc import Callable, Mapping
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace
from markupsafe import Markup

MAX_DEPTH = 100  # maximum depth of lists in lists
MAX_VALUE = 2**27  # maximum size in bytes of a value that an operation reads as a whole
LETTER = 84  # units for each letter of a text that becomes a list: most letters become separate objects
_HELD = 64


class TemplateLimit(Exception):
    """The error of a template that exceeds its budget or another limit."""


def weight(value: Any, most: int) -> int:
    """Returns the approximate size in bytes of a value with all its items. Each item counts as often as it occurs.

    Raises:
        TemplateLimit: the value has more than `most` bytes, or lists in the value nest deeper than MAX_DEPTH.
    """
    total, level, depth = 0, [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise TemplateLimit(f"lists are nested more than {MAX_DEPTH} deep")
        below: list[Any] = []
        for item in level:
            total += _HELD
            if isinstance(item, str):
                total += len(item) if item.isascii() else 4 * len(item)
            elif item is None or isinstance(item, (bool, float)):
                continue
            elif isinstance(item, int):
                total += item.bit_length() >> 3
            elif isinstance(item, (list, tuple, set, frozenset, abc.KeysView, abc.ValuesView, abc.ItemsView)):
                if total + _HELD * len(item) <= most:
                    below.extend(item)
                else:
                    total = most + 1
            elif isinstance(item, Mapping):
                if total + 2 * _HELD * len(item) > most:
                    total = most + 1
                else:
                    below.extend(item.keys())
                    below.extend(item.values())
            elif isinstance(item, (bytes, bytearray)):
                total += len(item)
            elif isinstance(item, range):
                total += 32 * len(item)
            elif isinstance(item, Namespace):
                below.append(object.__getattribute__(item, "_Namespace__attrs"))
            if total > most:
                raise TemplateLimit("a value is too large")
        level = below
    return total


def shallow(value: Any) -> int:
    """Returns the approximate size in bytes of a shallow copy of the value."""
    if isinstance(value, str):
        size = len(value) if value.isascii() else 4 * len(value)
        return 6 * size if isinstance(value, Markup) else size  # text that is added to Markup is escaped
    if isinstance(value, (list, tuple)):
        return 8 * len(value)
    if isinstance(value, (dict, bytes, abc.MappingView)):
        return 32 * len(value)
    return 8


def widths(form: str) -> int:
    """Returns the sum of all numbers in a format. This is an upper bound for the sum of the widths."""
    found = re.findall(r"\d+", form)
    if any(len(number) > 9 for number in found):
        raise TemplateLimit(f"a format has a width of {max(map(len, found))} digits")
    return sum(map(int, found))


def price_of_percent(form: str, values: Any) -> int:
    """Returns the price of `form % values`. Any number in the form may be a width."""
    if "*" in form:
        raise TemplateLimit("a format has '*' for its width; write the width")
    n_uses = form.count("%") if isinstance(values, Mapping) else 1
    return widths(form) + shallow(form) + 4 * max(1, n_uses) * weight(values, MAX_VALUE)


def _integers(values: abc.Iterable[Any]) -> int:
    return sum(abs(value) for value in values if isinstance(value, int))


def _search(text: Any, values: tuple[Any, ...]) -> int:
    needle = len(values[0]) if values and isinstance(values[0], (str, bytes)) else 1
    return shallow(text) * (1 + min(needle, 128) // 8)


def _split(text: Any, values: tuple[Any, ...]) -> int:
    separator = values[0] if values else None
    n_parts = text.count(separator) + 1 if separator and isinstance(separator, str) else len(text)
    return _search(text, values) + 64 * int(n_parts)


def _replace(text: Any, values: tuple[Any, ...]) -> int:
    if len(values) < 2 or not isinstance(values[0], str) or not isinstance(values[1], str):
        return 0  # Python refuses the call
    n_found = text.count(values[0])  # if values[0] is empty, it is found between all characters
    return _search(text, values) + int(n_found) * max(shallow(values[1]), 8) * (4 if not text.isascii() else 1)


def _join(text: Any, values: tuple[Any, ...]) -> int:
    items = values[0] if values else None
    letters = LETTER * len(items) if isinstance(items, str) else 0
    return letters + (len(items) if isinstance(items, abc.Sized) else 0) * shallow(text)


def _few(value: Any, values: tuple[Any, ...]) -> int:
    return 0


def _copied(value: Any, values: tuple[Any, ...]) -> int:
    return 4 * shallow(value)


def _padded(text: Any, values: tuple[Any, ...]) -> int:
    return shallow(text) + 4 * _integers(values)


def _compared(value: Any, values: tuple[Any, ...]) -> int:
    return weight(value, MAX_VALUE)


def _tabs(text: Any, values: tuple[Any, ...]) -> int:
    return shallow(text) + int(text.count("\t")) * (_integers(values) or 8) * 4


_BUILT_IN = (str, bytes, list, tuple, dict, int, float, range, set, frozenset, abc.MappingView)
_Price = Callable[[Any, tuple[Any, ...]], int]
_METHODS: tuple[tuple[Any, dict[str, _Price]], ...] = (
    (
        str,
        {
            **dict.fromkeys(("startswith", "endswith"), _few),
            **dict.fromkeys(("capitalize", "casefold", "lower", "upper", "title", "swapcase", "encode"), _copied),
            **dict.fromkeys(("strip", "lstrip", "rstrip", "removeprefix", "removesuffix"), _copied),
            **dict.fromkeys(("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier"), _copied),
            **dict.fromkeys(("islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper"), _copied),
            **dict.fromkeys(("find", "rfind", "index", "rindex", "count", "partition", "rpartition"), _search),
            **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
            **dict.fromkeys(("split", "rsplit", "splitlines"), _split),
            "expandtabs": _tabs,
            "join": _join,
            "replace": _replace,
        },
    ),
    (bytes, dict.fromkeys(("decode", "hex"), _copied)),
    ((list, tuple, range), dict.fromkeys(("index", "count"), _compared)),
    ((list, dict, set, frozenset), {"copy": _copied}),
    (list, {"append": _few, "pop": _copied}),
    (dict, dict.fromkeys(("get", "keys", "values", "items"), _few)),
    (int, dict.fromkeys(("bit_length", "bit_count", "as_integer_ratio", "conjugate", "is_integer"), _few)),
    (float, dict.fromkeys(("is_integer", "as_integer_ratio", "hex", "conjugate"), _few)),
)


def price_of_method(owner: Any, name: str, values: tuple[Any, ...]) -> int:
    """Returns the price of calling a method of `owner`; 0: the type of `owner` is not built in. The price of reading
    the arguments is not included.

    Raises:
        SecurityError: a method of a built-in type has no price.
    """
    for kinds, prices in _METHODS:
        if isinstance(owner, kinds) and name in prices:
            return prices[name](owner, values)
    if isinstance(owner, _BUILT_IN) or (isinstance(owner, type) and issubclass(owner, _BUILT_IN)):
        kind = owner if isinstance(owner, type) else type(owner)
        raise SecurityError(f"{name!r} of {kind.__name__!r} cannot be called in a chat template")
    return 0


def growth(name: str, values: list[Any], kwargs: dict[str, Any]) -> int:
    """Returns the price of a filter's output, as far as the output depends on the parameters of the filter."""
    value, parameters = values[0], (*values[1:], *kwargs.values())
    text = value if isinstance(value, str) else ""
    numbers = 4 * _integers(parameters)
    longest = max((shallow(each) for each in parameters if isinstance(each, str)), default=0)
    if name in ("center", "batch", "slice", "truncate"):
        return 16 * numbers
    if name == "round":
        if _integers(parameters) > 1000:
            raise TemplateLimit(f"a number is rounded to {_integers(parameters)} digits; allowed are up to 1000")
    elif name == "indent":
        lines = len(text.splitlines()) if text else weight(value, MAX_VALUE)
        return 64 * lines + (lines + 1) * (numbers + longest + 16)
    elif name == "replace":
        form = str(value)  # the input is paid for already
        return _replace(form, tuple(map(str, values[1:3])) if len(values) > 2 else tuple(map(str, parameters[:2])))
    elif name == "join":
        return (len(value) if isinstance(value, abc.Sized) else 0) * longest
    elif name == "tojson":
        separators = sum(map(len, map(str, kwargs.get("separators") or ())))
        indent = _integers((kwargs.get("indent"),)) + (longest if isinstance(kwargs.get("indent"), str) else 0)
        if indent or separators:
            return weight(value, MAX_VALUE) // _HELD * (indent * MAX_DEPTH + separators)
    elif name == "format":
        return price_of_percent(str(value), kwargs or tuple(values[1:]))
    elif name == "sum":
        start = [each for each in parameters if isinstance(each, (list, tuple))]
        if start:  # each item is added to a copy of the items before it
            return weight(value, MAX_VALUE) * (len(value) if isinstance(value, abc.Sized) else 1)
    return 0
