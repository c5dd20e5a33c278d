"""Turns lines into requests: plain lines, and lines of OpenAI's batch format.

A plain line has a prompt, messages or an input, and any fields of SamplingParams. null means a missing field.

A batch line is {"custom_id": …, "method": "POST", "url": …, "body": {…}}. The body means the same as in OpenAI's API,
with two differences: missing parameters come from the job, and the body may have any field of SamplingParams. Fields
that are not supported, or that the API itself refuses, are refused by name.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llamabatch.chat.messages import Conversation, check_conversation
from llamabatch.chat.options import ChatOptions, chat_options
from llamabatch.errors import PromptError, SamplingError
from llamabatch.jobs.rows import CHAT_FIELDS, MAX_ID_CHARS, OWN_IDS, ServiceForm, Task
from llamabatch.request.parameter_names import MISPLACED
from llamabatch.request.sampling_params import MAX_LOGPROBS, MAX_TOKEN_ID, PARAMETERS, SamplingParams, named
from llamabatch.utils.checks import boolean, integer, nearest, present, show

TASK_OF: dict[str, Task] = {"prompt": "completion", "messages": "chat", "input": "embedding"}

_OF_THE_JOB = "chat_template"  # no line may have this field, because a template is a program
_KNOWN = (*TASK_OF, *OWN_IDS, *CHAT_FIELDS)

_NEAR = 0.84  # minimum ratio of difflib for a misspelling; mesage for messages has 0.86, promt for prompt has 0.91
_LEAST_MISS, _MOST_MISS = 4, 64  # minimum and maximum length of a misspelt name
_MOST_KNOWN = 256
_LONGEST_KNOWN = 4096


@dataclass(frozen=True)
class ParsedLine:
    """The request in a line. The fields mean the same as in Row."""

    task: Task
    prompt: str | tuple[int, ...] | Conversation
    params: SamplingParams
    options: ChatOptions = ChatOptions()
    model: str | None = None
    form: ServiceForm | None = None


def id_of(line: Mapping[str, Any]) -> str | int | None:
    """Returns the id in a line, a text or a whole number; None: the line has no id. Raises PromptError."""
    given = [name for name in OWN_IDS if name in line]
    if not given:
        return None
    if len(given) > 1:
        raise PromptError("the line has an id and a custom_id; give one of them")
    value = line[given[0]]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**MAX_ID_CHARS:
        return str(value)  # as text, because columns of tables store only 64-bit numbers
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID_CHARS:
        raise PromptError(
            f"{given[0]} is {show(value)}; give a text of 1 to {MAX_ID_CHARS} characters, or a whole number"
        )
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise PromptError(f"{given[0]} is {show(value)}, which holds a lone surrogate; give whole characters")
    return value


class Overlay:
    """The job's parameters, overlaid by the parameters of each line. Lines with equal parameters share one object. So
    equal parameters of a million lines are checked once."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._made = {"{}": params}

    def params_with(self, values: Mapping[str, Any]) -> SamplingParams:
        """Returns the job's parameters, overridden by the values of a line. Raises SamplingError."""
        key = repr(values)  # repr distinguishes 1 and True, which are equal as keys
        if key not in self._made:
            biases = values.get("logit_bias")
            if isinstance(biases, Mapping):
                values = {**values, "logit_bias": _with_numbers(biases)}
            params = replace(self.params, **values)
            if len(key) > _LONGEST_KNOWN:
                return params
            if len(self._made) > _MOST_KNOWN:
                self._made.clear()
            self._made[key] = params
        return self._made[key]


def parse_plain(
    line: Mapping[str, Any], overlay: Overlay, data: Collection[str] = (), *, media: bool = False
) -> ParsedLine:
    """Returns the request in a plain line. Fields that are not part of a request are data, and are ignored.

    Args:
        line: the object in the line, without nulls.
        overlay: the job's parameters, which the line's fields override.
        data: names of fields that are data, even if they resemble a known name.
        media: true: messages may have pictures and audio, including files of this machine.

    Raises:
        PromptError, SamplingError: a field is wrong, or its name is almost a known name.
    """
    given = {name: value for name, value in line.items() if name not in _KNOWN}
    _check_names(given, data)  # this check is first, so that a misspelt "prompt" is reported by its name
    sampling = {name: value for name, value in given.items() if name in PARAMETERS and name not in data}
    values = named(sampling, _KNOWN)
    task = task_of(line)
    if task == "embedding":
        for name in line:
            if name in sampling or name in CHAT_FIELDS:
                raise PromptError(f"{name} does not go with input: an embedding samples nothing")
        return ParsedLine(task, text_or_ids("input", line["input"]), overlay.params)
    params = overlay.params_with(values)
    if task == "completion":
        for name in CHAT_FIELDS:
            if name in line:
                raise PromptError(f"{name} goes with messages, not with a prompt")
        return ParsedLine(task, text_or_ids("prompt", line["prompt"]), params)
    options = chat_options(**{name: line[name] for name in CHAT_FIELDS if name in line})
    return ParsedLine(task, check_conversation(line["messages"], media=media), params, options)


def _check_names(given: Mapping[str, Any], data: Collection[str]) -> None:
    """Raises SamplingError if a name is almost a known name, or is a parameter that belongs elsewhere."""
    for name, value in given.items():
        if name in PARAMETERS or name in data:
            continue
        if name in MISPLACED:
            named({name: value})
        if name == _OF_THE_JOB:
            raise SamplingError(f"there is no field {name!r}; one template, --chat-template, holds for the whole job")
        meant = near_miss(name)
        if meant is not None:
            raise SamplingError(
                f"there is no field {show(name)}; did you mean {meant!r}? If it is data, keep it by its name, "
                "or name it in the template"
            )


@functools.lru_cache(maxsize=4096)
def near_miss(name: str) -> str | None:
    """Returns the known name that `name` probably misspells; None: no known name is similar enough."""
    if len(name) < _LEAST_MISS or len(name) > _MOST_MISS:
        return None
    plain = name.lower().replace("-", "_")
    found = difflib.get_close_matches(plain, (*PARAMETERS, *_KNOWN), n=1, cutoff=_NEAR)
    return found[0] if found else None


def task_of(line: Mapping[str, Any]) -> Task:
    """Returns the task of a line by its field: prompt, messages or input. Raises PromptError."""
    names = [name for name in TASK_OF if name in line]
    if len(names) != 1:
        found = (
            " and ".join(names)
            or "none of them; a template makes a prompt of other fields, as --prompt '{{ question }}'"
        )
        raise PromptError(f"a line has one of prompt, messages and input; this one has {found}")
    return TASK_OF[names[0]]


def text_or_ids(name: str, value: object) -> str | tuple[int, ...]:
    """Returns a prompt that is a text or a list of token ids. Raises PromptError."""
    if isinstance(value, str):
        if not value:
            raise PromptError(f"{name} is empty; give at least one character")
        return value
    if not isinstance(value, (list, tuple)):
        raise PromptError(f"{name} is {show(value)}; give a text or a list of token ids")
    if not value:
        raise PromptError(f"{name} is an empty list; give a text or a list of token ids")
    token_ids = tuple(value)
    if set(map(type, token_ids)) != {int} or min(token_ids) < 0 or max(token_ids) > MAX_TOKEN_ID:
        for token_id in token_ids:  # raises the error for the bad id
            integer(PromptError, f"a token id of {name}", token_id, 0, MAX_TOKEN_ID)
    return token_ids


def _with_numbers(biases: Mapping[Any, Any]) -> dict[int, Any]:
    """Returns the biases with the token ids as numbers. In JSON, a token id is a text, because all names are texts."""
    try:
        return {int(token_id): bias for token_id, bias in biases.items()}
    except (TypeError, ValueError) as error:
        raise SamplingError(f"logit_bias is {show(biases)}; give a mapping from token id to bias") from error


URLS: dict[str, Task] = {
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
    "/v1/embeddings": "embedding",
}

_FIELDS = ("custom_id", "method", "url", "body")
_MARKS = ("method", "url", "body")  # these fields mark a batch line; see is_openai

# These fields concern the service only and do not change the answer.
_FOR_A_SERVICE = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention"),
)

# Field -> its accepted values. A field with () must be left out.
_ONLY: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "encoding_format": ("float",),
    "audio": (),
    "dimensions": (),
    "function_call": (),
    "functions": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}

_OF_CHAT = (*CHAT_FIELDS, "reasoning_effort")


def is_openai(line: Mapping[str, Any]) -> bool:
    """Returns True for a line with the fields of a batch line. A plain line with a prompt may have a "url" as data."""
    return "body" in line or (any(name in line for name in _MARKS) and not any(name in line for name in TASK_OF))


def parse_openai(line: Mapping[str, Any], overlay: Overlay) -> ParsedLine:
    """Returns the request in a batch line. Messages may have pictures. Arguments and errors as in parse_plain."""
    for name in line:
        if name not in _FIELDS:
            raise PromptError(f"a batch line has no field {show(name)}{nearest(name, _FIELDS)}")
    if "custom_id" not in line:
        raise PromptError("a batch line needs a custom_id, a text that no other line has")
    if line.get("method", "POST") != "POST":
        raise PromptError(f"method is {show(line['method'])}; only 'POST' is known")
    body = line.get("body")
    if not isinstance(body, Mapping):
        raise PromptError(f"body is {show(body)}; give the object that would be sent to the API")
    body = present(body)
    task = _task(line, body)
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise PromptError(f"model is {show(model)}; give a text")
    rest = {name: value for name, value in body.items() if name not in ("model", *TASK_OF)}
    _drop_without_effect(rest)
    if task == "embedding":
        for name in rest:
            raise PromptError(f"the body of an embedding has no field {show(name)}")
        return ParsedLine(task, _single("input", body["input"]), overlay.params, model=model)
    options = _chat_options(rest, task)
    if task == "chat":
        _count_logprobs(rest)
    params = overlay.params_with(named(rest, (*TASK_OF, *_OF_CHAT, "model", *_ONLY)))
    if task == "chat":
        return ParsedLine(task, check_conversation(body["messages"], media=True), params, options, model)
    return ParsedLine(task, _single("prompt", body["prompt"]), params, model=model)


def _task(line: Mapping[str, Any], body: Mapping[str, Any]) -> Task:
    url = line.get("url")
    if url is None:
        return task_of(body)  # some services take lines without a url
    if not isinstance(url, str) or url not in URLS:
        raise PromptError(f"url is {show(url)}{nearest(str(url), URLS)}")
    needed = next(name for name, task in TASK_OF.items() if task == URLS[url])
    if needed not in body:
        raise PromptError(f"the body of {url} needs {needed!r}")
    for name in TASK_OF:
        if name != needed and name in body:
            raise PromptError(f"the body of {url} has no field {name!r}; it has {needed!r}")
    return URLS[url]


def _drop_without_effect(rest: dict[str, Any]) -> None:
    for name in list(rest):
        if name in _FOR_A_SERVICE:
            del rest[name]
        elif name in _ONLY:
            value = rest.pop(name)
            if not any(type(value) is type(known) and value == known for known in _ONLY[name]):
                known = f"; leave it out, or give {_ONLY[name][0]!r}" if _ONLY[name] else "; leave it out"
                raise PromptError(f"{name} is {show(value)}, which is not supported{known}")


def _chat_options(rest: dict[str, Any], task: Task) -> ChatOptions:
    given = {name: rest.pop(name) for name in _OF_CHAT if name in rest}
    if task != "chat":
        for name in given:
            raise PromptError(f"{name} goes with messages, not with a prompt")
    kwargs = given.get("chat_template_kwargs", {})
    effort = given.pop("reasoning_effort", None)
    if effort is not None and isinstance(kwargs, Mapping):
        given["chat_template_kwargs"] = {**kwargs, "reasoning_effort": effort}
    return chat_options(**given)


def _count_logprobs(rest: dict[str, Any]) -> None:
    """Turns a chat's logprobs (on or off) and top_logprobs (a number) into the field `logprobs` of SamplingParams."""
    wanted, count = rest.pop("logprobs", False), rest.pop("top_logprobs", None)
    boolean(SamplingError, "logprobs of a chat", wanted)
    if count is not None:
        if not wanted:
            raise SamplingError(f"top_logprobs is {show(count)}; it needs logprobs to be true")
        integer(SamplingError, "top_logprobs", count, -1, MAX_LOGPROBS)
    if wanted:
        rest["logprobs"] = count or 0


def _single(name: str, value: object) -> str | tuple[int, ...]:
    """Returns the prompt of a line. Refuses a list of several prompts, because a line of a job has one result."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise PromptError(f"{name} is a list of {len(value)}; a line has one result, so write a line for each")
        return text_or_ids(name, value[0])
    return text_or_ids(name, value)
