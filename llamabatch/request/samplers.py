"""The samplers of a chain: llama.cpp's names and order, and the values that switch a sampler off."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class _Sampler(NamedTuple):
    """The names of a sampler, and the values that switch it off.

    Attributes:
        letter: the letter of the sampler in llama-server's --sampler-seq.
        off: {field of SamplingParams: the value that switches the sampler off}.
        others: other names of the sampler.
        is_off_below: a value below the value in `off` also switches the sampler off.
    """

    letter: str
    off: Mapping[str, float]
    others: tuple[str, ...] = ()
    is_off_below: bool = False


# The samplers in llama.cpp's order (common/common.h). Infill is only in chains that name it.
_SAMPLERS = {
    "penalties": _Sampler("e", {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}),
    "dry": _Sampler("d", {"dry_multiplier": 0.0}),
    "top_n_sigma": _Sampler("s", {"top_n_sigma": 0.0}, ("top-n-sigma", "top_nsigma"), is_off_below=True),
    "top_k": _Sampler("k", {"top_k": 0}, ("top-k",), is_off_below=True),
    "typ_p": _Sampler("y", {"typical_p": 1.0}, ("typical_p", "typical", "typ-p", "typical-p", "typ")),
    "top_p": _Sampler("p", {"top_p": 1.0}, ("top-p", "nucleus")),
    "min_p": _Sampler("m", {"min_p": 0.0}, ("min-p",)),
    "xtc": _Sampler("x", {"xtc_probability": 0.0}),
    "temperature": _Sampler("t", {"temperature": 1.0, "dynatemp_range": 0.0}, ("temp",)),
    "infill": _Sampler("i", {}),
}
KNOWN = tuple(_SAMPLERS)
LETTERS = "".join(each.letter for each in _SAMPLERS.values())
CHAIN = KNOWN[:-1]  # the chain of a request that names no samplers
_CANONICAL = {other: name for name, each in _SAMPLERS.items() for other in (name, each.letter, *each.others)}


def known_samplers(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns the known samplers of a chain, in order, as keys of _SAMPLERS. Also returns each unknown name once.

    Args:
        names: names of samplers, or their letters.
    """
    given = list(names)
    unknown = dict.fromkeys(name for name in given if name not in _CANONICAL)
    return [_CANONICAL[name] for name in given if name in _CANONICAL], list(unknown)


def switched_off(samplers: Iterable[str]) -> dict[str, Any]:
    """Returns {field of SamplingParams: value} to switch off all samplers except the given ones."""
    left = _SAMPLERS.keys() - set(samplers)
    return {field: value for name in left for field, value in _SAMPLERS[name].off.items()}


def is_off(sampler: str, values: Mapping[str, Any]) -> bool:
    """Returns True if a sampler has no effect with these values.

    Args:
        values: the values of all fields of SamplingParams.
    """
    each = _SAMPLERS[sampler]
    below = -math.inf if each.is_off_below else 0.0
    return bool(each.off) and all(below <= values[field] - value <= 0 for field, value in each.off.items())
