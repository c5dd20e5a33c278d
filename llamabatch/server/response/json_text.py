"""Writes answers of any size as JSON without blanks, and estimates the work to write outputs. Large values are written
in pieces. The entries of the longest lists are made only when they are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from json.encoder import encode_basestring
from typing import Any

from llamabatch.request.logprobs import count
from llamabatch.request.outputs import RequestOutput, SequenceOutput

quoted = encode_basestring  # a C function that writes a str as JSON


class Rows(Sequence[Any]):
    """A list for JSON. Each entry is made when it is written.

    This saves memory: an entry with logprobs takes ten times as much memory as its source.

    Args:
        given: the sources, one for each entry.
        make: makes an entry from its source.
    """

    def __init__(self, given: Sequence[Any], make: Callable[[Any], Any]) -> None:
        self._given = given
        self._make = make

    def __len__(self) -> int:
        return len(self._given)

    def __getitem__(self, at: Any) -> Any:
        found = self._given[at]
        return list(map(self._make, found)) if isinstance(at, slice) else self._make(found)

    def __add__(self, other: Rows) -> Rows:
        """Returns the entries of both lists, which must have the same `make`."""
        return Rows([*self._given, *other._given], self._make)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, Rows)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False, default=list).encode


_SLICE = 1024  # number of list entries that are written at once


_ROWS = 64  # number of entries of Rows that are written at once


def dump(value: Any) -> str:
    """Returns a value as JSON, without blanks."""
    return _dump(value)


def dump_in_pieces(value: Any) -> Iterator[str]:
    """Yields the text of `dump` in pieces. Called on worker threads for large values. Long lists are encoded in slices,
    because each call of the encoder blocks other threads."""
    if isinstance(value, dict) and not _is_flat(value):
        before = "{"
        for key, each in value.items():
            yield f"{before}{_dump(key)}:"
            yield from dump_in_pieces(each)
            before = ","
        yield "}"
    elif not isinstance(value, (list, Rows)) or len(value) == 0:
        yield _dump(value)
    elif isinstance(value, Rows) or _is_flat(value[0]):  # the first entry shows the kind of all entries
        step, before = _ROWS if isinstance(value, Rows) else _SLICE, "["
        for start in range(0, len(value), step):
            yield before + _dump(value[start : start + step])[1:-1]
            before = ","
        yield "]"
    else:
        before = "["
        for each in value:
            yield before
            yield from dump_in_pieces(each)
            before = ","
        yield "]"


def _is_flat(value: Any) -> bool:
    """Returns False for a list, and for an object that contains a list or another object."""
    return not isinstance(value, (list, Rows)) and not (
        isinstance(value, dict) and any(isinstance(each, (dict, list, Rows)) for each in value.values())
    )


LIGHT = 512  # outputs up to this `weight` are written in a few milliseconds at most


def weight(outputs: Sequence[RequestOutput]) -> int:
    """Returns the estimated work to write outputs as JSON: 1 for a logprob, a token id or 64 characters of text."""
    found = 0
    for output in outputs:
        found += len(output.prompt_token_ids) + count(output.prompt_logprobs)
        for each in output.outputs:
            found += len(each.token_ids) + len(each.text) // 64 + len(each.reasoning or "") // 64
            found += count(each.logprobs)
    return found


def weight_of_pieces(outputs: Sequence[SequenceOutput]) -> int:
    """Returns the estimated work to write the outputs of a stream as JSON, in the unit of `weight`."""
    return sum(
        len(each.token_ids) + (len(each.text) + len(each.reasoning)) // 64 + count(each.logprobs) for each in outputs
    )
