"""Refuses requests that this model cannot run."""

from __future__ import annotations

from llamabatch.checks import show
from llamabatch.errors import PromptError, SamplingError
from llamabatch.sampling_params import SamplingParams


def check_prompt(token_ids: tuple[int, ...], vocabulary_size: int, n_ctx: int) -> None:
    """Refuses what llama.cpp could not run. A prompt of n_ctx tokens is allowed: it leaves room for one output token,
    which needs no cell of its own."""
    if not token_ids:
        raise PromptError("the prompt is empty; give at least one token")
    if len(token_ids) > n_ctx:
        raise PromptError(f"the prompt has {len(token_ids)} tokens; n_ctx allows 1 to {n_ctx}")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocabulary_size:
        bad = low if low < 0 else high
        raise PromptError(f"token id {show(bad)} is outside the vocabulary; allowed are 0 to {vocabulary_size - 1}")


def check_text(token_ids: tuple[int, ...], vocabulary_size: int, longest: int) -> None:
    """As check_prompt, for a text that goes through an embedding model in one pass."""
    if len(token_ids) > longest:
        raise PromptError(
            f"the text has {len(token_ids)} tokens; an embedding takes 1 to {longest}, the smaller of n_ctx and n_batch"
        )
    check_prompt(token_ids, vocabulary_size, longest)


def check_params(params: SamplingParams, vocabulary_size: int) -> None:
    """Refuses token ids that this vocabulary does not have. Raises SamplingError."""
    named = {
        "logit_bias": [token_id for token_id, _ in params.biases],
        "allowed_token_ids": params.allowed_ids or (),
        "stop_token_ids": params.stop_ids,
    }
    for name, ids in named.items():
        if ids and ids[-1] >= vocabulary_size:  # they rise
            raise SamplingError(f"{name} has token id {ids[-1]}; this model's ids are 0 to {vocabulary_size - 1}")
