"""Finds the columns of a results table in the lines of a job. The order of the columns is always the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from llamabatch.jobs.output.records import COLUMNS, RecordOptions, lines_of

Kind = Literal["null", "bool", "int", "float", "string", "json"]

# The columns of flat rows, in order. FRONT: the columns before the kept columns and the answer. BEHIND: the columns
# after the answer.
FRONT = ("row", "id")
BEHIND = (
    *("token_ids", "reasoning", "tool_calls", "logprobs", "outputs", "prompt_logprobs", "embedding", "num_truncated"),
    *("queued_s", "ttft_s", "total_s", "generation_tps", "num_cached_tokens"),
)
OPENAI = ("id", "custom_id", "response", "error")
_MOST_INT = 2**63


@dataclass
class Columns:
    """The columns of a table.

    Attributes:
        options: the options of the records.
        kept: the kept columns of the input, in order of appearance.
        kinds: the kind of each kept column, each field of the answers, and "id". A kind fits all values of its column.
        filled: columns with a value in at least one row, apart from the columns in `kinds`.
    """

    options: RecordOptions
    kept: tuple[str, ...] = ()
    kinds: dict[str, Kind] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)

    @property
    def names(self) -> tuple[str, ...]:
        """All names in order. Columns of BEHIND without any value are left out."""
        if self.options.shape == "openai":
            return OPENAI
        options = self.options
        behind = (name for name in BEHIND if name in self.filled)
        return (*FRONT, *self.kept, options.answer, "finish_reason", *options.fields, *behind, "error")

    @property
    def own(self) -> tuple[str, ...]:
        """The columns whose kinds depend on their values: kept columns and fields of answers."""
        return (*self.kept, *self.options.fields)

    @property
    def is_openai(self) -> bool:
        return self.options.shape == "openai"


def columns_of(path: Path, start: int, options: RecordOptions) -> Columns:
    """Returns the columns of a file of lines, from the byte `start` on. Raises OSError."""
    found = Columns(options)
    if found.is_openai:
        return found
    fixed = (COLUMNS - {"text"}) | {options.answer, *options.fields}
    kept: dict[str, None] = {}
    for line in lines_of(path, start):
        record = json.loads(line.content)
        for name, value in record.items():
            if name not in fixed:
                kept[name] = None
            if name in kept or name in options.fields or name == "id":
                found.kinds[name] = _wider(found.kinds.get(name, "null"), kind_of(value))
            elif value not in (None, "", [], {}):
                found.filled.add(name)
    found.kept = tuple(kept)
    if found.kinds.get("id") != "int":
        found.kinds["id"] = "string"
    return found


def kind_of(value: Any) -> Kind:
    """Returns the kind of column for a value of JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if -_MOST_INT <= value < _MOST_INT else "json"
    if isinstance(value, float):
        return "float"
    return "string" if isinstance(value, str) else "json"


def _wider(one: Kind, other: Kind) -> Kind:
    """Returns the kind that fits values of both kinds."""
    if one == other or other == "null":
        return one
    if one == "null":
        return other
    return "float" if {one, other} == {"int", "float"} else "json"


def record_of(values: Mapping[str, Any], shape: str, own: tuple[str, ...]) -> dict[str, Any]:
    """Returns the record of a table row. Leaves out fields without a value, except fields that every line has."""
    always = OPENAI if shape == "openai" else ("row", "id", *own, "error")
    return {name: value for name, value in values.items() if value is not None or name in always}
