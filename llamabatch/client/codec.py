"""Codecs of dataclasses, made from type hints. A new field of a dataclass needs no code here.

A dataclass goes to another process as the array of its fields, in order. Fields hold str, bytes, int, float, bool,
None, enums of str, named tuples, tuples, dicts, arrays of float32, dataclasses that have a codec, and any of these
`| None`. A wrong number or type of fields is refused. Plain elements of tuples and dicts are not checked.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from array import array
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgpack

from llamabatch.errors import EngineError
from llamabatch.utils.checks import counted

T = TypeVar("T")
_Convert = Callable[[Any], Any]
_NO_HINTS: Mapping[str, Any] = types.MappingProxyType({})


def pack(message: Any) -> bytes:
    """Returns a message as msgpack. Raises the errors of msgpack for unsupported values."""
    packed: bytes = msgpack.packb(message, default=_encode, unicode_errors="surrogatepass")
    return packed


def unpack(packed: bytes) -> Any:
    """Returns a message, with arrays as tuples. Raises the errors of msgpack for invalid bytes."""
    return msgpack.unpackb(packed, use_list=False, strict_map_key=False, unicode_errors="surrogatepass")


def _encode(value: Any) -> Any:
    encode = _encoders.get(type(value))
    if encode is None:
        raise TypeError(f"{type(value).__name__} cannot cross to another process")
    return encode(value)


_encoders: dict[type, _Convert] = {array: array.tobytes}
_decoders: dict[type, _Convert] = {}


def crosses(kind: type[T], encode: Callable[[T], Any], decode: Callable[[Any], T]) -> None:
    """Registers a class whose instances go to another process as the tuple made by `encode`."""
    _encoders[kind], _decoders[kind] = encode, decode


class _Record(Generic[T]):
    """A decoder of the fields of a dataclass, a named tuple, or a tuple of fixed length, in their order.

    Args:
        name: the name of the type, for errors.
        hints: types of the fields, by their names.
        make: makes an instance from the fields.
    """

    def __init__(self, name: str, hints: dict[str, Any], make: Callable[[Any], T]) -> None:
        self._name = name
        self._make = make
        self._types = {field: _types_of(hint) for field, hint in hints.items()}
        self.conversions = [_conversion(hint) for hint in hints.values()]
        # Keys: the types of all received fields. Values: (position, conversion) of each field that needs a conversion.
        self._plans: dict[tuple[type, ...], list[tuple[int, _Convert]]] = {}

    def decode(self, packed: Any) -> T:
        """Returns an instance. Raises EngineError or TypeError for wrong fields, and the errors of the constructor."""
        plan = self._plans.get(tuple(map(type, packed)))
        if plan is None:
            plan = self._plan(packed)
        if plan:
            packed = list(packed)
            for at, convert in plan:
                packed[at] = convert(packed[at])
        return self._make(packed)

    def _plan(self, packed: tuple[Any, ...]) -> list[tuple[int, _Convert]]:
        if type(packed) is not tuple or len(packed) != len(self._types):
            what = counted(len(packed), "field") if type(packed) is tuple else type(packed).__name__
            raise EngineError(f"{self._name} came as {what}; it has {counted(len(self._types), 'field')}")
        for value, (name, allowed) in zip(packed, self._types.items(), strict=True):
            if allowed is not None and type(value) not in allowed:
                raise EngineError(f"{self._name}.{name} came as {type(value).__name__}")
        conversions = zip(range(len(packed)), self.conversions, strict=True)
        plan = [(at, convert) for at, convert in conversions if convert is not None and packed[at] is not None]
        return self._plans.setdefault(tuple(map(type, packed)), plan)


class Codec(_Record[T]):
    """Encodes and decodes a dataclass for the wire. The dataclasses in its fields must have codecs already.

    Args:
        hints: types to use in place of the dataclass's type hints, by field; Any: the constructor checks the value.
        left_out: fields that are not sent; they become None.
        n_kept: Number of decoded instances to keep. Equal fields are decoded to the same instance. Only for an
            immutable dataclass with a slow constructor.

    Attributes:
        encode: returns the fields of an instance; pack() uses it for instances inside a message.
    """

    def __init__(
        self, kind: type[T], hints: Mapping[str, Any] = _NO_HINTS, left_out: Collection[str] = (), *, n_kept: int = 0
    ) -> None:
        fields = [field.name for field in dataclasses.fields(kind) if field.name not in left_out]  # type: ignore[arg-type]
        types_of_fields = {name: hints.get(name) or _hint(kind, name) for name in fields}
        super().__init__(kind.__name__, types_of_fields, _constructor(kind, fields, dict.fromkeys(left_out)))
        self.encode: Callable[[T], Any] = attrgetter(*fields)
        self._n_kept = n_kept
        self._kept: tuple[tuple[Any, T], ...] = ()  # pairs (fields, instance); other threads read this tuple
        _encoders[kind], _decoders[kind] = self.encode, self._shared if n_kept else self.decode

    def _shared(self, packed: Any) -> T:
        """Returns a kept instance whose fields have equal values and equal types, or else a new instance. Equal values
        do not suffice, because 1 == True.
        """
        for theirs, made in self._kept:
            if theirs == packed and [*map(type, theirs)] == [*map(type, packed)]:
                return made
        made = self.decode(packed)
        self._kept = ((packed, made), *self._kept[: self._n_kept - 1])
        return made


def _constructor(kind: type[T], names: list[str], left_out: dict[str, None]) -> Callable[[Any], T]:
    def construct(fields: Any) -> T:
        return kind(**dict(zip(names, fields, strict=True)), **left_out)

    def fill(fields: Any) -> T:
        """Makes an instance without the constructor. In a frozen dataclass the constructor takes twice as long."""
        made = kind.__new__(kind)
        made.__dict__.update(zip(names, fields))  # noqa: B905  # the lengths are equal, and `strict` takes time
        return made

    def fill_all(fields: Any) -> T:
        made = fill(fields)
        made.__dict__.update(left_out)
        return made

    if hasattr(kind, "__post_init__"):
        return construct
    return fill_all if left_out else fill


def _hint(kind: type, name: str) -> Any:
    """Returns the type hint of one field. Does not use typing.get_type_hints, which evaluates the hints of all fields:
    Python before 3.12 cannot evaluate array[float].
    """
    hint = kind.__annotations__[name]
    return eval(hint, vars(sys.modules[kind.__module__])) if isinstance(hint, str) else hint


def _types_of(hint: Any) -> set[type] | None:
    """Returns the types that a value of this hint may have in a message; None: any type."""
    if hint is Any:
        return None
    if hint is float:
        return {float, int}
    if hint in _PLAIN:
        return {hint}
    origin = typing.get_origin(hint) or hint
    if origin in _UNIONS:
        return set().union(*(_types_of(member) or () for member in typing.get_args(hint)))
    if origin is dict:
        return {dict}
    if origin is array:
        return {bytes}
    return {str} if issubclass(origin, Enum) else {tuple}


def _conversion(hint: Any) -> _Convert | None:
    """Returns a function that turns a received value (not None) into the type of `hint`; None if no value needs it."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint is Any or hint in _PLAIN:
        return None
    if origin in _UNIONS:
        found = [convert for convert in map(_conversion, arguments) if convert is not None]
        if len(arguments) > 2 and found:
            raise TypeError(f"{hint} allows several types; give the codec a hint")
        return found[0] if found else None
    if origin is tuple and arguments[1:] == (...,):
        each = _conversion(arguments[0])
        return None if each is None else lambda values: tuple([None if v is None else each(v) for v in values])
    if origin is tuple:
        return _Record("a tuple", {f"[{at}]": each for at, each in enumerate(arguments)}, tuple).decode
    if origin is dict:
        convert = _conversion(arguments[1])
        return None if convert is None else lambda items: {key: convert(value) for key, value in items.items()}
    if origin is array:
        return lambda data: array("f", data)
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_make"):
        record = _Record(hint.__name__, typing.get_type_hints(hint), hint._make)
        return record.decode if any(record.conversions) else hint._make
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if hint not in _decoders:
        raise TypeError(f"{hint} has no codec")
    return _decoders[hint]


_PLAIN = (str, bytes, int, float, bool, types.NoneType)
_UNIONS = (typing.Union, types.UnionType)
