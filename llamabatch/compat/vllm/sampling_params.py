"""vLLM's SamplingParams and structured-output classes, with vLLM's names, defaults and meanings."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from llamabatch.errors import SamplingError, UnknownParameterError
from llamabatch.request.sampling_params import SamplingParams as EngineParams
from llamabatch.request.sampling_params import named
from llamabatch.request.structured_outputs import IN_REASONING, LENIENT, Structure, structure
from llamabatch.utils.absent import absent_from
from llamabatch.utils.aliases import takes_names
from llamabatch.utils.checks import integer, show

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_NO_BEAMS = "there is no beam search; llamabatch.SamplingParams(best_of=…) ranks several continuations"


class RequestOutputKind(Enum):
    """The kind of outputs that LLMEngine.step returns for a request. LLM.generate always returns whole outputs."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class StructuredOutputsParams:
    """The structure of an output. Exactly one of json, regex, choice, grammar, structural_tag and json_object is given.

    Attributes:
        json: a JSON schema, or its text.
        regex, choice, grammar, structural_tag: as in structured_outputs of llamabatch.SamplingParams.
        json_object: True allows any JSON object.
        disable_additional_properties: changes nothing. Other properties than those in the schema are never allowed,
            unless the schema has additionalProperties.
        disable_any_whitespace, whitespace_pattern: refused, because llguidance decides on the white space of JSON.
        lenient: an option of llamabatch alone. True ignores keywords of `json` if a grammar cannot enforce them.

    Raises:
        SamplingError (ValueError): no structure or more than one is given, or the structure is invalid.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    lenient: bool = False

    _least = 1

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if not self._least <= len(given) <= 1:
            raise SamplingError(
                f"{type(self).__name__} has {', '.join(given) or 'none'}; give one of {', '.join(KINDS)}"
            )
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            if getattr(self, name):
                raise SamplingError(
                    f"{name} is {show(getattr(self, name))}, which is not supported: llguidance "
                    "decides on the white space of JSON"
                )
        self.form()

    def form(self) -> Structure | None:
        """Returns the structure as llamabatch.SamplingParams stores it; None: none is given. Raises SamplingError."""
        given = {name: getattr(self, name) for name in KINDS if getattr(self, name) not in (None, False)}
        return structure({**given, LENIENT: self.lenient}) if given else None


@dataclass
class GuidedDecodingParams(StructuredOutputsParams):
    """The former name of StructuredOutputsParams. It may also have no structure at all.

    Attributes:
        backend: changes nothing; llguidance is the only backend.
        disable_fallback: changes nothing.
    """

    backend: str | None = None
    disable_fallback: bool = False

    _least = 0

    @staticmethod
    def from_optional(**options: Any) -> GuidedDecodingParams | None:
        """Makes a GuidedDecodingParams from options that may be None. Returns None if no structure is given."""
        given = {name: value for name, value in options.items() if value is not None}
        return GuidedDecodingParams(**given) if any(given.get(name) for name in KINDS) else None


# Keys: fields without effect in LLM.generate and LLM.chat. Values: the reasons.
WITHOUT_EFFECT = {
    "output_kind": "LLM.generate and LLM.chat give whole outputs, as vLLM's do; LLMEngine obeys it",
    "stream_interval": "LLM.generate and LLM.chat give whole outputs",
    "skip_clone": "it is vLLM's own",
    "spaces_between_special_tokens": "special tokens are written as the vocabulary has them",
    "routed_experts_prompt_start": "outputs do not name experts",
}
# Only the defaults of these fields are accepted, because other values would change an answer.
REFUSED = {
    "flat_logprobs": "logprobs are a dictionary for each token",
    "extra_args": "plugins are not supported; give logits_processors",
    "prompt_logprob_token_ids": "give prompt_logprobs, or llm.llm.score",
    "prompt_logprob_start": "give prompt_logprobs, or llm.llm.score",
    "repetition_detection": "give repetition_penalty, or DRY by llamabatch.SamplingParams",
    "trace_decode_token_ids": "llm.llm.score gives the logprobs of given tokens",
}
# Keys: refused fields of earlier vLLM versions. Values: the reasons.
FORMER = {"use_beam_search": _NO_BEAMS, "length_penalty": _NO_BEAMS, "early_stopping": _NO_BEAMS}
_FORMER_DEFAULTS = {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}
_PASSED = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
    *("logprob_token_ids", "skip_special_tokens", "include_stop_str_in_output", "logit_bias", "allowed_token_ids"),
    *("bad_words", "best_of", "logits_processors"),
)


def _known(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a caller's keywords by vLLM's current names. Raises UnknownParameterError, SamplingError."""
    found = dict(options)
    if found.pop("guided_decoding", None) is not None:
        if found.get("structured_outputs") is not None:
            raise SamplingError("structured_outputs is given twice, once as 'guided_decoding'; give it once")
        found["structured_outputs"] = options["guided_decoding"]
    for name in list(found):
        if name in FORMER:
            if found.pop(name) not in (_FORMER_DEFAULTS[name], None):
                raise UnknownParameterError(f"{name} is {show(options[name])}, which is not supported: {FORMER[name]}")
        elif name not in _FIELDS:
            named({name: found[name]}, others=_FIELDS)  # raises if llamabatch does not know the name
            raise UnknownParameterError(
                f"vLLM's SamplingParams has no field {show(name)}; llamabatch.SamplingParams has"
            )
    return found


@dataclass
class SamplingParams:
    """The sampling parameters of a request, with vLLM's defaults: 16 tokens, temperature 1, no top_k, top_p or min_p.

    Fields have vLLM's meaning (docs/vllm_names.md) and can be changed later. Here top_k, top_p and min_p apply before
    the temperature. In vLLM they apply after it.

    Raises:
        SamplingError (ValueError): a value is out of range, or is not supported and would change an answer.
        UnknownParameterError (TypeError): there is no field of this name.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: list[int] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None
    # Fields of earlier vLLM versions.
    best_of: int | None = None
    logits_processors: list[Callable[..., Any]] | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        self.to_engine()

    @classmethod
    def from_optional(cls, **options: Any) -> SamplingParams:
        """Makes SamplingParams from options that may be None. None means the default; but max_tokens=None means that
        only n_ctx limits the output."""
        none_has_a_meaning = ("max_tokens",)
        return cls(**{key: v for key, v in options.items() if v is not None or key in none_has_a_meaning})

    def clone(self) -> SamplingParams:
        """Returns a copy that shares the logits_processors."""
        shared = {id(each): each for each in self.logits_processors or ()}
        return copy.deepcopy(self, shared)

    def to_engine(self, *, priority: int = 0, in_reasoning: bool = True, post_sampling: bool = False) -> EngineParams:
        """Returns the parameters as llamabatch.SamplingParams.

        Args:
            priority: the request's priority; lower numbers run first.
            in_reasoning: True if a structured output applies from the first token on.
            post_sampling: True if logprobs include the effect of all sampling settings; else they are the model's own.

        Raises:
            SamplingError: a value is out of range, or is refused.
        """
        for name, why in REFUSED.items():
            if getattr(self, name) != _DEFAULTS[name]:
                value = show(getattr(self, name))
                raise SamplingError(f"{name} is {value}, which is not supported: {why}; leave it out")
        if self.truncate_prompt_tokens is not None:
            integer(SamplingError, "truncate_prompt_tokens", self.truncate_prompt_tokens, -1, 2**31 - 1, ", or None")
        for process in self.logits_processors or ():
            _check_processor(process)
        given = {name: getattr(self, name) for name in _PASSED}
        given |= {"seed": self.seed, "thinking_token_budget": self.thinking_token_budget}
        given |= {"skip_reading_prefix_cache": bool(self.skip_reading_prefix_cache)}
        form = self._form()
        if form is not None:
            given["structured_outputs"] = form._replace(in_reasoning=in_reasoning)
        return EngineParams.from_options(**given, priority=priority, post_sampling_probs=post_sampling)

    def _form(self) -> Structure | None:
        given = self.structured_outputs
        if isinstance(given, StructuredOutputsParams):
            return given.form()
        if isinstance(given, Mapping):
            return StructuredOutputsParams(**{key: v for key, v in given.items() if key != IN_REASONING}).form()
        if given is not None:
            raise SamplingError(f"structured_outputs is {show(given)}; give StructuredOutputsParams(json=…)")
        return None


def _check_processor(process: Callable[..., Any]) -> None:
    """Raises SamplingError for a processor that expects the prompt, too. Here processors get only the output and the
    logits."""
    try:
        wanted = [p for p in inspect.signature(process).parameters.values() if p.default is p.empty]
    except (TypeError, ValueError):
        return
    if len([p for p in wanted if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]) > 2:
        raise SamplingError(f"logits_processors has {show(process)}, which takes more than (token ids, logits)")


_FIELDS = tuple(each.name for each in fields(SamplingParams))
_DEFAULTS = {each.name: each.default for each in fields(SamplingParams)}
setattr(SamplingParams, "__init__", takes_names(_known)(SamplingParams.__init__))  # noqa: B010

ABSENT = {
    "BeamSearchParams": _NO_BEAMS,
    "RepetitionDetectionParams": REFUSED["repetition_detection"],
    "SamplingType": "SamplingParams.temperature of 0 is greedy",
}


def __getattr__(name: str) -> Any:
    raise absent_from(__name__, name, ABSENT)
