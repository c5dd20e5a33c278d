"""The values of a GGUF's header for a caller: numbers and texts as they are, arrays with their length in front."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from llamabatch.gguf.reader import TEXT, TYPE_NAMES, Items, Number, Value


@dataclass(frozen=True)
class MetadataArray:
    """An array of a GGUF's header. len() is its length.

    Attributes:
        type: type of its items: "string", "int", "float" or "bool".
        count: number of items.
        values: its items; None for texts, and for more than 16,384 numbers, which are not read.
    """

    type: str
    count: int
    values: tuple[bool | int | float, ...] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.count


MetadataValue: TypeAlias = "Number | str | MetadataArray"


def metadata_of(values: Mapping[str, Value]) -> Mapping[str, MetadataValue]:
    """The values, for reading only."""
    return MappingProxyType({key: _shown(value) for key, value in values.items()})


def _shown(value: Value) -> MetadataValue:
    if isinstance(value, tuple):
        return MetadataArray(type(value[0]).__name__ if value else "int", len(value), value)
    if isinstance(value, Items):
        kind = "string" if value.type == TEXT else TYPE_NAMES[value.type].strip("u0123456789")
        return MetadataArray(kind, value.count)
    return value
