"""Tokenizes the prompts of a file, or the bundled prompts, once, so that every strategy gets the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from llamabatch.chat.conversation import to_tokens
from llamabatch.engine.validation import check_prompt
from llamabatch.entrypoints.prompts import is_token_ids, plain_ids
from llamabatch.errors import LlamaBatchError, PromptError, SetupError
from llamabatch.llama.model import Model
from llamabatch.utils.checks import show
from llamabatch.utils.paths import shown

_JSONL = (".jsonl", ".ndjson", ".json")
_SHAPES = '{"prompt": TEXT or TOKEN IDS} or {"messages": [{"role": …, "content": …}]}'

_T = TypeVar("_T")

Prompt = str | list[dict[str, Any]] | tuple[int, ...]


@dataclass(frozen=True)
class Line:
    """One prompt of a file: a text, token ids, or the messages of a conversation."""

    number: int
    prompt: Prompt


@dataclass(frozen=True)
class Workload:
    """The prompts for every strategy.

    Attributes:
        source: the file's name, or "bundled".
        prompts: token ids of each prompt.
    """

    source: str
    prompts: tuple[tuple[int, ...], ...]

    @property
    def n_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def load(path: Path | None, model: Model, n_ctx: int) -> Workload:
    """Reads and tokenizes prompts.

    Args:
        path: a text file with one prompt per line, or JSONL; None: the bundled prompts.
        model: a model with the vocabulary and the chat template; the weights are not needed.
        n_ctx: tokens that one request may use.

    Raises:
        PromptError: the file cannot be read, has no prompt, or has an invalid line. The message names the line.
        ConfigError: a line of the file is a conversation, and the model has no chat template.
        SetupError: the bundled prompts are missing.
    """
    name = "the bundled prompts" if path is None else shown(path)
    lines = parse(name, _read(path), jsonl=True if path is None else _is_jsonl(path))
    if path is None and model.chat_template is None:  # without a template, the model continues the questions as texts
        lines = [Line(line.number, _question(line.prompt)) for line in lines]
    prompts = [_at(name, line.number, partial(_token_ids, line.prompt, model, n_ctx)) for line in lines]
    return Workload("bundled" if path is None else path.name, tuple(prompts))


def parse(name: str, text: str, *, jsonl: bool | None = None) -> list[Line]:
    """Returns the prompts of a file's text. Blank lines are skipped.

    Args:
        name: name of the file, for messages.
        jsonl: True for JSONL, False for one prompt per line. None: JSONL if the first line is a JSON object.

    Raises:
        PromptError: the text has no prompt, or a line has a wrong format.
    """
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise PromptError(f"{name} holds no prompt; write one a line, as text or as {_SHAPES}")
    if jsonl or (jsonl is None and _is_object(lines[0][1])):
        return [Line(number, _at(name, number, partial(_from_json, line))) for number, line in lines]
    return [Line(number, line) for number, line in lines]


def _read(path: Path | None) -> str:
    if path is None:
        bundled = resources.files("llamabatch.bundled") / "tiny_prompts.jsonl"
        if not bundled.is_file():
            raise SetupError("the bundled prompts are missing from this installation; name a file with --prompts")
        return bundled.read_text(encoding="utf-8")
    if path.is_dir():
        raise PromptError(f"{shown(path)} is a directory; give a file with one prompt a line")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise PromptError(f"{shown(path)}, line {line}: this is not UTF-8 text; prompts are read as UTF-8") from error
    except OSError as error:
        raise PromptError(
            f"{shown(path)} cannot be read: {error.strerror}; give a file with one prompt a line"
        ) from error


def _question(prompt: Prompt) -> str:
    return str(prompt[-1]["content"]) if isinstance(prompt, list) else str(prompt)


def _is_jsonl(path: Path) -> bool | None:
    """Returns True for the suffix of a JSON file, False for .txt, None for any other."""
    suffix = path.suffix.lower()
    return True if suffix in _JSONL else False if suffix == ".txt" else None


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _from_json(line: str) -> Prompt:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise PromptError(f"this is not JSON ({error}); write {_SHAPES}") from error
    if not isinstance(item, dict) or ("prompt" in item) == ("messages" in item):
        raise PromptError(f"write {_SHAPES}, one of the two")
    if "messages" in item:
        messages: list[dict[str, Any]] = item["messages"]
        if not isinstance(messages, list):
            raise PromptError(f"messages is {show(messages)}; give a list of messages")
        return messages  # to_tokens checks each message later
    prompt: object = item["prompt"]
    if is_token_ids(prompt):
        return plain_ids(prompt)
    if not isinstance(prompt, str):
        raise PromptError(f"prompt is {show(prompt)}; give a text or a list of token ids")
    return prompt


def _token_ids(prompt: Prompt, model: Model, n_ctx: int) -> tuple[int, ...]:
    """Tokenizes a text as LLM.generate does, or messages as LLM.chat does. Token ids stay as they are."""
    if isinstance(prompt, str):
        ids = tuple(model.tokenize(prompt)) if prompt else ()
    elif isinstance(prompt, tuple):
        ids = prompt
    else:
        ids = to_tokens(model, prompt)[1]
    check_prompt(ids, model.n_vocab, n_ctx)
    return ids


def _at(name: str, number: int, read: Callable[[], _T]) -> _T:
    """Calls `read`. If it raises an error, the file's name and the line number begin the message."""
    try:
        return read()
    except LlamaBatchError as error:
        raise type(error)(f"{name}, line {number}: {error}") from error
