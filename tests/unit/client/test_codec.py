"""Dataclasses cross by their type hints; what does not fit is refused by the name of its field."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import msgpack
import pytest

from llamabatch.client.codec import Codec, pack, unpack
from llamabatch.client.wire import unpack_output, unpack_request
from llamabatch.errors import EngineError
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.request import Request


class Color(str, Enum):
    RED = "red"


class Pair(NamedTuple):
    key: str
    color: Color | None


@dataclass(frozen=True)
class Inner:
    number: int
    values: array | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    several: tuple[Inner | None, ...] = ()
    fixed: tuple[int, Pair] | None = None
    table: dict[int, Pair] | None = None
    ratio: float = 0.5
    secret: str | None = "here"
    flag: bool = False


Codec(Inner)
OUTER = Codec(Outer, left_out=["secret"])


def crossed(outer: Outer) -> Outer:
    return OUTER.decode(unpack(pack(outer)))


def test_all_kinds_of_fields_cross():
    pair = Pair("k", Color.RED)
    inner = Inner(2**40, array("f", [1.5, -0.0]))
    outer = Outer("\ud800", inner, (inner, None, Inner(1)), (3, pair), {7: pair, 1: Pair("", None)}, 2, None, True)
    assert crossed(outer) == outer
    assert crossed(outer).table[7].color is Color.RED
    assert list(crossed(outer).table) == [7, 1]


def test_what_is_left_out_comes_as_none():
    assert crossed(Outer("a", Inner(1))) == Outer("a", Inner(1), secret=None)
    assert b"here" not in pack(Outer("a", Inner(1)))


def test_encode_gives_the_fields_of_an_instance():
    outer = Outer("a", Inner(1))
    assert OUTER.decode(unpack(pack(OUTER.encode(outer)))) == crossed(outer)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 5, "Outer.name came as int"),
        (0, None, "Outer.name came as NoneType"),
        (1, None, "Outer.inner came as NoneType"),
        (1, "x", "Outer.inner came as str"),
        (1, (1,), "Inner came as 1 field; it has 2 fields"),
        (1, ("1", None), "Inner.number came as str"),
        (2, {}, "Outer.several came as dict"),
        (2, ((1, 2, 3),), "Inner came as 3 fields"),
        (3, (1, ("k", 4)), "Pair.color came as int"),
        (3, (1,), "a tuple came as 1 field"),
        (5, "fast", "Outer.ratio came as str"),
        (6, 1, "Outer.flag came as int"),
    ],
)
def test_another_type_is_refused_by_its_field(at, value, message):
    fields = list(OUTER.encode(Outer("a", Inner(1))))
    fields[at] = value
    for _ in range(2):  # what was refused is not remembered as right
        with pytest.raises(EngineError, match=message):
            OUTER.decode(unpack(pack(fields)))


def test_short_long_and_shapeless_messages_are_refused():
    request, output = unpack(pack(Request("r", (1,)))), unpack(pack(SequenceOutput("r", (1,), "a")))
    for packed in (request[:-1], (*request, 1), (), "r" * len(request), {"request_id": "r"}):
        with pytest.raises(EngineError, match="Request came as"):
            unpack_request(packed)
    for packed in (output[:-1], (*output, 1), (), "r" * len(output), b"r"):
        with pytest.raises(EngineError, match="SequenceOutput came as"):
            unpack_output(packed, Request("r", (1,)))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\x01", b"\xdd\xff\xff\xff\xff", b"\x01\x02"])
def test_what_is_no_message_is_refused(data):
    with pytest.raises((ValueError, msgpack.UnpackException)):
        unpack(data)


def test_what_has_no_codec_is_not_sent():
    with pytest.raises(TypeError, match="object cannot cross to another process"):
        pack((1, object()))


def test_a_field_of_several_types_needs_a_hint():
    @dataclass
    class Open:
        given: tuple[Inner, ...] | Inner | None
        more: Iterable[int]

    with pytest.raises(TypeError, match="allows several types"):
        Codec(Open, {"more": Any})
    with pytest.raises(TypeError):
        Codec(Open, {"given": Any})
    assert Codec(Open, {"given": Any, "more": Any}).decode((3, (1, 2))) == Open(3, (1, 2))
