"""GENERATION: the fields of all bodies for generating text, with their JSON schemas."""

from __future__ import annotations

import dataclasses

from llamabatch.request.parameter_names import ALIASES, AS_HERE
from llamabatch.request.sampling_params import (
    BOOLEANS,
    INTEGERS,
    MAX_CHARS,
    NUMBERS,
    OPTIONAL_INTEGERS,
    SamplingParams,
)
from llamabatch.server.request import optional
from llamabatch.server.request.body import BOOLEAN, OBJECT, TEXT, Field, Fields, Json

TIERS = ("auto", "default", "flex", "priority")


def _numbers(low: float, high: float) -> Json:
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


def _whole(low: int, high: int) -> Json:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


_TEXTS: Json = {"anyOf": [TEXT, {"type": "array", "items": {"type": "string"}}]}
_IDS: Json = {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}}
_ANY: Json = {}

_OTHER_SCHEMAS: dict[str, Json] = {
    "max_tokens": _whole(-1, 2**31 - 1),
    "seed": _whole(-(2**63), 2**64 - 1),
    "deadline_s": _numbers(0.0, 1e9),
    "overflow": {"enum": ["refuse", "truncate", "shift", None]},
    "stop": _TEXTS,
    "bad_words": _TEXTS,
    "dry_sequence_breakers": _TEXTS,
    "samplers": _TEXTS,
    "stop_token_ids": _IDS,
    "allowed_token_ids": _IDS,
    "logprob_token_ids": _IDS,
    "logit_bias": {
        "anyOf": [
            {"type": ["object", "null"], "additionalProperties": {}},
            {"type": "array", "items": {"type": "array"}},
        ]
    },
    "structured_outputs": OBJECT,
    "truncate_prompt_tokens": _whole(-1, 2**31 - 1),
    "cache_salt": {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_CHARS},
}
_DOCS = {
    "max_tokens": "tokens to generate at most; -1: until the model stops or the request has used its context",
    "seed": "the same seed gives the same text; -1: a random one",
    "stop": "strings that end the text",
    "logit_bias": "token id (or text) -> number to add to its logit, false: never; or a list of such pairs",
    "structured_outputs": "the structure of the text: one of json, regex, choice, grammar, json_object, structural_tag",
    "deadline_s": "seconds after which the request ends as an error; the header X-Request-Timeout says the same",
    "priority": "a waiting request with a lower number enters first",
    "post_sampling_probs": "logprobs are those of the distribution that a token is drawn from, and not the model's own",
    "samplers": "names of the samplers in force, in their order, or their letters in one text; all others are off",
    "n_keep": "tokens at the beginning that stay where overflow takes tokens away; -1: the whole prompt",
    "truncate_prompt_tokens": "keep so many last tokens of the prompt; -1: as many as fit",
    "repeat_last_n": "the penalties see so many last tokens of prompt and output; -1: all",
    "cache_salt": "prefixes are shared with requests of the same salt alone",
    "background": "run only beside other requests, as service_tier flex does",
}


def _schema(name: str) -> Json:
    if name in _OTHER_SCHEMAS:
        return _OTHER_SCHEMAS[name]
    if name in NUMBERS:
        return _numbers(*NUMBERS[name])
    if name in BOOLEANS:
        return BOOLEAN
    return _whole(*(INTEGERS.get(name) or OPTIONAL_INTEGERS[name]))


def _parameters() -> dict[str, Field]:
    own = [each.name for each in dataclasses.fields(SamplingParams) if each.name != "logits_processors"]
    fields = {name: Field(_schema(name), _DOCS.get(name, "")) for name in own}
    for given, name in ALIASES.items():
        if name in fields and name != "structured_outputs":
            fields[given] = Field(_schema(name), f"the same as {name}")
    return fields


# The fields of a body for generating text. AS_HERE has parameters of other libraries; `named` checks their values.
GENERATION: Fields = {
    **optional.GENERATION,
    **_parameters(),
    **{name: Field(_ANY, advice) for name, (_, advice) in AS_HERE.items()},
    "n_cmpl": Field(_whole(*INTEGERS["n"]), "the same as n"),
    "reasoning_budget_tokens": Field(_whole(-1, 2**31 - 1), "the same as thinking_token_budget; -1: none"),
    "thinking_budget_tokens": Field(_whole(-1, 2**31 - 1), "the same as thinking_token_budget; -1: none"),
    "response_format": Field(OBJECT, "text, json_object, json_schema or structural_tag"),
    "guided_json": Field(_ANY, "a JSON schema that the text holds"),
    "guided_regex": Field(TEXT, "a regular expression that the text matches"),
    "guided_choice": Field({"type": ["array", "null"], "items": {"type": "string"}}, "the text is one of these"),
    "guided_grammar": Field(TEXT, "a grammar in Lark's or llama.cpp's notation"),
    "grammar": Field(TEXT, "the same as guided_grammar"),
    "json_schema": Field(_ANY, "the same as guided_json"),
    "structural_tag": Field(_ANY, "free text with such parts, as in vLLM"),
    "model": Field(TEXT, "a name of /v1/models"),
    "lora": Field(
        {
            "type": ["array", "null"],
            "items": {
                "type": "object",
                "properties": {"id": {"type": "integer", "minimum": 0}, "scale": {"type": "number"}},
            },
        },
        "ids of /lora-adapters and their scales",
    ),
    "adapters": Field(_ANY, "names of adapters and their scales"),
    "stream": Field(BOOLEAN, "send pieces as they come"),
    "stream_options": Field(
        {
            "type": ["object", "null"],
            "properties": {"include_usage": BOOLEAN, "continuous_usage_stats": BOOLEAN},
        },
        "include_usage: a last piece with the counts of tokens; continuous_usage_stats: in each piece",
    ),
    "service_tier": Field(
        {"enum": [*TIERS, None]}, "flex: run only in rows that other requests leave free; priority: start before others"
    ),
    "request_id": Field(TEXT, "the id of the answer"),
    "return_token_ids": Field(BOOLEAN, "token_ids in each choice, prompt_token_ids in the answer"),
    "return_tokens": Field(BOOLEAN, "the same as return_token_ids"),
    "return_tokens_as_token_ids": Field(BOOLEAN, "names tokens of logprobs as token_id:17"),
    "timings_per_token": Field(BOOLEAN, "llama-server's timings in the answer, or behind the last piece of a stream"),
    "return_progress": Field(BOOLEAN, "stream events with the progress of the prompt"),
    "id_slot": Field(_whole(-1, 2**31 - 1), "the number by which /slots/N?action=save finds this text; -1: none"),
    "sse_ping_interval": Field(_whole(-1, 2**31 - 1), "seconds of silence before a comment; -1: none"),
    # Other services store these fields for their own use. A model has no use for these fields.
    **{
        name: Field(_ANY, "kept by other services; without effect here")
        for name in ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    },
    # Most of the following fields accept only the value that already applies here.
    "logits_processors": Field(_ANY, "", ([], {}), "Python functions cannot be sent"),
    "min_keep": Field(_ANY, "", (0, 1), "samplers keep at least one token, whatever their values"),
    "n_discard": Field(_ANY, "", (0,), 'overflow="shift" drops the oldest tokens one by one'),
    "t_max_predict_ms": Field(_ANY, "", (0, -1), "give deadline_s, in seconds, or max_tokens"),
    "grammar_lazy": Field(_ANY, "", (False,), "give structural_tag for free text with such parts"),
    "grammar_triggers": Field(_ANY, "", ([],), "give structural_tag for free text with such parts"),
    "preserved_tokens": Field(_ANY, "", ([],), "give skip_special_tokens=false"),
    "verbose": Field(BOOLEAN, "__verbose in a whole answer, the prompt as the model read it; --verbose: in each"),
    "cache_prompt": Field(BOOLEAN, "false: the same as skip_reading_prefix_cache"),
    "prompt_embeds": Field(_ANY, "", (), "give text or token ids"),
    "vllm_xargs": Field(_ANY, "", ({},), "there are no parameters but those of SamplingParams"),
    "guided_whitespace_pattern": Field(_ANY, "", (), "put the white space into a grammar"),
    "chat_format": Field(_ANY, "", (0,), "the chat template decides how an answer is read"),
    "reasoning_control": Field(_ANY, "", (False,), "give thinking_token_budget"),
}
