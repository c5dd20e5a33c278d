"""Plain lines: {"prompt": …}, {"messages": …} or {"input": …}, with any field of SamplingParams beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llamabatch.chat import ChatOptions, Conversation, check_conversation
from llamabatch.checks import integer, show
from llamabatch.errors import PromptError, SamplingError
from llamabatch.jobs.rows import MAX_ID_CHARS, Task
from llamabatch.sampling_checks import MAX_TOKEN_ID
from llamabatch.sampling_params import SamplingParams, named

TASK_OF: dict[str, Task] = {"prompt": "completion", "messages": "chat", "input": "embedding"}

_IDS = ("id", "custom_id")
_CHAT = ("tools", "chat_template_kwargs")
_KNOWN = (*TASK_OF, *_IDS, *_CHAT)

_MOST_KNOWN = 256
_LONGEST_KNOWN = 4096


@dataclass(frozen=True)
class Asked:
    """What a line asks, without its place among the others: the fields of a Row of the same names."""

    task: Task
    prompt: str | tuple[int, ...] | Conversation
    params: SamplingParams
    options: ChatOptions = ChatOptions()
    model: str | None = None


def identity(line: Mapping[str, Any]) -> str | None:
    """The id that a line gives itself, a whole number as text; None: it gives none. Raises PromptError."""
    given = [name for name in _IDS if name in line]
    if not given:
        return None
    if len(given) > 1:
        raise PromptError("the line has an id and a custom_id; give one of them")
    value = line[given[0]]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**MAX_ID_CHARS:
        return str(value)
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID_CHARS:
        raise PromptError(f"{given[0]} is {show(value)}; give a text of 1 to {MAX_ID_CHARS} characters")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise PromptError(f"{given[0]} is {show(value)}, which holds half a character; give whole ones")
    return value


class Overlay:
    """The job's parameters, under those of each line. Lines with the same fields share one object, so that what stands
    in most of a million lines is checked once."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._known = {"{}": params}

    def under(self, values: Mapping[str, Any]) -> SamplingParams:
        """The job's parameters with these in front. Raises SamplingError."""
        key = repr(values)  # which tells 1 from True
        if key not in self._known:
            biases = values.get("logit_bias")
            if isinstance(biases, Mapping):
                values = {**values, "logit_bias": _with_numbers(biases)}
            params = replace(self.params, **values)
            if len(key) > _LONGEST_KNOWN:
                return params
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            self._known[key] = params
        return self._known[key]


def asked(line: Mapping[str, Any], overlay: Overlay) -> Asked:
    """What a plain line asks.

    Args:
        line: the object that stands in it.
        overlay: what its fields are laid over.

    Raises:
        PromptError, SamplingError: something in it is wrong.
    """
    sampling = {name: value for name, value in line.items() if name not in _KNOWN}
    values = named(sampling, _KNOWN)  # first, as a misspelt prompt is found by its name
    task = task_of(line)
    if task == "embedding":
        for name in line:
            if name in sampling or name in _CHAT:
                raise PromptError(f"{name} does not go with input, whose embedding nothing is sampled for")
        return Asked(task, text_or_ids("input", line["input"]), overlay.params)
    params = overlay.under(values)
    if task == "completion":
        for name in _CHAT:
            if name in line:
                raise PromptError(f"{name} goes with messages, not with a prompt")
        return Asked(task, text_or_ids("prompt", line["prompt"]), params)
    kwargs = line.get("chat_template_kwargs")
    options = ChatOptions(line.get("tools"), {} if kwargs is None else kwargs)
    return Asked(task, check_conversation(line["messages"]), params, options)


def task_of(line: Mapping[str, Any]) -> Task:
    """By which of the three fields it has. Raises PromptError."""
    names = [name for name in TASK_OF if name in line]
    if len(names) != 1:
        found = " and ".join(names) or "none of them"
        raise PromptError(f"a line has one of prompt, messages and input; this one has {found}")
    return TASK_OF[names[0]]


def text_or_ids(name: str, value: object) -> str | tuple[int, ...]:
    """A prompt that is a text or a list of token ids. Raises PromptError."""
    if isinstance(value, str):
        if not value:
            raise PromptError(f"{name} is empty; give at least one character")
        return value
    if not isinstance(value, (list, tuple)):
        raise PromptError(f"{name} is {show(value)}; give a text or a list of token ids")
    if not value:
        raise PromptError(f"{name} is an empty list; give a text or a list of token ids")
    for token_id in value:
        integer(PromptError, f"a token id of {name}", token_id, 0, MAX_TOKEN_ID)
    return tuple(value)


def _with_numbers(biases: Mapping[Any, Any]) -> dict[int, Any]:
    """In JSON all names are texts, token ids too."""
    try:
        return {int(token_id): bias for token_id, bias in biases.items()}
    except (TypeError, ValueError) as error:
        raise SamplingError(f"logit_bias is {show(biases)}; give a mapping from token id to bias") from error
