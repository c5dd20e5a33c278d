"""Names of parameters in other libraries, each with our field for it, or with advice if we have no such field."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from llamabatch.errors import SamplingError, UnknownParameterError
from llamabatch.utils.checks import nearest, show

# Names of other libraries for our fields: llama.cpp's and llama_cpp.Llama's, Hugging Face's generate, OpenAI's.
ALIASES = {
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "temp": "temperature",
    "typical": "typical_p",
    "typ_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "penalty_repeat": "repetition_penalty",
    "penalty_present": "presence_penalty",
    "penalty_freq": "frequency_penalty",
    "mirostat_mode": "mirostat",
    "mirostat_ent": "mirostat_tau",
    "mirostat_lr": "mirostat_eta",
    "penalty_last_n": "repeat_last_n",
    "top_nsigma": "top_n_sigma",
    "dynatemp_exp": "dynatemp_exponent",
    "dry_sequence_breaker": "dry_sequence_breakers",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "thinking_budget": "thinking_token_budget",
    "top_logprobs": "logprobs",
    "n_probs": "logprobs",
    "logits_processor": "logits_processors",
    "response_format": "structured_outputs",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "guided_choice": "structured_outputs",
    "guided_grammar": "structured_outputs",
}

# Alias for one form of structured_outputs -> the key of this form.
_FORMS = {f"guided_{form}": form for form in ("json", "regex", "choice", "grammar")}

# Parameters of other libraries for which SamplingParams has no field. A value is accepted if it means our usual
# behaviour.
AS_HERE: dict[str, tuple[tuple[object, ...], str]] = {
    "tfs_z": ((1, None), "llama.cpp has no tail free sampling any more; leave it out, or give top_p or typical_p"),
    "use_beam_search": ((False, None), "there is no beam search; give best_of"),
    "num_beams": ((1, None), "there is no beam search; give best_of"),
    "length_penalty": ((1, None), "it belongs to beam search, which is not supported; leave it out"),
    "flat_logprobs": ((False, None), "logprobs are TokenLogprobs, one a token"),
    "output_kind": ((None,), "call stream(...) for pieces, generate(...) for whole outputs"),
    "extra_args": ((None,), "there are no parameters but those of SamplingParams"),
    "detokenize": ((True, None), "outputs always have their text; leave it out"),
    "spaces_between_special_tokens": ((True, None), "special tokens are written as the vocabulary has them"),
    "do_sample": ((True, None), "give temperature=0 for the likeliest token"),
    "early_stopping": ((False, None), "there is no beam search; leave it out"),
    "suffix": ((None, ""), "there is no infill; put it into the prompt"),
    "eos_token_id": ((None,), "give stop_token_ids=[…]"),
    "stopping_criteria": ((None,), "give stop or stop_token_ids, or leave the loop of stream(...)"),
    "echo": ((False, None), "output.prompt is the prompt; its logprobs come with prompt_logprobs"),
}

# Parameters of other libraries. With us, they are arguments of methods, not of SamplingParams.
_ELSEWHERE = {
    "stream": "stream is no parameter; call stream(...) in place of generate(...) or chat(...)",
    **dict.fromkeys(("tools", "chat_template_kwargs"), "{0} is no parameter; give chat(..., {0}=…)"),
    **dict.fromkeys(("adapters", "errors"), "{0} is no parameter; give generate(..., {0}=…) or chat(..., {0}=…)"),
    **dict.fromkeys(("prompt", "messages"), "{0} is no parameter; it goes first: generate(prompt, params) or chat(…)"),
    **dict.fromkeys(("grammar", "regex", "choice"), "{0} is no parameter; give structured_outputs={{'{0}': …}}"),
    "json_schema": "json_schema is no parameter; give structured_outputs={{'json': …}}",
}

MISPLACED = frozenset((*AS_HERE, *_ELSEWHERE))  # names that are refused, each with its own advice


def renamed(options: Mapping[str, object], fields: Collection[str], others: Iterable[str] = ()) -> dict[str, object]:
    """Renames a caller's options to the names of SamplingParams' own fields.

    Args:
        options: names of fields or ALIASES, with values. The values are not checked.
        fields: the names of the fields.
        others: further names that the caller accepts, for the message about an unknown name.

    Raises:
        UnknownParameterError: a name is unknown.
        SamplingError: two names mean one field.
    """
    values: dict[str, object] = {}
    for given, value in _with_one_logprobs(options).items():
        name = ALIASES.get(given, given)
        if given in _FORMS:
            if value is None:
                continue
            value = {_FORMS[given]: value}
        if name not in fields:
            if given in AS_HERE and not others:
                meant, advice = AS_HERE[given]
                if any(value is one or (value == one and type(value) in (int, float, str)) for one in meant):
                    continue
                raise UnknownParameterError(f"{given} is {show(value)}, which has no meaning here: {advice}")
            if given in _ELSEWHERE and not others:
                raise UnknownParameterError(_ELSEWHERE[given].format(given))
            known = [*fields, *ALIASES, *others]
            where = "SamplingParams has no field" if not others else "there is no field"
            raise UnknownParameterError(f"{where} {show(given)}{nearest(given, known)}")
        if name in values:
            raise SamplingError(f"{name} is given twice, once as {given!r}; give it once")
        values[name] = value
    return values


def _with_one_logprobs(options: Mapping[str, object]) -> Mapping[str, object]:
    """Replaces OpenAI's logprobs (true or false) and top_logprobs (a number) by our logprobs (a number)."""
    wanted = options.get("logprobs", 0)
    if not (wanted is None or isinstance(wanted, bool)):
        return options
    count = options.get("top_logprobs")
    if wanted is False and count:
        raise SamplingError(f"top_logprobs is {show(count)}, but logprobs is False; give True, or no top_logprobs")
    rest = {name: value for name, value in options.items() if name not in ("logprobs", "top_logprobs")}
    return {**rest, "logprobs": None if wanted is False else 0 if wanted and count is None else count}
