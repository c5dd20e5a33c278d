"""AnswerFormat: the parts of a request that depend on the model's notation of thinking and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Protocol

from llamabatch.chat.formats import ChatFormat, reasoning_of
from llamabatch.chat.options import ChatOptions
from llamabatch.chat.output_parser import OutputParser
from llamabatch.chat.tool_formats import ToolFormat, call_id
from llamabatch.chat.tool_grammar import answer_grammar, grammar, lazy_grammar
from llamabatch.chat.tool_parsers import ToolParser
from llamabatch.config import ResolvedConfig
from llamabatch.errors import SamplingError
from llamabatch.request.lark_rules import form_of, quoted
from llamabatch.request.reasoning import Reasoning, ReasoningTags, Thinking
from llamabatch.request.request import Request
from llamabatch.request.structured_outputs import TOOLS, Structure, special_name

_TAIL = 64  # this many tokens at the end of a prompt are searched for thinking tags


class FormatModel(Protocol):
    """The part of a Model used by an AnswerFormat."""

    @property
    def chat_template(self) -> str | None: ...

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]: ...

    def detokenize(self, token_ids: list[int], *, skip_special: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class AnswerFormat:
    """The format of a model's answers. Adds thinking tags, grammars of tool calls, and parsers to requests.

    Args:
        options: the options of the chats; a template in them replaces the model's own. None: the defaults.
    """

    def __init__(self, model: FormatModel, config: ResolvedConfig, options: ChatOptions | None = None) -> None:
        self._model = model
        self._options = options = options or ChatOptions()
        template = model.chat_template if options.template is None else options.template
        self.tags = reasoning_of(template, config.reasoning_tags, options.reasoning_format or config.reasoning_format)
        self._tools = ToolFormat.of(template) if options.reads_calls else None
        self._joined: dict[Structure, Structure] = {}  # by structure: the same structure, but with tool calls allowed

    def of_chat(self, request: Request, continued: str = "") -> Request:
        """Returns a chat's request, prepared so that its answer is parsed into thinking, tool calls and text.

        Args:
            continued: the text of the last message, if the answer continues it.

        Raises:
            SamplingError: there is no grammar for these tools, or for the tools and structured_outputs together.
        """
        tags = self.tags
        if self._tools is not None:
            request = self._with_tools(request)
        if tags is None and self._tools is None:
            return request
        thinking = Thinking.OVER if tags is None else tags.at_end_of(request.prompt or "", continued)
        return replace(
            request,
            reasoning=None if tags is None else Reasoning(tags, thinking),
            preserved_token_ids=self._special_ids,
            make_parser=self._parser(tags, thinking),
        )

    def of_prompt(self, request: Request) -> Request:
        """Returns the request of a plain prompt, whose answer is not parsed. If the request has a thinking budget or a
        structured output, its field `reasoning` is set. This field says whether the prompt ends inside thinking. If the
        prompt ends outside, a structured output applies from the first token.
        """
        tags, params = self.tags, request.params
        if tags is None or request.embed or (params.thinking_token_budget is None and params.structure is None):
            return request
        text_ids = [token_id for token_id in request.prompt_token_ids[-_TAIL:] if token_id >= 0]
        tail = self._model.detokenize(text_ids, skip_special=False)
        thinking = tags.at_end_of(tail)
        if thinking is Thinking.POSSIBLE and params.structure is not None:
            thinking = Thinking.OVER
        return replace(request, reasoning=Reasoning(tags, thinking, parsed=False))

    def _with_tools(self, request: Request) -> Request:
        """Returns the request with the grammar of its tool calls."""
        form, held = request.params.structure, self._calls
        if form is not None and self._options.forced_tools is None:
            held = self._form_or_calls(form)
        if held is None:
            return request
        budget = request.params.thinking_token_budget
        if budget is not None and self._tools is not None and self._tools.thought is not None:
            raise SamplingError(
                f"thinking_token_budget is {budget} beside "
                f"{'a call that must come' if form is None else 'a structured output'}, "
                "whose grammar already covers the thinking of this model; leave the budget out, or give "
                "tool_choice='auto'" + ("" if form is None else " without a structured output")
            )
        return replace(request, params=replace(request.params, structured_outputs=held))

    def _form_or_calls(self, form: Structure) -> Structure:
        """Returns a structure that allows either an answer with the given structure or tool calls."""
        found = self._joined.get(form)
        if found is not None:
            return found
        assert self._tools is not None
        rule = form_of(form.kind, form.text)
        if rule is None:
            raise SamplingError(
                f"{form.kind} of structured_outputs and tools are both given, and calls cannot be added to a grammar; "
                "give json, regex or choice, leave one of them out, or give tool_choice='none'"
            )
        parallel = self._options.parallel_tool_calls
        made = answer_grammar(self._tools, self._options.free_schemas, rule, self._spell, parallel=parallel)
        in_reasoning = form.in_reasoning or self._tools.thought is not None
        found = Structure(TOOLS, made.lark, in_reasoning, (*form.not_held, *made.left_out))
        self._joined = {form: found}
        return found

    @cached_property
    def _calls(self) -> Structure | None:
        """The structure that forces answers to call a tool, or that restricts their calls; None: answers are free."""
        tools = self._options.forced_tools
        if self._tools is None:
            return None
        if tools is None:
            return self._strict(self._tools)
        made = grammar(self._tools, tools, self._spell, parallel=self._options.parallel_tool_calls)
        # If the grammar also describes the thinking, it must apply from the first token on.
        return Structure(TOOLS, made.lark, in_reasoning=self._tools.thought is not None, not_held=made.left_out)

    def _strict(self, tool_format: ToolFormat) -> Structure | None:
        """Returns a structure that restricts a tool call once its tag has started; None if calls are free or have no
        tag.
        """
        if not self._options.strict_tools and not self._options.allows_some:
            return None
        schemas, parallel = self._options.free_schemas, self._options.parallel_tool_calls
        made = lazy_grammar(tool_format, schemas, self._spell, parallel=parallel)
        return None if made is None else Structure(TOOLS, made.lark, not_held=made.left_out)

    def _spell(self, mark: str) -> str:
        """Returns a tag as a grammar writes it: by name if the tag is a special token, else as quoted text."""
        return special_name(mark) if mark in self._special_marks else quoted(mark)

    def _parser(self, tags: ReasoningTags | None, thinking: Thinking) -> Callable[[Request, int], OutputParser]:
        chat_format, special, tools = ChatFormat(tags), self._special_marks, self._tools
        schemas, parallel = self._options.schemas, self._options.parallel_tool_calls

        def make(request: Request, continuation: int) -> OutputParser:
            def make_id(index: int, name: str) -> str:
                assert tools is not None
                return call_id(tools, request.seed, request.prompt_token_ids, continuation, index)

            def make_tool_parser() -> ToolParser:
                assert tools is not None
                return ToolParser(tools.reader, schemas, make_id, parallel=parallel)

            reads_calls = None if tools is None else make_tool_parser
            return OutputParser(
                chat_format,
                thinking=thinking,
                special=special,
                make_tool_parser=reads_calls,
                ends_thinking=() if tools is None else tools.ends_thinking,
            )

        return make

    @property
    def _marks(self) -> Iterable[str]:
        of_thinking = () if self.tags is None else self.tags.marks
        return (*of_thinking, *(() if self._tools is None else self._tools.marks))

    @cached_property
    def _special_ids(self) -> tuple[int, ...]:
        """The ids of the special tokens in the tags of thinking and tool calls."""
        ids = {token_id for mark in self._marks for token_id in self._ids_of(mark) if self._is_special(token_id)}
        return tuple(sorted(ids))

    @cached_property
    def _special_marks(self) -> tuple[str, ...]:
        """Those tags of thinking and tool calls that consist of exactly one special token."""
        ids = {mark: self._ids_of(mark) for mark in self._marks}
        return tuple(mark for mark, found in ids.items() if len(found) == 1 and self._is_special(found[0]))

    def _ids_of(self, mark: str) -> list[int]:
        return self._model.tokenize(mark, add_special=False, parse_special=True)

    def _is_special(self, token_id: int) -> bool:
        return not self._model.token_bytes(token_id)
