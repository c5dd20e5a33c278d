"""A short repr for people: one line, without fields that have their defaults, and with long values cut."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any

from llamabatch.utils.checks import counted, show

_LONGEST_TEXT = 60  # maximum number of characters of a text
_MOST_ITEMS = 8  # maximum number of items in a list or mapping; a longer one is shown as a count
_MOST_PARTS = 3  # maximum number of shown items in a list of dataclasses
_LONGEST_PART = 1000  # maximum number of characters of a dataclass within another dataclass


def brief(instance: Any, hidden: Collection[str] = (), **instead: object) -> str:
    """Returns a dataclass as a call of its constructor, without fields that have their defaults.

    Args:
        hidden: fields that are left out.
        instead: maps fields to values that are shown instead of the real ones.
    """
    names = [field.name for field in fields(instance) if field.name not in hidden and _is_shown(field, instance)]
    shown = [f"{name}={brief_value(instead.get(name, getattr(instance, name)))}" for name in names]
    return f"{type(instance).__name__}({', '.join(shown)})"


def brief_value(value: object) -> str:
    """Returns a value on one line. A long text is cut. A collection with many items is shown as their number."""
    if isinstance(value, Enum):
        return repr(value.value)
    if isinstance(value, str):
        return repr(value if len(value) <= _LONGEST_TEXT else f"{value[: _LONGEST_TEXT - 1]}…")
    if isinstance(value, float):
        return f"{value:.6g}"
    if is_dataclass(value) and not isinstance(value, type):
        text = repr(value)
        return text if len(text) <= _LONGEST_PART else show(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        pairs = [f"{name}={brief_value(each)}" for name, each in zip(value._fields, value, strict=True)]
        return f"{type(value).__name__}({', '.join(pairs)})"
    if isinstance(value, (tuple, list)) and value and all(map(is_dataclass, value)):
        parts = [brief_value(each) for each in value[:_MOST_PARTS]]
        more = [f"and {len(value) - _MOST_PARTS} more"] if len(value) > _MOST_PARTS else []
        return f"[{', '.join([*parts, *more])}]"
    if isinstance(value, (Sequence, array, Mapping)) and not isinstance(value, bytes) and _is_much(value):
        return f"<{counted(len(value), 'item')}>"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(brief_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{brief_value(name)}: {brief_value(each)}' for name, each in value.items())}}}"
    return show(value)


def _is_much(values: Collection[object]) -> bool:
    return len(values) > _MOST_ITEMS or any(isinstance(each, Mapping) for each in values)


def _is_shown(field: Field[Any], instance: object) -> bool:
    """Returns True unless the field is excluded from repr() or has its default."""
    if not field.repr:
        return False
    value = getattr(instance, field.name)
    if field.default_factory is not MISSING:
        return bool(value != field.default_factory())
    return field.default is MISSING or type(value) is not type(field.default) or bool(value != field.default)
