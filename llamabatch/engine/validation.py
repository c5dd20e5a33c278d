"""The single check of a request, made wherever requests come in: in the FrontClient, in Engine.add and in a dry run.

No native code sees a request before `validate` has accepted it. `validate` also cuts prompts that may be cut. Pure
Python.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from llamabatch.config import ResolvedConfig
from llamabatch.errors import ConfigError, ContextLengthError, PromptError, SamplingError
from llamabatch.request.adapters import check_known
from llamabatch.request.detokenizer import Vocabulary
from llamabatch.request.media import IMAGE, MediaRun
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.sequence import kept_tokens
from llamabatch.utils.checks import counted, show

# If max_tokens is None, a prompt is cut so that this many tokens are left for the output. Request.expected_tokens uses
# the same number.
_EXPECTED_OUTPUT = 256
# Maximum number of logprobs of one request. A logprob takes about 300 bytes as Python objects, and 25 bytes in a
# message between processes.
MAX_LOGPROBS_IN_ALL = 2**22


class RequestModel(Protocol):
    """Facts of a model that decide which requests it can run. A Model that has loaded only its vocabulary suffices."""

    path: Path
    n_vocab: int
    cannot_generate: str | None
    cannot_embed: str | None
    cannot_classify: str | None

    @property
    def vocabulary(self) -> Vocabulary: ...

    def can_shift(self, type_k: str) -> bool: ...


@dataclass(frozen=True)
class RequestLimits:
    """The limits of an engine for one request.

    Attributes:
        n_ctx: maximum number of tokens of prompt and output together; the last token sampled is not counted.
        n_text: maximum number of tokens of a text to embed.
        n_pass: maximum number of tokens of one pass.
        can_shift: overflow="shift" is possible.
    """

    n_ctx: int
    n_text: int
    n_pass: int
    can_shift: bool

    @classmethod
    def of(cls, config: ResolvedConfig, model: RequestModel) -> RequestLimits:
        """Returns the limits of an engine with this config, as far as they are known without its context."""
        return cls(config.n_ctx, longest_text(config), config.n_ubatch, model.can_shift(config.type_k))


def longest_text(config: ResolvedConfig) -> int:
    """Returns the maximum number of tokens of a text to embed."""
    return min(config.n_ctx, config.n_batch)


def validate(request: Request, limits: RequestLimits, model: RequestModel, adapters: Collection[str]) -> Request:
    """Checks a request; returns it with its prompt cut where truncate_prompt_tokens or overflow="truncate" ask for it.

    Args:
        adapters: names of the loaded adapters.

    Raises:
        ConfigError: the model cannot generate, gives no embeddings, or has no classification head.
        PromptError: the prompt is empty, has ids outside the vocabulary, or ends with a picture or audio; a picture or
            a piece of audio is too large for a pass; an option works with text only; score_from is outside the prompt.
        ContextLengthError: the prompt is longer than n_ctx.
        AdapterError: an adapter is not loaded.
        SamplingError: the parameters name token ids outside the vocabulary, ask for too many logprobs, limit the
            thinking of a model whose thinking tags are unknown, or ask for overflow="shift" where shifts are impossible
            or the text might never end.
    """
    check_kind(model, embed=request.embed, classify=request.classify)
    if request.adapters:
        check_known(request.adapters, adapters)
    if request.embed:
        what = "a text to rank or classify" if request.classify else "an embedding"
        check_text(request.prompt_token_ids, model.n_vocab, limits.n_text, what, request.media_runs)
        return request
    check_budget(request)
    check_shift(request.params, limits)
    if request.media_runs:
        check_media(request, model.n_vocab, limits)
    else:
        request = fitted(request, limits.n_ctx, model.vocabulary.bos)
        check_prompt(request.prompt_token_ids, model.n_vocab, limits.n_ctx)
    check_token_ids(request.params, model.n_vocab)
    check_logprobs(request.params, len(request.prompt_token_ids), limits.n_ctx, model.n_vocab, request.score_from)
    return request


def check_kind(model: RequestModel, *, embed: bool, classify: bool = False) -> None:
    """Raises ConfigError if the model cannot do this kind of work: classify texts with `embed` and `classify`, embed
    texts with `embed` alone, and otherwise generate text.
    """
    if embed and classify and model.cannot_classify is not None:
        raise ConfigError(f"{model.path.name} ranks and classifies no texts: it is {model.cannot_classify}")
    if embed and not classify and model.cannot_embed is not None:
        raise ConfigError(f"{model.path.name} gives no embeddings: it is {model.cannot_embed}")
    if not embed and model.cannot_generate is not None:
        raise ConfigError(f"{model.path.name} cannot generate text: it is {model.cannot_generate}")


def check_prompt(token_ids: tuple[int, ...], n_vocab: int, n_ctx: int) -> None:
    """Raises PromptError for a prompt that llama.cpp could not run.

    A prompt of n_ctx tokens is allowed: one output token still fits, because it needs no cell of its own.
    """
    if not token_ids:
        raise PromptError("the prompt is empty; give at least one token")
    check_length(len(token_ids), n_ctx)
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= n_vocab:
        bad = low if low < 0 else high
        raise PromptError(f"token id {show(bad)} is outside the vocabulary; allowed are 0 to {n_vocab - 1}")


def check_media(request: Request, n_vocab: int, limits: RequestLimits) -> None:
    """Checks a prompt with media as check_prompt does, and refuses options that work with text only."""
    params, ids = request.params, request.prompt_token_ids
    what = "picture" if any(media.kind == IMAGE for media in request.media) else "sound"
    not_asked = {
        "prompt_logprobs": params.prompt_logprobs,
        "score_from": request.score_from,
        "overflow": "shift" if params.overflow == "shift" else None,
    }
    for name, value in not_asked.items():
        if value is not None:
            raise PromptError(f"{name} is {show(value)}, but the prompt has a {what}; only prompts of text can have it")
    for run in request.media_runs:
        if not run.is_causal and run.length > limits.n_pass:
            raise PromptError(
                f"a {what} has {run.length} tokens, which one pass must compute; n_ubatch allows {limits.n_pass}"
            )
    if request.media_runs[-1].end == len(ids):
        raise PromptError(f"the prompt ends with a {what}; give at least one token of text behind it")
    if len(ids) > limits.n_ctx or fitted(request, limits.n_ctx, None) is not request:
        message = (
            f"the prompt has {len(ids)} tokens with its {what}s; n_ctx allows 1 to {limits.n_ctx}, and a prompt with "
            f"a {what} is not cut"
        )
        raise _too_long(len(ids), limits.n_ctx, message, is_cured=True)
    check_prompt(_text_ids(ids, request.media_runs), n_vocab, limits.n_ctx)


def _text_ids(token_ids: tuple[int, ...], runs: Sequence[MediaRun]) -> tuple[int, ...]:
    """Returns the ids of a prompt's text, without the ids of pictures and audio."""
    ends = (0, *(run.end for run in runs))
    starts = (*(run.start for run in runs), len(token_ids))
    parts = (token_ids[end:start] for end, start in zip(ends, starts, strict=True))
    return tuple(itertools.chain.from_iterable(parts))


def check_length(n_tokens: int, n_ctx: int, place: str = "") -> None:
    """Raises ContextLengthError if a prompt has more than n_ctx tokens.

    Args:
        place: the first words of the message, about the prompt's place in its list; "" for a single prompt.
    """
    if n_tokens > n_ctx:
        message = (
            f"{place}the prompt has {n_tokens} tokens; n_ctx allows 1 to {n_ctx} (overflow='truncate' would cut it)"
        )
        raise _too_long(n_tokens, n_ctx, message, is_cured=True)  # a variable would make a cycle with the traceback


def _too_long(n_tokens: int, n_allowed: int, message: str, *, is_cured: bool = False) -> ContextLengthError:
    error = ContextLengthError(message)
    error.n_tokens, error.n_allowed = n_tokens, n_allowed
    error.is_cured_by_n_ctx = is_cured
    return error


def check_text(
    token_ids: tuple[int, ...],
    n_vocab: int,
    longest: int,
    what: str = "an embedding",
    media_runs: Sequence[MediaRun] = (),
) -> None:
    """Checks a text for an embedding model. Raises ContextLengthError if it does not fit in one pass; otherwise checks
    it as check_prompt does."""
    if len(token_ids) > longest:
        raise _too_long(
            len(token_ids),
            longest,
            f"the text has {len(token_ids)} tokens; {what} takes 1 to {longest}, the smaller of n_ctx and n_batch",
        )
    text_ids = _text_ids(token_ids, media_runs)
    if text_ids or not media_runs:  # a picture needs no text
        check_prompt(text_ids, n_vocab, longest)


def check_token_ids(params: SamplingParams, n_vocab: int) -> None:
    """Raises SamplingError for token ids outside the vocabulary."""
    named = {
        "logit_bias": [token_id for token_id, _ in params.biases],
        "allowed_token_ids": params.allowed_ids or (),
        "stop_token_ids": params.stop_ids,
        "logprob_token_ids": params.logprob_ids,
    }
    for name, ids in named.items():
        if ids and ids[-1] >= n_vocab:  # the ids are sorted
            raise SamplingError(f"{name} has token id {ids[-1]}; this model's ids are 0 to {n_vocab - 1}")


def check_logprobs(
    params: SamplingParams, n_prompt: int, n_ctx: int, n_vocab: int, score_from: int | None = None
) -> None:
    """Raises PromptError if score_from is outside the prompt, or is 0, because the first token cannot be scored.

    Raises SamplingError if the prompt would be scored several times, or if there would be more logprobs than
    MAX_LOGPROBS_IN_ALL, the limit for memory and for messages between processes.
    """
    if score_from is not None and not 1 <= score_from < n_prompt:
        raise PromptError(
            f"score_from is {show(score_from)} for {counted(n_prompt, 'token')}; allowed are 1 to {n_prompt - 1}"
        )
    if score_from is not None and params.n_copies != 1:
        raise SamplingError(f"n is {params.n_copies}; a request that scores its prompt has 1")
    n_output, n_logprobs = _requested_logprobs(params, n_prompt, n_ctx, n_vocab)
    if n_logprobs > MAX_LOGPROBS_IN_ALL:
        whole = f" (-1 means {n_vocab})" if -1 in (params.prompt_logprobs, params.logprobs) else ""
        others = f" and {len(params.logprob_ids)} logprob_token_ids" if params.logprob_ids else ""
        raise SamplingError(
            f"prompt_logprobs is {params.prompt_logprobs} for {n_prompt} tokens and logprobs is {params.logprobs}"
            f"{others} for up to {n_output}{whole}: {n_logprobs} in all; a request may have 0 to "
            f"{MAX_LOGPROBS_IN_ALL}, so give a lower max_tokens"
        )


def requested_logprobs(request: Request, n_ctx: int, n_vocab: int) -> int:
    """Returns the maximum number of logprobs of a request."""
    return _requested_logprobs(request.params, len(request.prompt_token_ids), n_ctx, n_vocab)[1]


def _requested_logprobs(params: SamplingParams, n_prompt: int, n_ctx: int, n_vocab: int) -> tuple[int, int]:
    """Returns upper limits for the number of output tokens, and for the number of logprobs of output and prompt."""
    n_output = min(n_ctx + 1 - n_prompt, params.max_tokens or n_ctx) * params.n_copies
    of_prompt, of_output = (n_vocab if top == -1 else top or 0 for top in (params.prompt_logprobs, params.logprobs))
    return n_output, n_prompt * of_prompt + n_output * (of_output + len(params.logprob_ids))


def check_budget(request: Request) -> None:
    """Raises SamplingError for a thinking_token_budget if the tags around the model's thinking are unknown."""
    budget = request.params.thinking_token_budget
    if budget is not None and request.reasoning is None:
        raise SamplingError(
            f"thinking_token_budget is {budget}, but this model's chat template shows no thinking, or reasoning_format "
            'is \'none\'; give the engine reasoning_tags, as ("<think>", "</think>"), or leave the budget out'
        )


def check_shift(params: SamplingParams, limits: RequestLimits) -> None:
    """Raises SamplingError for overflow="shift" if the engine cannot shift, or if the text might never end."""
    if params.overflow != "shift":
        return
    if not limits.can_shift:
        raise SamplingError(
            "overflow is 'shift', which this engine cannot do: it takes positions that rotate in every layer, without "
            "YaRN or LongRoPE, no recurrent state, no sliding window, and a K cache that is not quantised; give "
            "'refuse' or 'truncate'"
        )
    if params.max_tokens is None:
        raise SamplingError("overflow is 'shift' and max_tokens is None; give max_tokens, or the text may never end")


def longest_cut(params: SamplingParams, n_ctx: int) -> int:
    """Returns the number of tokens to which overflow="truncate" cuts a prompt that is longer than n_ctx.

    The rest of n_ctx is left for the output: max_tokens tokens (256 if it is None), but at most half of n_ctx.
    """
    return n_ctx + 1 - min(params.max_tokens or _EXPECTED_OUTPUT, n_ctx // 2)  # the last token sampled needs no cell


def fitted(request: Request, n_ctx: int, bos: int | None) -> Request:
    """Returns the request, with its prompt cut if truncate_prompt_tokens or overflow="truncate" ask for it.

    overflow="truncate" cuts only prompts of more than n_ctx tokens. Such a prompt keeps at most `longest_cut` tokens.

    Args:
        bos: the token that begins every text; a cut prompt keeps this token. None: there is no such token.
    """
    prompt, params = request.prompt_token_ids, request.params
    excess, kept = 0, 1 if prompt[:1] == (bos,) else 0
    if params.truncate_prompt_tokens is not None:
        excess = len(prompt) - params.truncate_prompt_tokens
    if params.overflow == "truncate" and len(prompt) > n_ctx:
        too_much = len(prompt) - longest_cut(params, n_ctx)
        if too_much > excess:
            excess, kept = too_much, kept_tokens(params, len(prompt), n_ctx, kept)
    if excess <= 0:
        return request
    kept = min(kept, len(prompt) - excess)
    cut = (*prompt[:kept], *prompt[kept + excess :])
    return replace(request, prompt_token_ids=cut, num_truncated=request.num_truncated + excess)
