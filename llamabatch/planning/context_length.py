"""Computes n_ctx of a plan (given, trained, or fitted to the memory), and the reach of a scaled rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from llamabatch.config import MAX_CTX, MIN_CTX, EngineConfig, ResolvedConfig
from llamabatch.errors import ConfigError
from llamabatch.planning.kv_cache import MOST_SLOTS, MOST_SLOTS_ON_GPU, fits_in_share, is_on_gpus
from llamabatch.planning.machine import Machine
from llamabatch.planning.model_facts import MOST_CTX, ModelFacts
from llamabatch.scheduler.policies import has_one_slot
from llamabatch.utils.checks import counted

_FITTED_CTX = 32_768  # maximum for n_ctx="fit": an agent's first request has 10,000 to 20,000 tokens
_FITTED_SHARE = 8  # n_ctx="fit" must leave room for an eighth of the maximum number of slots


def n_ctx_of(config: EngineConfig, facts: ModelFacts, reasons: dict[str, str]) -> int:
    is_open = not isinstance(config.n_ctx, int)
    if is_open and any(key == f"{facts.arch}.context_length" for key, _ in config.kv_overrides):
        reasons["n_ctx"] = "kv_overrides names it"
        return max(MIN_CTX, facts.n_ctx_most)
    if not isinstance(config.n_ctx, int):
        n_ctx, source = _usual_ctx(config, facts)
        reasons["n_ctx"] = f"the smaller of {n_ctx} ({source}) and {MOST_CTX}"
        return max(MIN_CTX, min(n_ctx, MOST_CTX))
    if config.n_ctx > facts.n_ctx_most:
        scaled = f", and its scaled rotary embedding reaches {facts.n_ctx_scaled}" if facts.n_ctx_scaled else ""
        most = f"{facts.n_ctx_train}, as many as it was trained for{scaled}"
        refusal = f"n_ctx is {config.n_ctx}; {facts.name} takes 32 to {most}"
        if facts.has_positions:
            raise ConfigError(f"{refusal}; its table of positions ends there")
        scale = f"{(facts.n_ctx_orig or facts.n_ctx_train) / config.n_ctx:.4g}"
        raise ConfigError(
            f"{refusal}; rope_scaling='yarn' with rope_freq_scale={scale} reaches further, less precisely"
        )
    return config.n_ctx


def _usual_ctx(config: EngineConfig, facts: ModelFacts) -> tuple[int, str]:
    """Returns the upper bound for n_ctx if none is given, and the source of this bound: "trained" or "scaled"."""
    is_scaled = config.rope_freq_scale is not None and facts.n_ctx_most > facts.n_ctx_train
    # rope_freq_base allows any n_ctx, so it gives no default.
    n_ctx = facts.n_ctx_most if is_scaled and config.rope_freq_base is None else facts.n_ctx_train
    return n_ctx, "scaled" if n_ctx > facts.n_ctx_train else "trained"


def fitted_ctx(
    config: EngineConfig, facts: ModelFacts, one_slot: ResolvedConfig, machine: Machine, reasons: dict[str, str]
) -> int:
    """Returns the value of n_ctx="fit": 4096, doubled as long as all slots fit in half of the free memory. If n_slots
    is not given, an eighth of the maximum number of slots must fit. The result is at most _FITTED_CTX and the trained
    context of the model. A model that pools texts gets at most 4096, since one pass computes a whole text.
    """
    trained, source = _usual_ctx(config, facts)
    most = min(trained, _FITTED_CTX, config.kv_cells if isinstance(config.kv_cells, int) else _FITTED_CTX)
    n_ctx = one_slot.n_ctx
    if facts.is_encoder or facts.names_pooling or n_ctx >= most:
        return n_ctx
    on_gpu = is_on_gpus(facts, one_slot, machine)
    slots = (MOST_SLOTS_ON_GPU if on_gpu else MOST_SLOTS) // _FITTED_SHARE
    if config.n_slots != "auto":
        slots = config.n_slots
    elif has_one_slot(config.strategy):
        slots = 1

    def of_tokens(n: int) -> ResolvedConfig:
        if config.kv == "unified" or config.kv_cells != "auto":
            cells = n if config.kv_cells == "auto" else config.kv_cells
            return replace(one_slot, n_slots=slots, n_ctx=n, kv="unified", kv_cells=cells)
        return replace(one_slot, n_slots=slots, n_ctx=n)

    while n_ctx < most and fits_in_share(facts, of_tokens(min(2 * n_ctx, most)), machine):
        n_ctx = min(2 * n_ctx, most)
    reasons["n_ctx"] = f"the smaller of {trained} ({source}) and {_FITTED_CTX}"
    if n_ctx < most:
        reasons["n_ctx"] = f"{counted(slots, 'slot')} of {2 * n_ctx} tokens would not fit"
    return n_ctx


def scaled_ctx(config: EngineConfig, facts: ModelFacts) -> int:
    """Returns the number of tokens allowed by the options for the rotary embedding; 0 without such options.

    rope_freq_scale=1/4 puts 4 positions into the space of 1. rope_freq_base has no bound, so it gives MAX_CTX.
    """
    if facts.has_positions:
        return 0
    if config.rope_freq_base is not None:
        return MAX_CTX
    if config.rope_freq_scale is None:
        return 0
    return min(
        MAX_CTX, int((config.yarn_orig_ctx or facts.n_ctx_orig or facts.n_ctx_train) / config.rope_freq_scale + 0.5)
    )
