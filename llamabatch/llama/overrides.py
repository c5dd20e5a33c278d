"""Converts overrides to llama.cpp's arrays, and checks in llama.cpp's log that the overrides were used."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from typing import Any

from llamabatch.errors import ConfigError
from llamabatch.gguf.overrides import KvOverrides, TensorOverrides, check_place
from llamabatch.llama import devices, library
from llamabatch.utils.checks import nearest, show

# The log lines of validate_override in llama-model-loader.cpp.
_USED = re.compile(r"Using metadata override \(.*?\) '(.*)' =")
_BAD_TYPE = re.compile(r"Bad metadata override type for key '(.*)', expected (\w+) but got (\w+)")


class _TensorOverride(ctypes.Structure):
    """llama_model_tensor_buft_override, which the binding does not have."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


def kv_array(lib: Any, overrides: KvOverrides) -> Any:
    """Returns an array for llama_model_params.kv_overrides. Its last element has an empty key. The load copies the
    array."""
    array = (lib.llama_model_kv_override * (len(overrides) + 1))()
    for entry, (key, value) in zip(array, overrides, strict=False):
        entry.key = key.encode("utf-8", "surrogatepass")
        if isinstance(value, bool):
            entry.tag, entry.value.val_bool = lib.LLAMA_KV_OVERRIDE_TYPE_BOOL, value
        elif isinstance(value, int):
            entry.tag, entry.value.val_i64 = lib.LLAMA_KV_OVERRIDE_TYPE_INT, value
        elif isinstance(value, float):
            entry.tag, entry.value.val_f64 = lib.LLAMA_KV_OVERRIDE_TYPE_FLOAT, value
        else:
            entry.tag, entry.value.val_str = lib.LLAMA_KV_OVERRIDE_TYPE_STR, value.encode("utf-8", "surrogatepass")
    return array


def tensor_array(rules: TensorOverrides) -> Any:
    """Returns an array for llama_model_params.tensor_buft_overrides. Its last element has a null pattern.

    The array holds the texts of the patterns. It must live as long as the model, which keeps the pointer.

    Raises:
        ConfigError: a rule names a place that this build of llama.cpp does not have.
    """
    known = devices.buffer_types(library.load())
    array = (_TensorOverride * (len(rules) + 1))()
    for entry, (pattern, place) in zip(array, rules, strict=False):
        check_place(place, known)
        entry.pattern, entry.buft = pattern.encode("utf-8", "surrogatepass"), known[place].address
    return array


def check_used(overrides: KvOverrides, lines: Iterable[str], keys: Iterable[str], *, all_read: bool) -> None:
    """Checks the log of a load. llama.cpp gives no error for an override of a wrong type or an unused key.

    Args:
        lines: lines of the log.
        keys: keys of the file, for the message.
        all_read: True if the load read more than the vocabulary.

    Raises:
        ConfigError: an override had no effect.
    """
    used = set()
    for line in lines:
        bad = _BAD_TYPE.search(line)
        if bad is not None:
            value = dict(overrides).get(bad[1])
            raise ConfigError(f"kv_overrides[{bad[1]!r}] is {show(value)}, of type {bad[3]}; llama.cpp reads {bad[2]}")
        match = _USED.search(line)
        if match is not None:
            used.add(match[1])
    for key, _ in overrides:
        if all_read and key not in used:
            hint = nearest(key, [each for each in keys if each != key])
            raise ConfigError(f"kv_overrides has the key {key!r}, which llama.cpp does not read from this file{hint}")
