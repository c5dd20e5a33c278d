"""Greedy texts of a model whose logits may differ by rounding: they may part where two tokens are nearly as likely."""

from __future__ import annotations

from llamabatch.request.outputs import CompletionOutput

NEAR = 0.15  # logits; the bound of docs/design/sampling-and-equality.md
N_LOGPROBS = 4  # of the likeliest, which the other token must be among


def gap_of(ours: CompletionOutput, wanted: CompletionOutput) -> float:
    """How much likelier the wanted token is than ours where the texts part, in logits; 0: they do not. Of outputs with
    N_LOGPROBS logprobs."""
    assert wanted.logprobs is not None
    for own, other, logprobs in zip(ours.token_ids, wanted.token_ids, wanted.logprobs, strict=True):
        if own != other:
            return logprobs[other].logprob - logprobs[own].logprob if own in logprobs else float("inf")
    return 0.0
