"""Overrides for the load of a model: other metadata values, and other places for tensors. Imports no llama.cpp."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from llamabatch.errors import ConfigError
from llamabatch.gguf.header import Header
from llamabatch.gguf.reader import ARRAY, BOOL, FLOAT32, TEXT, TYPE_NAMES, UINT32
from llamabatch.utils.checks import nearest, pairs, plain, show, string

KvOverrides: TypeAlias = "tuple[tuple[str, bool | int | float | str], ...]"
TensorOverrides: TypeAlias = "tuple[tuple[str, str], ...]"

MAX_OVERRIDES = 256
MAX_BYTES = 127  # maximum bytes of a key or a text: llama_model_kv_override has char[128], which includes a NUL
MAX_PATTERN_BYTES = 512
CPU = "CPU"
# This pattern finds the weights of a layer's experts (common/common.h, LLM_FFN_EXPS_REGEX).
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_MAX_INT = 2**32 - 1  # llama.cpp reads whole numbers as uint32
_MAX_FLOAT = 3.4028234663852886e38
_SPLIT_AT_COMMA = re.compile(r"(?<!\\),")
# Finds the groups that std::regex does not support: all that begin with (? except (?: (?= (?!
_GROUPS = re.compile(r"(?<!\\)\(\?(?![:=!])")
_ESCAPES = re.compile(r"(?<!\\)(?:\\\\)*\\(?![dDwWsSbBtnrfv])([A-Za-z0])")
_FROM_TEXT: dict[str, Callable[[str], bool | int | float | str]] = {
    "int": int,
    "float": float,
    "bool": {"true": True, "false": False}.__getitem__,
    "str": str,
}
# Keys: Python types of values. Values: the GGUF type written for such a value, and the GGUF types it can replace.
_TYPES: dict[type, tuple[int, tuple[int, ...]]] = {
    bool: (BOOL, (BOOL,)),
    int: (UINT32, (0, 1, 2, 3, 4, 5, 10, 11)),  # all GGUF types of whole numbers
    float: (FLOAT32, (6, 12)),
    str: (TEXT, (TEXT,)),
}


def check_kv_overrides(given: object) -> KvOverrides:
    """Checks kv_overrides and returns them as pairs of key and value. Raises ConfigError.

    Args:
        given: a mapping, pairs, or llama.cpp's text: "key=int:1,other=bool:false"; the types are int, float, bool, str.
    """
    text = string(given)
    found = pairs(given, MAX_OVERRIDES + 1) if text is None else _pairs_of_text(text)
    if found is None:
        raise ConfigError(f"kv_overrides is {show(given)}; give {{'key': value}}, or a text such as 'key=int:1'")
    if len(found) > MAX_OVERRIDES:
        raise ConfigError(f"kv_overrides has more than {MAX_OVERRIDES} keys; at most that many are allowed")
    values: dict[str, bool | int | float | str] = {}
    for name, value in found:
        key = string(name)
        if not key or "\0" in key or len(key.encode("utf-8", "surrogatepass")) > MAX_BYTES:
            raise ConfigError(f"kv_overrides has the key {show(name)}; give a text of 1 to {MAX_BYTES} bytes")
        if key.startswith("split."):
            raise ConfigError(
                f"kv_overrides has the key {key!r}; it says how the model is split into files and cannot be changed"
            )
        if key in values:
            raise ConfigError(f"kv_overrides has the key {key!r} twice")
        values[key] = _checked_value(key, value)
    return tuple(values.items())


def _pairs_of_text(text: str) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for part in _SPLIT_AT_COMMA.split(text):
        key, _, typed = part.replace("\\,", ",").partition("=")
        kind, colon, value = typed.partition(":")
        try:
            found.append((key, _FROM_TEXT[kind](value)))
        except (KeyError, ValueError):
            what = f"the type {kind!r}" if colon and kind not in _FROM_TEXT else show(part)
            cure = "give key=TYPE:VALUE, with the type int, float, bool (true or false) or str"
            raise ConfigError(f"kv_overrides has {what}; {cure}") from None
    return found


def _checked_value(key: str, given: object) -> bool | int | float | str:
    value = plain(given)
    text = string(value)
    if text is not None:
        if "\0" in text or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
            raise ConfigError(f"kv_overrides[{key!r}] is {show(text)}; a text has at most {MAX_BYTES} bytes, none NUL")
        return text
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and 0 <= value <= _MAX_INT:
        return value
    if isinstance(value, float) and abs(value) <= _MAX_FLOAT:  # NaN fails this comparison
        return value
    allowed = f"give a whole number from 0 to {_MAX_INT}, a float, True, False, or a text"
    raise ConfigError(f"kv_overrides[{key!r}] is {show(given)}; {allowed}")


def overridden(header: Header, overrides: KvOverrides) -> Header:
    """Returns the header as llama.cpp reads it with these overrides.

    Raises:
        ConfigError: the file's value has another type. llama.cpp would silently keep the file's value.
    """
    if not overrides:
        return header
    metadata, types = dict(header.metadata), dict(header.types)
    for key, value in overrides:
        kind, fitting = _TYPES[type(value)]
        there = types.get(key)
        if there == ARRAY:
            raise ConfigError(f"kv_overrides has {key!r}, a list in {header.path.name}; lists cannot be overridden")
        if there is not None and there not in fitting:
            raise ConfigError(
                f"kv_overrides[{key!r}] is {show(value)}, of type {TYPE_NAMES[kind]}; {header.path.name} has "
                f"{show(metadata.get(key))} there, of type {TYPE_NAMES[there]}"
            )
        metadata[key], types[key] = value, kind
    return replace(header, metadata=metadata, types=types)


def check_tensor_overrides(given: object) -> TensorOverrides:
    """Checks override_tensor and returns it as pairs of pattern and place. Raises ConfigError.

    Args:
        given: a mapping, pairs, or llama.cpp's text: "pattern=CPU,other=CUDA0".
    """
    text = string(given)
    found = pairs(given, MAX_OVERRIDES + 1) if text is None else _rules_of_text(text)
    if found is None:
        raise ConfigError(f"override_tensor is {show(given)}; give {{'pattern': 'CPU'}}, or a text: 'pattern=CPU'")
    if len(found) > MAX_OVERRIDES:
        raise ConfigError(f"override_tensor has more than {MAX_OVERRIDES} patterns; at most that many are allowed")
    rules = []
    for pattern, place in found:
        name = string(place)
        if not name:
            raise ConfigError(f"override_tensor[{show(pattern)}] is {show(place)}; give 'CPU' or the name of a device")
        rules.append((_checked_pattern(pattern), name))
    return tuple(rules)


def _rules_of_text(text: str) -> list[tuple[str, str]]:
    rules = [part.partition("=") for part in text.split(",")]
    if not all(equals for _, equals, _ in rules):
        raise ConfigError(f"override_tensor is {show(text)}; give pattern=PLACE, several with commas between them")
    return [(pattern, place) for pattern, _, place in rules]


def _checked_pattern(given: object) -> str:
    pattern = string(given)
    if not pattern or "\0" in pattern or len(pattern.encode("utf-8", "surrogatepass")) > MAX_PATTERN_BYTES:
        raise ConfigError(f"override_tensor has the pattern {show(given)}; give 1 to {MAX_PATTERN_BYTES} bytes")
    reason = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python warns of syntax that means something else in std::regex
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        reason = str(error)
    if _GROUPS.search(pattern):
        reason = "(?: (?= (?! are the only groups with a question mark"
    if (escape := _ESCAPES.search(pattern)) is not None:
        reason = f"\\{escape[1]} means something else in std::regex, or nothing"
    if "[:" in pattern:
        reason = "write [0-9] instead of [[:digit:]]"
    if reason:
        raise ConfigError(f"override_tensor has the pattern {show(pattern)}; it is no regular expression: {reason}")
    return pattern


def expert_overrides(n_layers: int | None) -> TensorOverrides:
    """Returns rules that keep the experts of the first `n_layers` layers (None: of all layers) in main memory."""
    if n_layers is None:
        return ((_EXPERTS, CPU),)
    return tuple((rf"blk\.{layer}{_EXPERTS}", CPU) for layer in range(n_layers))


def places(names: Iterable[str], rules: TensorOverrides) -> dict[str, str]:
    """Returns the place of each tensor matched by a rule. The first matching rule counts, as in llama.cpp."""
    compiled = [(re.compile(pattern), place) for pattern, place in rules]
    found = {}
    for name in names:
        for pattern, place in compiled:
            if pattern.search(name):
                found[name] = place
                break
    return found


def check_place(place: str, known: Mapping[str, object]) -> None:
    """Raises ConfigError for a place that is unknown to this build."""
    if place not in known:
        raise ConfigError(f"override_tensor names the place {show(place)}{nearest(place, known)}")
