"""The bodies of /completion and /infill and their readers, without HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission
from llamabatch.errors import PromptError, SamplingError
from llamabatch.server.request.body import BOOLEAN, RULES, TEXT, Body, Field, Fields, Json, Rules, reads, string
from llamabatch.server.request.generation import Generation, read_generation
from llamabatch.server.request.generation_fields import GENERATION
from llamabatch.server.request.infill import Gap, infill_ids
from llamabatch.server.request.prompts import MIXED_SCHEMA, MediaPrompt, Mixed, mixed_ids, read_with_media
from llamabatch.utils.checks import show

MAX_FIELDS = 256  # maximum number of names in response_fields

_TEXTS: Json = {"type": ["array", "null"], "items": {"type": "string"}}

COMPLETION: Fields = {
    **GENERATION,
    "prompt": Field(MIXED_SCHEMA, "a text, token ids, both in one list, a text with pictures, or a list of these"),
    "return_tokens": Field(BOOLEAN, "the answer holds token ids; a stream always does"),
    "t_max_predict_ms": Field(
        {"type": ["integer", "null"], "minimum": -1},
        "milliseconds from the first token; then the output ends at its next line break; 0 or -1: no limit",
    ),
    "response_fields": Field(_TEXTS, "only these fields of the answer; a/b is field b of the object a"),
}

INFILL: Fields = {
    **COMPLETION,
    "input_prefix": Field({"type": "string"}, "the text before the gap"),
    "input_suffix": Field({"type": "string"}, "the text behind the gap"),
    "input_extra": Field(
        {"type": ["array", "null"], "items": {"type": "object", "required": ["text"]}},
        "other files, objects with text and filename",
    ),
    "prompt": Field(TEXT, "the beginning of the text in the gap"),
}


@dataclass(frozen=True)
class LlamaCompletionBody(Generation):
    """A request for completions.

    Attributes:
        prompts: one or several prompts.
        is_list: the response is a list with an entry for each prompt and continuation.
        limit_ms: the time limit in milliseconds from the first token on; 0: no limit. After this time, an output ends
            as soon as it has a line break.
        fields: the fields of the response; (): all.
    """

    prompts: tuple[Mixed | MediaPrompt, ...] = ()
    is_list: bool = False
    limit_ms: int = 0
    fields: tuple[str, ...] = ()

    @property
    def n_prompts(self) -> int:
        return len(self.prompts)

    @property
    def has_media(self) -> bool:
        return any(isinstance(each, MediaPrompt) for each in self.prompts)

    def token_prompts(self, processor: InputProcessor) -> list[Any]:
        """Returns each prompt as token ids, or as a text with media. Raises InputError."""
        return [
            each.mapping if isinstance(each, MediaPrompt) else mixed_ids(each, processor) or _begin(processor)
            for each in self.prompts
        ]

    def submission(self, processor: InputProcessor, loaded: Sequence[str] = ()) -> Submission:
        """Returns one request for each prompt. Raises InputError.

        Args:
            loaded: names of the loaded adapters. The index of a name is the adapter's id in llama-server's API.
        """
        ids = self.token_prompts(processor)
        given = ids if len(ids) > 1 else ids[0]
        return processor.prompts(given, self.params_for(processor), self.adapter_scales(loaded), "raise")


def _begin(processor: InputProcessor) -> list[int]:
    """Returns the token that replaces an empty prompt: BOS, or EOS if the vocabulary has no BOS; []: neither exists."""
    marks = processor.special_ids
    return [marks[name] for name in ("bos", "eos") if name in marks][:1]


@dataclass(frozen=True)
class InfillBody(LlamaCompletionBody):
    """A request to fill a gap between two texts."""

    gap: Gap = Gap()

    @property
    def cuts(self) -> bool:
        """Always True: if the text around the gap is too long, parts of the text are left out."""
        return True

    def token_prompts(self, processor: InputProcessor) -> list[Any]:
        return [infill_ids(self.gap, processor, self.params.max_tokens)]


@reads
def read_llama_completion(body: Mapping[str, Any], rules: Rules = RULES) -> LlamaCompletionBody:
    """Reads the body of /completion. Raises ApiError with the field, its value and the allowed values."""
    given = Body(body, COMPLETION, rules)
    prompts, is_list = read_with_media(given.needed("prompt", "a text, token ids, or a list of them"), given)
    own = _own(given, rules)
    several = is_list or own["params"].n > 1
    return LlamaCompletionBody(prompts=prompts, is_list=several, **own)


@reads
def read_infill(body: Mapping[str, Any], rules: Rules = RULES) -> InfillBody:
    """Reads the body of /infill. Raises ApiError, as read_llama_completion does."""
    given = Body(body, INFILL, rules)
    texts = {name: given.needed(name, "a text") for name in ("input_prefix", "input_suffix")}
    texts["prompt"] = given.take("prompt") or ""
    for name, text in texts.items():
        string(name, text)
    extra = _extra(given.take("input_extra"))
    own = _own(given, rules)
    gap = Gap(texts["input_prefix"], texts["input_suffix"], texts["prompt"], extra)
    return InfillBody(prompts=("",), is_list=own["params"].n > 1, gap=gap, **own)


def _own(body: Body, rules: Rules) -> dict[str, Any]:
    """Reads the common values of /completion and /infill."""
    limit = body.integer("t_max_predict_ms", -1, 2**63 - 1) or 0
    fields = body.take("response_fields") or []
    if not isinstance(fields, list) or len(fields) > MAX_FIELDS or not all(isinstance(each, str) for each in fields):
        raise SamplingError(f"response_fields is {show(fields)}; give a list of at most {MAX_FIELDS} names")
    found = read_generation(body, rules)
    if found["no_output"] and found["params"].n_copies > 1:
        raise SamplingError(f"n is {found['params'].n_copies} with n_predict 0, which generates nothing; leave n out")
    return {**found, "limit_ms": max(0, limit), "fields": tuple(fields)}


def _extra(given: object) -> tuple[tuple[str, str], ...]:
    files = [] if given is None else given
    if not isinstance(files, list):
        raise PromptError(f"input_extra is {show(given)}; give a list of objects with text and filename")
    found = []
    for place, each in enumerate(files):
        text, name = (each.get("text"), each.get("filename", "tmp")) if isinstance(each, dict) else (None, "")
        if not isinstance(text, str) or not isinstance(name, str):
            raise PromptError(f"input_extra[{place}] is {show(each)}; give an object with the texts text and filename")
        found.append((name, text))
    return tuple(found)
