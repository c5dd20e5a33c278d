"""Dataclasses are sent by their type hints. The error for a value that does not fit names its field."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import msgpack
import pytest

from llamabatch.client.codec import Codec, pack, unpack
from llamabatch.client.wire import pack_request, unpack_output, unpack_request
from llamabatch.errors import EngineError
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams


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


@dataclass(frozen=True)
class Settings:
    ratio: float
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.ratio > 9:
            raise ValueError(f"ratio is {self.ratio}; allowed are numbers up to 9")


@dataclass(frozen=True)
class Holder:
    settings: Settings


Codec(Inner)
Codec(Settings, n_kept=2)
HOLDER = Codec(Holder)
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
    for _ in range(2):  # a refused value is not cached as valid
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


def test_equal_fields_give_a_kept_instance_and_numbers_of_another_type_do_not():
    def crossed(*settings):
        return HOLDER.decode(unpack(pack((settings,)))).settings

    first = crossed(1.0, ("a",))
    assert crossed(1.0, ("a",)) is first
    assert type(crossed(1, ("a",)).ratio) is int, "not the 1.0 that equals it"
    assert crossed(1.0, ("b",)) == Settings(1.0, ("b",))
    assert crossed(1.0, ("a",)) is not first, "two others came since"
    for wrong in (("a",), 7), (10.0, ()), (1.0,):
        for _ in range(2):
            with pytest.raises((EngineError, ValueError)):
                crossed(*wrong)


def test_requests_of_a_server_share_the_parameters_that_equal():
    def crossed(params):
        packed = [pack_request(Request(f"r{at}", (1,), params, seed=at)) for at in range(2)]
        return [unpack_request(unpack(pack(each))) for each in packed]

    one, two = crossed(SamplingParams(temperature=0.3, max_tokens=7, stop=["a"]))
    assert one.params is two.params
    assert (one.request_id, one.seed, two.request_id, two.seed) == ("r0", 0, "r1", 1)
    assert crossed(SamplingParams(temperature=0.3, max_tokens=8, stop=["a"]))[0].params.max_tokens == 8
