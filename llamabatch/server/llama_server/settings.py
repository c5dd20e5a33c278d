"""The settings of a request under llama-server's names, as in its responses and in /props."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamabatch.llama.model import Model
from llamabatch.request.samplers import CHAIN
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.server.request.generation import filled

RANDOM_SEED = 2**32 - 1  # llama-server shows this seed if a request has no seed

Json = dict[str, Any]


def generation_settings(
    params: SamplingParams,
    model: Model,
    *,
    n_predict: int | None,
    stream: bool = False,
    timings_per_token: bool = False,
    lora: Mapping[str, float] | None = None,
    adapters: Sequence[str] = (),
) -> Json:
    """Returns the settings of a request under llama-server's names.

    Args:
        n_predict: the requested limit; None: no limit.
        lora: scales of adapters by name.
        adapters: names of all adapters, in the order of their ids.
    """
    full = filled(params, model)
    limit = -1 if n_predict is None else n_predict
    penalties = (full.repetition_penalty, full.presence_penalty, full.frequency_penalty)
    has_penalty = penalties != (1.0, 0.0, 0.0)

    def same(*names: str) -> Json:
        return {name: getattr(full, name) for name in names}

    return {
        "seed": RANDOM_SEED if full.seed is None else full.seed,
        **same("temperature", "dynatemp_range", "dynatemp_exponent"),
        "top_k": max(0, full.top_k),
        **same("top_p", "min_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "typical_p"),
        "repeat_last_n": full.repeat_last_n if has_penalty else 0,
        "repeat_penalty": full.repetition_penalty,
        **same("presence_penalty", "frequency_penalty"),
        **same("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
        "dry_sequence_breakers": list(full.dry_sequence_breakers or ()),
        **same("mirostat", "mirostat_tau", "mirostat_eta"),
        "adaptive_target": -1.0,
        "adaptive_decay": 0.0,
        "stop": list(full.stop_strings),
        "max_tokens": limit,
        "n_predict": limit,
        "n_keep": full.n_keep or 0,
        "n_discard": 0,
        "ignore_eos": full.ignore_eos,
        "stream": stream,
        "logit_bias": [
            *({"token": token, "bias": bias} for token, bias in full.biases),
            *({"token": token, "bias": None} for token in (model.eog_ids if full.ignore_eos else ())),  # a ban
        ],
        "n_probs": max(0, full.logprobs or 0),
        "min_keep": 0,
        "grammar": "" if full.structure is None else full.structure.text,
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
        "samplers": list(CHAIN if params.chain is None else params.chain),
        "timings_per_token": timings_per_token,
        "post_sampling_probs": full.post_sampling_probs,
        "backend_sampling": False,
        "lora": [{"id": place, "scale": float((lora or {}).get(name, 0.0))} for place, name in enumerate(adapters)],
    }
