"""FilledParams: SamplingParams with a value in every field, from the request, the model's GGUF or llama.cpp.

The makers of a model may recommend values in the keys general.sampling.* of its GGUF (llama.h:
LLAMA_MODEL_META_KEY_SAMPLING_*). If a request has no value for a field, the model's value applies, as in llama.cpp's
own programs.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llamabatch.errors import SamplingError
from llamabatch.request.samplers import KNOWN, is_off, switched_off
from llamabatch.request.sampling_params import OPEN, SamplingParams

logger = logging.getLogger(__name__)

Defaults = Mapping[str, float]

# llama.cpp's values (common/common.h), used if the file has none
DEFAULTS: Defaults = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "repetition_penalty": 1.0,
    "repeat_last_n": -1,  # all tokens, as in vLLM; llama.cpp's value is 64
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
}
_KEYS = {name: f"general.sampling.{name}" for name in OPEN} | {
    "temperature": "general.sampling.temp",
    "repetition_penalty": "general.sampling.penalty_repeat",
    "repeat_last_n": "general.sampling.penalty_last_n",
}
_WHOLE = ("top_k", "mirostat", "repeat_last_n")


class FilledParams(SamplingParams):
    """SamplingParams with a value in every field, as samplers read them. `samplers` is None if llama.cpp's
    order gives the same result."""

    if TYPE_CHECKING:
        temperature: float
        top_k: int
        top_p: float
        min_p: float
        xtc_probability: float
        xtc_threshold: float
        repetition_penalty: float
        repeat_last_n: int
        mirostat: int
        mirostat_tau: float
        mirostat_eta: float

    @property
    def uncommon(self) -> bool:
        """True if a sampler other than bias, penalties, masks, top_k, top_p, min_p and temperature is needed."""
        if self.dry or self.logits_processors or self.chain is not None:
            return True
        if self.greedy:
            return False
        cuts = self.typical_p < 1 or self.top_n_sigma > 0 or self.xtc_probability > 0
        return cuts or self.mirostat > 0 or self.dynatemp_range > 0

    @property
    def log_min_p(self) -> float:
        """The lowest logit that min_p keeps, minus the best logit; -inf: min_p keeps all tokens."""
        return math.log(self.min_p) if self.min_p > 0 else -math.inf


def fill(params: SamplingParams, defaults: Defaults = DEFAULTS) -> FilledParams:
    """Returns a copy of `params`. Fields that are None get the values of `defaults`, a mapping with all names of
    OPEN."""
    filled = FilledParams.__new__(FilledParams)
    filled.__dict__.update(vars(params))  # the constructor would check long lists again
    for name in OPEN:
        if getattr(params, name) is None:
            filled.__dict__[name] = defaults[name]
    if filled.chain is not None:
        off = switched_off(filled.chain)
        if filled.greedy or filled.mirostat:  # greedy and mirostat use the temperature with any chain
            off.pop("temperature", None)
        filled.__dict__.update(off)
        filled.__dict__["samplers"] = _other_order(filled)
    return filled


def _other_order(params: FilledParams) -> tuple[str, ...] | None:
    """Returns the samplers that have an effect, in order; None if llama.cpp's order gives the same result."""
    if params.mirostat:
        return None
    acting = [name for name in params.chain or () if not is_off(name, vars(params))]
    if params.greedy:  # greedy sampling ignores these two samplers
        acting = [name for name in acting if name not in ("typ_p", "xtc")]
    places = [KNOWN.index(name) for name in acting]
    rises = all(before < after for before, after in itertools.pairwise(places))
    return None if rises and "infill" not in acting else tuple(acting)


def defaults_of(metadata: Mapping[str, str]) -> Defaults:
    """Returns the defaults of a GGUF with this metadata. If the GGUF has no value for a field, llama.cpp's value is
    used."""
    return {**DEFAULTS, **given_by(metadata)}


def given_by(metadata: Mapping[str, str]) -> Defaults:
    """Returns only the defaults in the GGUF. Warns about impossible values, and leaves them out."""
    found: dict[str, float] = {}
    for name, key in _KEYS.items():
        if key not in metadata:
            continue
        try:
            value = float(metadata[key])
            if name in ("temperature", "top_k"):
                value = max(value, 0.0)  # in llama.cpp, a negative temperature is greedy; a negative top_k: no limit
            value = int(value) if name in _WHOLE else value
            SamplingParams(**{name: value})  # type: ignore[arg-type]
            found[name] = value
        except (ValueError, OverflowError) as error:  # SamplingError is a ValueError
            reason = error if isinstance(error, SamplingError) else f"{metadata[key]!r} is no number"
            logger.warning("the model file's %s is ignored: %s", key, reason)
    return found
