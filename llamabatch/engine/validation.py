"""What a request must be like before anything native sees it; a prompt that may be cut is cut here. Pure Python."""

from __future__ import annotations

from dataclasses import replace

from llamabatch.errors import PromptError, SamplingError
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.scheduler.output import Limits
from llamabatch.utils.checks import show

# Tokens that a prompt leaves for the output where max_tokens does not say, as in Request.expected_tokens.
_EXPECTED_OUTPUT = 256


def check_prompt(token_ids: tuple[int, ...], vocabulary_size: int, n_ctx: int) -> None:
    """Refuses what llama.cpp could not run. A prompt of n_ctx tokens is allowed: it leaves room for one output token,
    which needs no cell of its own."""
    if not token_ids:
        raise PromptError("the prompt is empty; give at least one token")
    if len(token_ids) > n_ctx:
        raise PromptError(
            f"the prompt has {len(token_ids)} tokens; n_ctx allows 1 to {n_ctx} (overflow='truncate' would cut it)"
        )
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


def fitted(request: Request, n_ctx: int, bos: int | None) -> Request:
    """The request with its prompt cut at the left where it asks for that with overflow="truncate"; else as it is.

    What stays leaves room for max_tokens (256 where that is None), but never for more than half of n_ctx.

    Args:
        bos: the token that begins every text, which then stays; None: there is none.
    """
    prompt = request.prompt_token_ids
    if request.params.overflow != "truncate":
        return request
    output = min(request.params.max_tokens or _EXPECTED_OUTPUT, n_ctx // 2)
    excess = len(prompt) + output - (n_ctx + 1)  # the last token sampled needs no cell
    if excess <= 0:
        return request
    kept = prompt[:1] if prompt[0] == bos else ()
    cut = (*kept, *prompt[len(kept) + excess :])
    return replace(request, prompt_token_ids=cut, num_truncated=request.num_truncated + excess)


def check_overflow(request: Request, limits: Limits) -> None:
    """Raises SamplingError for a request that cannot be given what it asks for."""
    if request.params.overflow != "shift":
        return
    if not limits.can_shift:
        raise SamplingError(
            "overflow is 'shift', which this engine cannot do: it takes positions that rotate in every layer, without "
            "YaRN or LongRoPE, no recurrent state, no sliding window, and a K cache that is not quantised; give "
            "'refuse' or 'truncate'"
        )
    if request.params.max_tokens is None:
        raise SamplingError("overflow is 'shift' and max_tokens is None; give max_tokens, or the text need never end")
