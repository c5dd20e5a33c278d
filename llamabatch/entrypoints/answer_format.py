"""AnswerFormat: the parts of a request that depend on how its model marks thinking and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Protocol

from llamabatch.chat.formats import ChatFormat, reasoning_of
from llamabatch.chat.output_parser import OutputParser
from llamabatch.config import ResolvedConfig
from llamabatch.request.reasoning import Reasoning, ReasoningTags, Thinking
from llamabatch.request.request import Request

_TAIL = 64  # tokens of a prompt in which a tag at its end stands


class FormatModel(Protocol):
    """The part of a Model that is used here."""

    @property
    def chat_template(self) -> str | None: ...

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]: ...

    def detokenize(self, token_ids: list[int], *, skip_special: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class AnswerFormat:
    """Adds to requests what their model's format asks for.

    Args:
        template: of the chats; None: the model's own.
    """

    def __init__(self, model: FormatModel, config: ResolvedConfig, template: str | None = None) -> None:
        self._model = model
        template = model.chat_template if template is None else template
        self.tags = reasoning_of(template, config.reasoning_tags, config.reasoning_format)

    def of_chat(self, request: Request, continued: str = "") -> Request:
        """A request whose prompt a chat template made: its answer is taken apart.

        Args:
            continued: text of the last message, if the answer goes on with it.
        """
        tags = self.tags
        if tags is None:
            return request
        thinking = tags.at_end_of(request.prompt or "", continued)
        return replace(
            request,
            reasoning=Reasoning(tags, thinking),
            preserved_token_ids=self._special_ids,
            make_parser=self._parser(tags, thinking),
        )

    def of_prompt(self, request: Request) -> Request:
        """Any other request, whose text stays raw: a form binds from the first token, unless the prompt ends within
        thinking."""
        tags, params = self.tags, request.params
        if tags is None or request.embed or (params.thinking_token_budget is None and params.structure is None):
            return request
        tail = self._model.detokenize(list(request.prompt_token_ids[-_TAIL:]), skip_special=False)
        thinking = tags.at_end_of(tail)
        if thinking is Thinking.POSSIBLE and params.structure is not None:
            thinking = Thinking.OVER
        return replace(request, reasoning=Reasoning(tags, thinking, parsed=False))

    def _parser(self, tags: ReasoningTags, thinking: Thinking) -> Callable[[int], OutputParser]:
        chat_format, special = ChatFormat(tags), self._special_marks
        return lambda index: OutputParser(chat_format, thinking=thinking, special=special)

    @cached_property
    def _special_ids(self) -> tuple[int, ...]:
        """Special tokens in the marks."""
        assert self.tags is not None
        ids = {token_id for mark in self.tags.marks for token_id in self._ids_of(mark) if self._is_special(token_id)}
        return tuple(sorted(ids))

    @cached_property
    def _special_marks(self) -> tuple[str, ...]:
        """Marks that are one special token each."""
        assert self.tags is not None
        ids = {mark: self._ids_of(mark) for mark in self.tags.marks}
        return tuple(mark for mark, found in ids.items() if len(found) == 1 and self._is_special(found[0]))

    def _ids_of(self, mark: str) -> list[int]:
        return self._model.tokenize(mark, add_special=False, parse_special=True)

    def _is_special(self, token_id: int) -> bool:
        return not self._model.token_bytes(token_id)
