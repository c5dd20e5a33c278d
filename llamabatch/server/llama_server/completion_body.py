"""The bodies of /completion and /infill, read without HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission
from llamabatch.errors import PromptError, SamplingError
from llamabatch.request.sampling_params import MAX_TOKEN_ID
from llamabatch.server.bodies import RULES, Body, Field, Fields, Json, Rules, reads
from llamabatch.server.errors import ApiError
from llamabatch.server.openai.chat_body import with_text_biases
from llamabatch.server.openai.completion_body import MAX_PROMPTS, generates_nothing
from llamabatch.server.openai.generation import GENERATION, Generation, read_generation
from llamabatch.utils.checks import integer, show

Mixed = str | tuple[int | str, ...]  # a text, or token ids and texts one behind another

MAX_FIELDS = 256  # in response_fields
_FIM = ("fim_pre", "fim_suf", "fim_mid")
_SNIPPET = "\n\n--- snippet ---\n\n"  # between files, where the vocabulary has no token for it
_INFILL_OUTPUT = 128  # tokens of the context that are kept for an output without a limit

USUAL: Mapping[str, Any] = {"max_tokens": None}

MIXED_SCHEMA: Json = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": ["integer", "string", "array", "object"]}, "minItems": 1},
        {"type": "object", "properties": {"prompt_string": {"type": "string"}}},
    ]
}
_TEXTS: Json = {"type": ["array", "null"], "items": {"type": "string"}}

COMPLETION: Fields = {
    **GENERATION,
    "prompt": Field(MIXED_SCHEMA, "a text, token ids, both mixed in one list, or a list of such prompts"),
    "return_tokens": Field({"type": ["boolean", "null"]}, "the answer holds token ids; a stream always does"),
    "t_max_predict_ms": Field(
        {"type": ["integer", "null"], "minimum": -1},
        "milliseconds from the first token on after which the output ends, once it has a line break; 0 or -1: none",
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
    "prompt": Field({"type": ["string", "null"]}, "the beginning of the text in the gap"),
}


@dataclass(frozen=True)
class LlamaCompletionBody(Generation):
    """A completion as asked for.

    Attributes:
        prompts: one or several.
        is_list: the answer is a list, one a prompt and continuation.
        no_output: nothing is generated (n_predict 0): what one step brings is left out of the answer.
        limit_ms: milliseconds from the first token on, after which the output ends once it has a line break; 0: none.
        fields: of the answer; (): all.
    """

    prompts: tuple[Mixed, ...] = ()
    is_list: bool = False
    no_output: bool = False
    limit_ms: int = 0
    fields: tuple[str, ...] = ()

    def token_prompts(self, processor: InputProcessor) -> list[list[int]]:
        """The token ids of each prompt. Raises InputError."""
        return [mixed_ids(each, processor) for each in self.prompts]

    def submission(self, processor: InputProcessor, loaded: Sequence[str] = ()) -> Submission:
        """The requests, one for each prompt. Raises InputError.

        Args:
            loaded: names of the adapters in the order of llama-server's ids.
        """
        ids: list[Any] = self.token_prompts(processor)
        given = ids if len(ids) > 1 else ids[0]
        return processor.prompts(given, with_text_biases(self, processor), self.adapter_scales(loaded), "raise")


@dataclass(frozen=True)
class InfillBody(LlamaCompletionBody):
    """A gap to be filled.

    Attributes:
        prefix, suffix: the texts around the gap. begun: the beginning of the text in it.
        extra: names and texts of other files.
    """

    prefix: str = ""
    suffix: str = ""
    begun: str = ""
    extra: tuple[tuple[str, str], ...] = ()

    def token_prompts(self, processor: InputProcessor) -> list[list[int]]:
        return [infill_ids(self, processor)]


@reads
def read_llama_completion(body: Mapping[str, Any], rules: Rules = RULES) -> LlamaCompletionBody:
    """The body of /completion. Raises ApiError, whose message names the field, its value and the allowed ones."""
    given = Body(body, COMPLETION, rules)
    prompts, is_list = read_mixed(given.needed("prompt", "a text, token ids, or a list of them"))
    own = _own(given, rules)
    several = is_list or own["params"].n > 1
    return LlamaCompletionBody(prompts=prompts, is_list=several, **own)


@reads
def read_infill(body: Mapping[str, Any], rules: Rules = RULES) -> InfillBody:
    """The body of /infill. Raises ApiError, as read_llama_completion."""
    given = Body(body, INFILL, rules)
    texts = {name: given.needed(name, "a text") for name in ("input_prefix", "input_suffix")}
    texts["prompt"] = given.take("prompt") or ""
    for name, text in texts.items():
        if not isinstance(text, str):
            raise PromptError(f"{name} is {show(text)}; give a text")
    extra = _extra(given.take("input_extra"))
    own = _own(given, rules)
    around = {"prefix": texts["input_prefix"], "suffix": texts["input_suffix"], "begun": texts["prompt"]}
    return InfillBody(prompts=("",), is_list=own["params"].n > 1, extra=extra, **around, **own)


def _own(body: Body, rules: Rules) -> dict[str, Any]:
    """The values that /completion and /infill share."""
    no_output = generates_nothing(body)
    limit = body.integer("t_max_predict_ms", -1, 2**63 - 1) or 0
    fields = body.take("response_fields") or []
    if not isinstance(fields, list) or len(fields) > MAX_FIELDS or not all(isinstance(each, str) for each in fields):
        raise SamplingError(f"response_fields is {show(fields)}; give a list of at most {MAX_FIELDS} names")
    found = read_generation(body, rules, USUAL)
    if no_output and found["params"].n_copies > 1:
        raise SamplingError(f"n is {found['params'].n_copies} with n_predict 0, which generates nothing; leave n out")
    return {**found, "no_output": no_output, "limit_ms": max(0, limit), "fields": tuple(fields)}


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


def read_mixed(given: object, name: str = "prompt") -> tuple[tuple[Mixed, ...], bool]:
    """The prompts, and True where they were given as a list of several. Raises PromptError, ApiError.

    A list that holds a number is one prompt; its texts and numbers stand one behind another.

    Args:
        name: of the field, for messages.
    """
    if isinstance(given, list) and given and not any(isinstance(each, int) for each in given):
        if len(given) > MAX_PROMPTS:
            raise PromptError(f"{name} is a list of {len(given)}; at most {MAX_PROMPTS} are allowed")
        return tuple(_mixed(f"{name}[{place}]", each) for place, each in enumerate(given)), True
    return (_mixed(name, given),), False


def _mixed(name: str, given: object) -> Mixed:
    if isinstance(given, str):
        return given
    if isinstance(given, dict):
        if given.get("multimodal_data"):
            raise ApiError(400, f"{name} has multimodal_data, and the model reads texts alone", param=name)
        if "content" in given:
            return _parts_of(name, given["content"])
        text = given.get("prompt_string")
        if not isinstance(text, str):
            raise PromptError(f"{name} is {show(given)}; give an object with the text prompt_string")
        return text
    if isinstance(given, list) and given:
        return tuple(each if isinstance(each, str) else _token(name, each) for each in given)
    raise PromptError(f"{name} is {show(given)}; give a text, token ids, or both in one list")


def _parts_of(name: str, content: object) -> str:
    """The text of a content of parts, as those of a message."""
    if not isinstance(content, list) or not content:
        raise PromptError(f'content of {name} is {show(content)}; give parts, as [{{"type": "text", "text": "Hello"}}]')
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise PromptError(f"content of {name} has the part {show(part)}; only parts of type 'text' are read")
        texts.append(text)
    return "".join(texts)


def _token(name: str, given: object) -> int:
    return integer(PromptError, f"a token id of {name}", given, 0, MAX_TOKEN_ID)


def mixed_ids(prompt: Mixed, processor: InputProcessor) -> list[int]:
    """The token ids of a prompt. A text at its beginning gets the tokens that the vocabulary puts before a text."""
    found: list[int] = []
    for place, part in enumerate((prompt,) if isinstance(prompt, str) else prompt):
        if isinstance(part, int):
            found.append(part)
        elif part or place == 0:
            found += processor.tokenize(part, place == 0, True)
    return found


def missing_marks(special_ids: Mapping[str, int]) -> list[str]:
    """Tokens that a model needs to fill a gap, and that its vocabulary lacks."""
    return [name for name in _FIM if name not in special_ids]


def infill_ids(body: InfillBody, processor: InputProcessor) -> list[int]:
    """The prompt of a gap: other files, the text before the gap, that behind it, and the beginning of the text in it,
    with the vocabulary's marks between them (llama-server: format_prompt_infill). What does not fit in the context is
    left out: the beginning of the other files, the beginning of the prefix, the end of the suffix.
    """
    marks = processor.special_ids
    prefix, suffix, begun = (_plain(text, processor) for text in (body.prefix, body.suffix, body.begun))
    extra = _extra_ids(body.extra, marks, processor)
    bos = processor.tokenize("", True, False)
    room = processor.n_ctx - min(body.params.max_tokens or _INFILL_OUTPUT, processor.n_ctx // 2)
    room -= len(begun) + len(bos) + len(_FIM)
    if room < 0:
        raise PromptError(f"prompt has {len(begun)} tokens, which leaves no room in a context of {processor.n_ctx}")
    for_suffix = min(len(suffix), max(room // 4, room - len(prefix)))
    for_prefix = min(len(prefix), room - for_suffix)
    for_extra = min(len(extra), room - for_suffix - for_prefix)
    return [
        *extra[len(extra) - for_extra :],
        *bos,
        marks["fim_pre"],
        *prefix[len(prefix) - for_prefix :],
        *begun,
        marks["fim_suf"],
        *suffix[:for_suffix],
        marks["fim_mid"],
    ]


def _extra_ids(files: Sequence[tuple[str, str]], marks: Mapping[str, int], processor: InputProcessor) -> list[int]:
    found: list[int] = []
    if "fim_rep" in marks:
        found += [marks["fim_rep"], *_plain("myproject\n", processor)]
    for name, text in files:
        if "fim_sep" in marks:
            found += [marks["fim_sep"], *_plain(f"{name}\n", processor)]
        else:
            found += _plain(_SNIPPET, processor)
        found += _plain(text, processor)
    if "fim_sep" in marks:
        found += [marks["fim_sep"], *_plain("filename\n", processor)]
    return found


def _plain(text: str, processor: InputProcessor) -> list[int]:
    found: list[int] = processor.tokenize(text, False, False) if text else []
    return found
