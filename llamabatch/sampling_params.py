"""How one request is sampled: vLLM's names, llama.cpp's defaults."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from llamabatch.checks import boolean, integer, nearest, number, show
from llamabatch.errors import SamplingError

MAX_STOPS = 64
MAX_STOP_CHARS = 256
MAX_TOP_K = 2**31 - 1
MAX_BIASES = 1024
MAX_TOKEN_ID = 2**20 - 1  # larger than any vocabulary; the engine refuses what its model does not have

LogitBias = Mapping[int, float] | Iterable[tuple[int, float]] | None


@dataclass(frozen=True)
class SamplingParams:
    """What to sample, and when to stop. Checked once, when it is made; raises SamplingError.

    The chain is llama.cpp's: logit_bias, the penalties (repetition, frequency, presence), allowed_token_ids, top_k,
    then top_p, then min_p on the untempered probabilities, then temperature, then one draw. Penalties are vLLM's and
    OpenAI's. Defaults are those of llama.cpp's command line (common/common.h), but for max_tokens.

    Attributes:
        max_tokens: tokens to generate at most, the end-of-generation token included; None: until the model stops or
            the request has used its n_ctx.
        temperature: 0 is greedy: the likeliest token, the lowest id where two are equal.
        top_k: keep the k likeliest tokens; 0 or -1: all.
        top_p: keep the fewest tokens whose probabilities sum to at least top_p; 1: all.
        min_p: keep tokens at least min_p times as probable as the likeliest; 0: all.
        seed: 0 .. 2**64-1; the draw of output token i depends on (seed, i) alone, so that company, retries and
            preemption never shift it. None: a fresh random seed for each request.
        stop: strings that end the text; the text is cut before the first of them.
        ignore_eos: go on after an end-of-generation token, which then counts as any other.
        repetition_penalty: the logit of each token that is in prompt or output is divided by it where positive, else
            multiplied; 0.01 .. 100, 1: none.
        presence_penalty: taken from the logit of each token that is in the output; -2 .. 2.
        frequency_penalty: the same for each time that the token is in the output; -2 .. 2.
        logit_bias: {token id: what is added to its logit, -100 .. 100}, at most 1024 ids; kept as a tuple of pairs.
        allowed_token_ids: only these may come; None: all.
    """

    max_tokens: int | None = 256
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str | None = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: LogitBias = ()
    allowed_token_ids: Iterable[int] | None = None

    def __post_init__(self) -> None:
        number(SamplingError, "temperature", self.temperature, 0.0, 100.0)
        number(SamplingError, "top_p", self.top_p, 0.0, 1.0)
        number(SamplingError, "min_p", self.min_p, 0.0, 1.0)
        integer(SamplingError, "top_k", self.top_k, -1, MAX_TOP_K)
        if self.max_tokens is not None:
            integer(SamplingError, "max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.seed is not None:
            integer(SamplingError, "seed", self.seed, 0, 2**64 - 1)
        boolean(SamplingError, "ignore_eos", self.ignore_eos)
        number(SamplingError, "repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        number(SamplingError, "presence_penalty", self.presence_penalty, -2.0, 2.0)
        number(SamplingError, "frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        # the only normalisations: afterwards always tuples, so that parameters can be compared and hashed
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "allowed_token_ids", _allowed(self.allowed_token_ids))

    @classmethod
    def from_options(cls, **options: object) -> SamplingParams:
        """SamplingParams from a mapping with names from outside; an unknown name is refused with the nearest one."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise SamplingError(f"SamplingParams has no field {name!r}{nearest(name, known)}")
        return cls(**options)  # type: ignore[arg-type]  # checked by __post_init__

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Does a token's logit depend on the tokens before it?"""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def log_min_p(self) -> float:
        """How far below the best a logit may lie; -inf: any distance."""
        return math.log(self.min_p) if self.min_p > 0 else -math.inf

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """logit_bias as pairs of token id and bias, ids rising."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def allowed_ids(self) -> tuple[int, ...] | None:
        """allowed_token_ids, rising."""
        assert self.allowed_token_ids is None or isinstance(self.allowed_token_ids, tuple)
        return self.allowed_token_ids

    @property
    def stop_strings(self) -> tuple[str, ...]:
        assert isinstance(self.stop, tuple)
        return self.stop


def _stops(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (tuple, list)) or not all(isinstance(s, str) for s in strings):
        raise SamplingError(f"stop is {show(stop)}; give a string or a list of strings")
    if len(strings) > MAX_STOPS:
        raise SamplingError(f"stop holds {len(strings)} strings; at most {MAX_STOPS} are allowed")
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARS:
            raise SamplingError(f"a stop string has {len(string)} characters; allowed are 1 to {MAX_STOP_CHARS}")
    return tuple(strings)


def _biases(given: object) -> tuple[tuple[int, float], ...]:
    if given is None:
        return ()
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, (tuple, list)) or not all(isinstance(p, (tuple, list)) and len(p) == 2 for p in pairs):
        raise SamplingError(f"logit_bias is {show(given)}; give a mapping from token id to bias")
    if len(pairs) > MAX_BIASES:
        raise SamplingError(f"logit_bias holds {len(pairs)} ids; at most {MAX_BIASES} are allowed")
    for token_id, bias in pairs:
        integer(SamplingError, "a token id of logit_bias", token_id, 0, MAX_TOKEN_ID)
        number(SamplingError, f"logit_bias of token {token_id}", bias, -100.0, 100.0)
    if len({token_id for token_id, _ in pairs}) < len(pairs):
        raise SamplingError("logit_bias names a token id twice; give each once")
    return tuple(sorted((token_id, float(bias)) for token_id, bias in pairs))


def _allowed(given: object) -> tuple[int, ...] | None:
    if given is None:
        return None
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise SamplingError(f"allowed_token_ids is {show(given)}; give a list of token ids")
    ids = list(given)
    if not 1 <= len(ids) <= MAX_TOKEN_ID + 1:
        raise SamplingError(f"allowed_token_ids holds {len(ids)} ids; give 1 to {MAX_TOKEN_ID + 1}, or None for all")
    for token_id in ids:
        integer(SamplingError, "an id of allowed_token_ids", token_id, 0, MAX_TOKEN_ID)
    return tuple(sorted(set(ids)))
