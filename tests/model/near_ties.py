"""Compares greedy texts that may part where two tokens are nearly as likely, because of rounding."""

from __future__ import annotations

from llamabatch.request.outputs import CompletionOutput

NEAR = 0.15  # logits; the bound of docs/design/sampling-and-equality.md
N_LOGPROBS = 4  # the token of the other text must be among so many likeliest ones


def gap_of(ours: CompletionOutput, wanted: CompletionOutput) -> float:
    """Returns by how many logits the wanted token is likelier than ours where the texts part; 0 if they do not part.

    The outputs must have N_LOGPROBS logprobs.
    """
    assert wanted.logprobs is not None
    for own, other, logprobs in zip(ours.token_ids, wanted.token_ids, wanted.logprobs, strict=True):
        if own != other:
            return logprobs[other].logprob - logprobs[own].logprob if own in logprobs else float("inf")
    return 0.0
