"""SamplingParams: how one request is sampled, and when its text ends. Names are vLLM's, defaults llama.cpp's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from llamabatch.errors import SamplingError
from llamabatch.request.parameter_names import ALIASES, renamed
from llamabatch.request.samplers import KNOWN, LETTERS, known_samplers
from llamabatch.request.structured_outputs import IN_REASONING, Structure, structure
from llamabatch.utils.aliases import takes_names
from llamabatch.utils.brief import brief
from llamabatch.utils.checks import boolean, choice, integer, items, number, pairs, show, string

MAX_CHARS = 256  # maximum number of characters in a stop string, a bad word or a DRY breaker
MAX_BIASES = 1024
MAX_PROCESSORS = 64
MAX_TOKEN_ID = 2**20 - 1  # larger than any vocabulary; the engine refuses ids that its model does not have
MAX_N = 256  # maximum number of continuations of one prompt
MAX_LOGPROBS = 1024
MAX_TOP_K = 2**31 - 1
MAX_STOPS = 64
MAX_SAMPLERS = 64
MAX_BAD_WORDS = 1024
OVERFLOWS = ("refuse", "truncate", "shift")

LogitBias = Mapping[int, float] | Iterable[tuple[int, float]] | None
Strings = tuple[str, ...] | list[str] | str | None
TokenIds = Iterable[int] | None
LogitsProcessor = Callable[[list[int], Any], Any]

# None in one of these fields means the value in the model's GGUF. If the GGUF has no value, llama.cpp's value applies
# (sampling/defaults.py).
OPEN = (
    *("temperature", "top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold"),
    *("repetition_penalty", "repeat_last_n", "mirostat", "mirostat_tau", "mirostat_eta"),
)

NUMBERS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "top_n_sigma": (-1.0, 1000.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 100.0),
    "mirostat_tau": (0.0, 100.0),
    "mirostat_eta": (0.0, 1.0),
    "dynatemp_range": (0.0, 100.0),
    "dynatemp_exponent": (0.01, 100.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
INTEGERS = {
    "n": (1, MAX_N),
    "min_tokens": (0, 2**31 - 1),
    "top_k": (-1, MAX_TOP_K),
    "dry_allowed_length": (1, 2**31 - 1),
    "dry_penalty_last_n": (-1, 2**31 - 1),
    "mirostat": (0, 2),
    "repeat_last_n": (-1, 2**31 - 1),
    "priority": (-(2**31), 2**31 - 1),
}
OPTIONAL_INTEGERS = {
    "best_of": (1, MAX_N),
    "max_tokens": (1, 2**31 - 1),
    "thinking_token_budget": (0, 2**31 - 1),
    "seed": (0, 2**64 - 1),
    "logprobs": (-1, MAX_LOGPROBS),
    "prompt_logprobs": (-1, MAX_LOGPROBS),
    "truncate_prompt_tokens": (-1, 2**31 - 1),
    "n_keep": (-1, 2**31 - 1),
    "prompt_ignore_length": (0, 2**31 - 1),
}
_WHOLE = re.compile(r"-?[0-9]{1,20}", re.ASCII)
BOOLEANS = (
    *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "background", "skip_reading_prefix_cache"),
    "post_sampling_probs",
)


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of a request. They decide how tokens are drawn, and when the text ends. The constructor
    checks them once, and raises SamplingError.

    Keywords may also have the names of llama.cpp, Hugging Face and OpenAI (docs/names.md): temp, repeat_penalty,
    n_predict, guided_json. An unknown keyword raises UnknownParameterError (a TypeError) with the nearest name.

    The chain is llama.cpp's (common/sampling.cpp): logit_bias, the penalties, DRY, allowed_token_ids and other masks,
    top_n_sigma, top_k, typical_p, top_p, min_p on the untempered probabilities, XTC, temperature, then one draw.
    Penalties are vLLM's and OpenAI's. temperature, top_k, top_p, min_p, xtc_probability, xtc_threshold, mirostat,
    mirostat_tau, mirostat_eta, repetition_penalty and repeat_last_n are None unless given. None means the value of the
    model's GGUF (general.sampling.*). If the GGUF has no such value, the default in brackets applies. The defaults are
    llama.cpp's (common/common.h), except that of repeat_last_n.

    Attributes:
        n: number of continuations of the prompt, 1 .. 256; they share the prompt's KV cells.
        best_of: generate this many continuations, and return the n continuations with the highest mean logprob per
            token; None: n.
        max_tokens: maximum number of tokens to generate, including the end-of-generation token; None: until the model
            stops or the request has used its n_ctx.
        min_tokens: no end-of-generation token, stop token or stop string ends the text before this many tokens.
        temperature: 0 is greedy: the likeliest token, or the lowest id of equally likely tokens. [0.8]
        top_k: keep the k likeliest tokens; 0 or -1: all. [40]
        top_p: keep the fewest tokens whose probabilities sum to at least top_p; 1: all. [0.95]
        min_p: keep tokens at least min_p times as probable as the likeliest; 0: all. [0.05]
        typical_p: locally typical sampling: keep the tokens whose surprise is nearest to the entropy, until their
            probabilities sum to typical_p; 1: all.
        top_n_sigma: keep logits within this many standard deviations of the largest; 0 or below: all.
        xtc_probability, xtc_threshold: "exclude top choices": with this probability, drop all tokens above the
            threshold except the least likely of them. A threshold above 0.5 has no effect. [0, 0.1]
        dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers: "don't repeat
            yourself": a token that would extend a repeated run of at least dry_allowed_length tokens loses multiplier *
            base ** (length of the run - dry_allowed_length). dry_penalty_last_n is the number of last tokens that are
            searched; -1: all. DRY is off if the multiplier or dry_penalty_last_n is 0.
        mirostat, mirostat_tau, mirostat_eta: mirostat 1 or 2 replaces the cuts above. Mirostat keeps the surprise near
            tau bits, with the learning rate eta. 0: off. [0, 5, 0.1]
        dynatemp_range, dynatemp_exponent: the temperature varies from temperature - range to temperature + range with
            the entropy; 0: off.
        samplers: the samplers of the chain, in this order: a list of at most 64 of llama.cpp's names ("penalties",
            "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature", "infill"), or a text of
            their letters ("edskypmxti"). A sampler that is not listed does nothing. A repeated name applies again.
            "infill" is for code in a gap: it ends the text early, and merges two tokens if the text of one begins with
            the text of the other. None: all but infill, in llama.cpp's order. Mirostat ignores the order.
        seed: 0 .. 2**64-1. The draw of output token i depends on (seed, i) alone: other requests, retries and
            preemption never change it. Continuation k draws with seed + k. None: a fresh random seed for each request.
        stop: strings that end the text; the text is cut before the first stop string.
        stop_token_ids: tokens that end the text like an end-of-generation token.
        include_stop_str_in_output: the text keeps the stop string, or the text of the stop token.
        ignore_eos: continue after an end-of-generation token, as after any other token.
        bad_words: strings to exclude. Each string is tokenized twice, with and without a space before it. These two
            token sequences never come in the text.
        repetition_penalty: positive logits of tokens in prompt or output are divided by this number, and negative
            logits are multiplied by it; 0.01 .. 100, 1: none. [1]
        presence_penalty: subtracted from the logit of each token that is in the output; -2 .. 2.
        frequency_penalty: subtracted from the logit of a token for each time that the token is in the output; -2 .. 2.
        repeat_last_n: the penalties count this many last tokens of prompt and output; -1: all, 0: none. [-1]
        prompt_ignore_length: the penalties skip this many tokens at the start of the prompt; None: no token is skipped.
        logit_bias: {token id: number to add to its logit, -100 .. 100}, at most 1024 ids. Ids may be texts, as in JSON.
            Kept as a tuple of pairs.
        allowed_token_ids: only these tokens may be sampled; None: all.
        logprobs: return the logprobs of each output token and of this many likeliest tokens in its place; 0 .. 1024,
            -1: the whole vocabulary, None: no logprobs. At most 4,194,304 logprobs a request.
        prompt_logprobs: the same as `logprobs`, but for the tokens of the prompt.
        logprob_token_ids: also return the logprobs of these tokens in the place of each output token. With
            logprobs=None, only the logprobs of these tokens and of the output token are returned.
        skip_special_tokens: leave the names of special tokens out of the text.
        structured_outputs: one of {"json": a schema (mapping, text or pydantic model class)}, {"regex": …}, {"choice":
            [strings]}, {"grammar": in Lark's or llama.cpp's notation}, {"json_object": True}, {"structural_tag": free
            text around structured parts, as in vLLM}; or OpenAI's response_format. A text with finish_reason "stop" has
            this structure, unless one of your stop strings (stop_reason) cut it. If the answer of a chat begins with
            thinking, the structure applies to the text after the thinking; with the further key
            "enable_in_reasoning": True it applies from the first token on. Kept as a Structure. Not with
            stop_token_ids, min_tokens or ignore_eos, because the structure decides which token may end the text.
        logits_processors: called as f(output token ids, logits) before each token, ahead of all samplers. logits is a
            copy of the row, numpy float32 of shape (vocabulary,); the logits that f returns are sampled. An exception
            in f ends the request with an error. Not available if the engine is in a child process.
        priority: a waiting request with a lower number enters first, as in vLLM.
        background: the request uses only batch rows that are not needed by other requests.
        deadline_s: the request ends with an error this many seconds after its arrival; None: never.
        overflow: the action when a request outgrows n_ctx. "refuse": the prompt is refused, or the output ends;
            "truncate": a prompt above n_ctx loses its beginning, and a conversation its oldest turns; "shift": the
            oldest tokens are dropped, and the output continues.
        n_keep: number of first prompt tokens that stay when `overflow` drops tokens, at most half of n_ctx; -1: the
            whole prompt; None: 0. A BOS always stays.
        truncate_prompt_tokens: keep this many last tokens of the prompt, including a BOS; -1: the same as
            overflow="truncate"; None: all.
        thinking_token_budget: number of thinking tokens after which the engine ends the thinking, with the text of the
            model's family; 0: the engine ends the thinking as soon as it begins; None: the model decides. For models of
            a known family (LLM.plan.reasoning), or with reasoning_tags.
        skip_reading_prefix_cache: compute the whole prompt, even if other requests have computed its start. The
            continuations of one request still share the prompt's cells.
        cache_salt: only requests with the same salt share cells of prompts. So the time to first token reveals nothing
            about other tenants' prompts. 1 to 256 characters; None: cells are shared among requests without a salt.
        post_sampling_probs: False: logprobs of output tokens come from the model's own distribution. True: they come
            from the final distribution, after logit_bias, penalties, masks, temperature and all samplers. Then tokens
            that cannot be drawn are not among the likeliest. Such a token has the logprob -9999 if logprob_token_ids
            names it, or if the engine writes it to end the thinking. With True, the request gets no speculative tokens.
    """

    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Strings = ("\n", ":", '"', "*")
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    samplers: Strings = None
    seed: int | None = None
    stop: Strings = ()
    stop_token_ids: TokenIds = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: Strings = ()
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int | None = None
    prompt_ignore_length: int | None = None
    logit_bias: LogitBias = ()
    allowed_token_ids: TokenIds = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: TokenIds = None
    skip_special_tokens: bool = True
    structured_outputs: Mapping[str, Any] | Structure | None = None
    logits_processors: tuple[LogitsProcessor, ...] | list[LogitsProcessor] | None = ()
    priority: int = 0
    background: bool = False
    deadline_s: float | None = None
    overflow: str = "refuse"
    n_keep: int | None = None
    truncate_prompt_tokens: int | None = None
    thinking_token_budget: int | None = None
    skip_reading_prefix_cache: bool = False
    cache_salt: str | None = None
    post_sampling_probs: bool = False

    def __post_init__(self) -> None:
        # defaults need no check; for a request with few fields, a check would take longer than all other work
        given = {name: value for name, value in vars(self).items() if value is not _DEFAULTS.get(name, _UNKNOWN)}
        for name, (least, most) in NUMBERS.items():
            if name in given and (given[name] is not None or name not in OPEN):
                self._keep(name, number(SamplingError, name, given[name], least, most, _or_none(name)))
        for name, (low, high) in (*INTEGERS.items(), *OPTIONAL_INTEGERS.items()):
            if name in given and (given[name] is not None or not _or_none(name)):
                self._keep(name, integer(SamplingError, name, given[name], low, high, _or_none(name)))
        for name in BOOLEANS:
            if name in given:
                self._keep(name, boolean(SamplingError, name, given[name]))
        if self.deadline_s is not None:
            self._keep("deadline_s", number(SamplingError, "deadline_s", self.deadline_s, 0.0, 1e9, ", or None"))
        # a value that may have several types becomes a tuple, which can be compared and hashed
        for name, check in _CHECKS.items():
            if name in given:
                self._keep(name, check(given[name]))
        self._check_together()

    def __repr__(self) -> str:
        return brief(self)

    def _keep(self, name: str, value: object) -> None:
        if value is not getattr(self, name):
            object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            if self.truncate_prompt_tokens == 0:
                raise SamplingError("truncate_prompt_tokens is 0; give 1 or more, -1, or None")
            if self.overflow == "shift":
                raise SamplingError(
                    f"truncate_prompt_tokens is {self.truncate_prompt_tokens}, which is overflow='truncate'; "
                    "overflow='shift' was given"
                )
            self._keep("truncate_prompt_tokens", None)
            self._keep("overflow", "truncate")
        if self.best_of is not None and self.best_of < self.n:
            raise SamplingError(f"best_of is {self.best_of}; it must be at least n, {self.n}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingError(f"min_tokens is {self.min_tokens}; it must not exceed max_tokens, {self.max_tokens}")
        if self.structured_outputs is not None:
            if self.thinking_token_budget is not None and self.structure is not None and self.structure.in_reasoning:
                raise SamplingError(
                    f"thinking_token_budget is {self.thinking_token_budget} beside {IN_REASONING}: the structure says "
                    "what the thinking may be; leave one of them out"
                )
            for name in ("stop_token_ids", "min_tokens", "ignore_eos"):
                if getattr(self, name):
                    raise SamplingError(
                        f"{name} is {show(getattr(self, name))} beside structured_outputs, which say what token may "
                        f"end the text; leave {name} out"
                    )

    @classmethod
    def from_options(cls, **options: object) -> SamplingParams:
        """Returns SamplingParams(**options). Type checkers accept any name here, not only field names."""
        return cls(**options)  # type: ignore[arg-type]  # checked by __post_init__

    @property
    def n_copies(self) -> int:
        """The number of continuations to generate."""
        return self.n if self.best_of is None else self.best_of

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always chosen."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """True if the logit of a token depends on the tokens before it."""
        if self.repeat_last_n == 0:
            return False
        return self.repetition_penalty not in (None, 1) or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def dry(self) -> bool:
        """True if repeated runs of tokens are penalised."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def breakers(self) -> tuple[str, ...]:
        """dry_sequence_breakers, always a tuple."""
        assert isinstance(self.dry_sequence_breakers, tuple)
        return self.dry_sequence_breakers

    @property
    def chain(self) -> tuple[str, ...] | None:
        """samplers, as a tuple or None."""
        assert self.samplers is None or isinstance(self.samplers, tuple)
        return self.samplers

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """logit_bias as pairs of token id and bias, in rising order of ids."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def allowed_ids(self) -> tuple[int, ...] | None:
        """allowed_token_ids, in rising order."""
        assert self.allowed_token_ids is None or isinstance(self.allowed_token_ids, tuple)
        return self.allowed_token_ids

    @property
    def logprob_ids(self) -> tuple[int, ...]:
        """logprob_token_ids, in rising order; () for None."""
        assert self.logprob_token_ids is None or isinstance(self.logprob_token_ids, tuple)
        return self.logprob_token_ids or ()

    @property
    def wants_logprobs(self) -> bool:
        """True if output tokens come with logprobs."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """stop_token_ids, in rising order."""
        assert isinstance(self.stop_token_ids, tuple)
        return self.stop_token_ids

    @property
    def forbidden_strings(self) -> tuple[str, ...]:
        """bad_words, always a tuple."""
        assert isinstance(self.bad_words, tuple)
        return self.bad_words

    @property
    def processors(self) -> tuple[LogitsProcessor, ...]:
        """logits_processors, always a tuple."""
        assert isinstance(self.logits_processors, tuple)
        return self.logits_processors

    @property
    def structure(self) -> Structure | None:
        """structured_outputs as a Structure or None."""
        assert self.structured_outputs is None or isinstance(self.structured_outputs, Structure)
        return self.structured_outputs

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """stop, always a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop


def _or_none(name: str) -> str:
    """Returns the end of an error message for a field that may also be None; "" if None is not allowed."""
    if name == "max_tokens":
        return ", or None: until the model stops or n_ctx is used up"
    return ", or None" if name in OPEN or name in OPTIONAL_INTEGERS else ""


def named(options: Mapping[str, object], others: Iterable[str] = ()) -> dict[str, object]:
    """Renames a caller's options to the names of SamplingParams' fields. Arguments and errors are as in renamed()."""
    return renamed(options, _FIELDS, others)


def strings(name: str, given: object, most: int, *, to_tokens: bool = False) -> tuple[str, ...]:
    """Returns one string or several as a tuple. Raises SamplingError unless each has 1 to MAX_CHARS characters.

    Args:
        most: maximum number of strings.
        to_tokens: True: the strings are tokenized later, so half a surrogate pair is also refused.
    """
    if given is None:
        return ()
    values = [given] if isinstance(given, str) else items(given, most + 1)
    texts = None if values is None else [text for text in map(string, values) if text is not None]
    if values is None or texts is None or len(texts) < len(values):
        raise SamplingError(f"{name} is {show(given)}; give a string or a list of strings")
    if len(texts) > most:
        raise SamplingError(f"{name} holds more than {most} strings; at most {most} are allowed")
    for text in texts:
        if not 1 <= len(text) <= MAX_CHARS:
            raise SamplingError(f"{name} has a string of {len(text)} characters; allowed are 1 to {MAX_CHARS}")
        if to_tokens and any("\ud800" <= character <= "\udfff" for character in text):
            raise SamplingError(f"{name} has {show(text)}, which holds a lone surrogate; give whole characters")
    return tuple(texts)


def _samplers(given: object) -> tuple[str, ...] | None:
    if given is None:
        return None
    letters = string(given)
    found, unknown = known_samplers(strings("samplers", given if letters is None else list(letters), MAX_SAMPLERS))
    if unknown:
        known = f"known are {', '.join(KNOWN)}; a text holds their letters, {LETTERS}"
        raise SamplingError(f"samplers has {show(unknown[0])}; {known}")
    return tuple(found)


def biases(given: object) -> tuple[tuple[int, float], ...]:
    """Returns logit_bias as pairs of token id and bias, in rising order of ids. Raises SamplingError."""
    if given is None:
        return ()
    biased = pairs(given, MAX_BIASES + 1)
    if biased is None:
        raise SamplingError(f"logit_bias is {show(given)}; give a mapping from token id to bias")
    if len(biased) > MAX_BIASES:
        raise SamplingError(f"logit_bias holds more than {MAX_BIASES} ids; at most {MAX_BIASES} are allowed")
    found: dict[int, float] = {}
    for key, bias in biased:
        key = int(key) if isinstance(key, str) and _WHOLE.fullmatch(key) else key  # keys of JSON are strings
        token_id = integer(SamplingError, "a token id of logit_bias", key, 0, MAX_TOKEN_ID)
        if token_id in found:
            raise SamplingError(f"logit_bias names token id {token_id} twice; give each once")
        found[token_id] = float(number(SamplingError, f"logit_bias of token {token_id}", bias, -100.0, 100.0))
    return tuple(sorted(found.items()))


def token_ids(name: str, given: object, least: int = 0) -> tuple[int, ...] | None:
    """Returns token ids in rising order, each once; None for None. Raises SamplingError."""
    if given is None:
        return None
    ids = items(given, MAX_TOKEN_ID + 2)
    if ids is None:
        raise SamplingError(f"{name} is {show(given)}; give a list of token ids")
    if not least <= len(ids) <= MAX_TOKEN_ID + 1:
        raise SamplingError(f"{name} holds {len(ids)} ids; give {least} to {MAX_TOKEN_ID + 1}, or None")
    found = {integer(SamplingError, f"an id of {name}", token_id, 0, MAX_TOKEN_ID) for token_id in ids}
    return tuple(sorted(found))


def processors(given: object) -> tuple[Callable[[list[int], Any], Any], ...]:
    """Returns the logits processors as a tuple. Raises SamplingError."""
    if given is None:
        return ()
    functions = items(given, MAX_PROCESSORS + 1)
    if functions is None or not all(map(callable, functions)):
        raise SamplingError(f"logits_processors is {show(given)}; give a list of functions")
    if len(functions) > MAX_PROCESSORS:
        raise SamplingError(
            f"logits_processors holds more than {MAX_PROCESSORS} functions; at most that many are allowed"
        )
    return tuple(functions)


def _salt(given: object) -> str | None:
    text = string(given)
    if given is not None and (text is None or not 1 <= len(text) <= MAX_CHARS):
        raise SamplingError(f"cache_salt is {show(given)}; give a text of 1 to {MAX_CHARS} characters, or None")
    return text


_FIELDS = tuple(field.name for field in fields(SamplingParams))
PARAMETERS = frozenset((*_FIELDS, *ALIASES))  # names that named() accepts

# the dataclass makes __init__, so only a later line can decorate it; type checkers still see the fields
setattr(SamplingParams, "__init__", takes_names(named, ALIASES)(SamplingParams.__init__))  # noqa: B010


# Functions that check the fields that are neither numbers nor booleans, in order. Each function returns the value to
# keep.
_CHECKS: dict[str, Callable[[Any], object]] = {
    "cache_salt": _salt,
    "samplers": _samplers,
    "overflow": lambda value: choice(SamplingError, "overflow", value, OVERFLOWS),
    "stop": lambda value: strings("stop", value, MAX_STOPS),
    "bad_words": lambda value: strings("bad_words", value, MAX_BAD_WORDS, to_tokens=True),
    "dry_sequence_breakers": lambda value: strings("dry_sequence_breakers", value, MAX_STOPS, to_tokens=True),
    "stop_token_ids": lambda value: token_ids("stop_token_ids", value) or (),
    "logit_bias": biases,
    "allowed_token_ids": lambda value: token_ids("allowed_token_ids", value, least=1),
    "logprob_token_ids": lambda value: token_ids("logprob_token_ids", value, least=1),
    "structured_outputs": structure,
    "logits_processors": processors,
}
_UNKNOWN = object()
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
