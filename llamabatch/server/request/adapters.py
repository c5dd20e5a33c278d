"""Adapters in bodies: a body gives names of adapters or llama-server's ids, each with a scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamabatch.errors import AdapterError
from llamabatch.request.adapters import MAX_ADAPTERS, MAX_SCALE
from llamabatch.server.request.body import Body
from llamabatch.utils.checks import integer, number, show


def read_adapters(body: Body) -> tuple[Mapping[str, float] | None, tuple[tuple[int, float], ...] | None]:
    """Removes the fields `adapters` and `lora` from a body and returns their values. The first value maps names to
    scales. The second value has pairs of id and scale. None: the field is missing. Raises AdapterError."""
    adapters, lora = _adapters(body.take("adapters")), _lora(body.take("lora"))
    if lora is not None and adapters is not None:
        raise AdapterError("adapters and lora are both given; give one of them")
    return adapters, lora


def _adapters(given: object) -> Mapping[str, float] | None:
    if given is None:
        return None
    if isinstance(given, str):
        return {given: 1.0}
    if not isinstance(given, Mapping) or len(given) > MAX_ADAPTERS:
        raise AdapterError(f"adapters is {show(given)}; give names and scales as {{'name': 1.0}}")
    return {
        name: float(number(AdapterError, f"the scale of adapter {show(name)}", scale, -MAX_SCALE, MAX_SCALE))
        for name, scale in given.items()
    }


def _lora(given: object) -> tuple[tuple[int, float], ...] | None:
    if given is None:
        return None
    if not isinstance(given, list) or len(given) > MAX_ADAPTERS:
        raise AdapterError(f"lora is {show(given)}; give a list of {{'id': 0, 'scale': 1.0}}")
    scales: dict[int, float] = {}
    for each in given:
        if not isinstance(each, Mapping):
            raise AdapterError(f"lora holds {show(each)}; give {{'id': 0, 'scale': 1.0}}")
        index = integer(AdapterError, "an id of lora", each.get("id"), 0, MAX_ADAPTERS)
        if index in scales:
            raise AdapterError(f"lora names the id {index} twice; give each once")
        scales[index] = float(number(AdapterError, "a scale of lora", each.get("scale", 1.0), -MAX_SCALE, MAX_SCALE))
    return tuple(scales.items())


def scales_of(
    adapters: Mapping[str, float] | None, lora: tuple[tuple[int, float], ...] | None, loaded: Sequence[str]
) -> Mapping[str, float] | None:
    """Returns names and scales of adapters, requested by name or id; None: the body names no adapters.

    Args:
        loaded: names of the loaded adapters. The index of a name is the adapter's id in llama-server's API.

    Raises:
        AdapterError: `lora` has an id that belongs to no loaded adapter.
    """
    if lora is None:
        return adapters
    for index, _ in lora:
        if index >= len(loaded):
            known = f"; known are 0 to {len(loaded) - 1}" if loaded else " (none is loaded)"
            raise AdapterError(f"lora has the id {index}{known}")
    return {loaded[index]: scale for index, scale in lora if scale}
