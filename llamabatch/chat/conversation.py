"""Turns conversations into prompts. The GGUF's own jinja2 template runs in jinja2's sandbox."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Protocol

from llamabatch.chat import histories
from llamabatch.chat.messages import Conversation, Message, Tools, as_messages, checked_message
from llamabatch.chat.named_templates import IN_PYTHON, TEMPLATES
from llamabatch.chat.options import RESERVED, ChatOptions
from llamabatch.errors import ConfigError, PromptError
from llamabatch.utils.checks import nearest, show
from llamabatch.utils.late_import import late_import

if TYPE_CHECKING:
    from llamabatch.chat.template import BoundedTemplate


def without_template(option: str) -> str:
    """Returns the error message for a model without a chat template.

    Args:
        option: the option that sets a template, as the caller writes it, such as chat_template="chatml".
    """
    return f"this model has no chat template; give {option}, or the template of its family"


def check_template(source: str) -> None:
    """Raises ConfigError for a template that is empty or cannot be compiled."""
    if not source.strip():
        raise ConfigError("the chat template is empty; give one in jinja2")
    _compile(source)


def template_variables(source: str) -> frozenset[str]:
    """Returns the names of the variables that a template reads. Raises ConfigError for an invalid template."""
    return _compile(source).variables


def render(
    template: str | None,
    conversation: Conversation,
    bos: str,
    eos: str,
    options: ChatOptions | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> str:
    """Returns the prompt of a conversation, up to the point where the assistant's answer begins or continues.

    Args:
        template: jinja2 source from the model's metadata; options.template replaces this source.
        conversation: messages with "role" and "content"; content is a text, or OpenAI's list of text parts.
        bos, eos: text of these special tokens, for templates that write them.
        options: tools, variables, and the end of the prompt.
        cancelled: returns True if the prompt is not needed any more; called every few milliseconds.

    Raises:
        ConfigError: the model has no chat template, or the template cannot be compiled.
        PromptError: a message has no role or content; the template refuses the conversation, needs too much time or
            memory (see template.BUDGET), or does not read a given variable; or there is no message to continue.
        CancelledError: `cancelled` returned True.
    """
    options = options or ChatOptions()
    source = template if options.template is None else options.template
    if source is None:
        raise ConfigError(f"{without_template(IN_PYTHON)}, or use generate with a prompt in the model's format")
    messages = [checked_message(index, message, source) for index, message in enumerate(as_messages(conversation))]
    compiled = _compile(source)
    _check_known(compiled, options)
    mark = _mark_end(messages) if options.continue_final_message else None
    adds = options.add_generation_prompt
    variables = {
        **{name: value for name, value in options.usual.items() if name in compiled.variables},
        **options.kwargs,
        "add_generation_prompt": not options.continue_final_message if adds is None else adds,
        "continue_final_message": options.continue_final_message,
        "bos_token": bos,
        "eos_token": eos,
    }
    most_calls = histories.most_calls(messages)
    forms = _forms_of(source, most_calls > 1) if most_calls else histories.FORMS[:1]
    shown = histories.shown(messages, source, compiled, options.tools, forms)
    lists = _tool_lists(options.tools, compiled)
    tries = ({**variables, "tools": tools, "messages": form} for form in shown for tools in lists)
    systems = [str(message["content"]).strip() for message in messages if message["role"] in ("system", "developer")]
    return _first_text(compiled, tries, mark, systems, cancelled)


def _tool_lists(tools: Tools | None, template: BoundedTemplate) -> list[Any]:
    """Returns the lists of tools to try with the template, the best first."""
    if not tools:  # some templates compute the length of `tools` even if there are no tools
        return [None, []] if "tools" in template.variables else [None]
    given = [*map(_without_nulls, tools)]
    filled = [*map(_filled, given)]  # some templates fail without a description or parameters
    return [given] if given == filled else [given, filled]


def _first_text(
    template: BoundedTemplate,
    tries: Iterable[Mapping[str, Any]],
    mark: str | None,
    systems: Sequence[str],
    cancelled: Callable[[], bool] | None,
) -> str:
    """Renders the template with each of `tries` until one succeeds. Returns the text up to the mark. Errors are as in
    render.

    If there are several system messages, the first text that contains all of these messages is preferred.

    Args:
        tries: sets of variables to render the template with, the best set first.
        mark: the mark from _mark_end(); None: the text is not cut.
        systems: contents of the system messages.
    """
    from llamabatch.chat.template import describe
    from llamabatch.chat.template_prices import TemplateLimit

    refusal: Exception | None = None
    incomplete: str | None = None
    for variables in tries:
        try:
            text = template.render(variables, cancelled)
            text = text if mark is None else _cut_at(text, mark)
            if len(systems) < 2 or all(each in text for each in systems):
                return text
            incomplete = incomplete or text  # some templates write only the last system message
        except (CancelledError, PromptError):
            raise
        except Exception as error:  # a template is a program: it can raise any exception
            # The traceback is dropped, because its frames refer to `refusal` (which makes a cycle) and to all values of
            # the template.
            refusal = refusal or error.with_traceback(None)
            if isinstance(error, TemplateLimit):
                break  # another try would also exceed the budget
    if incomplete is not None:
        return incomplete
    assert refusal is not None
    raise PromptError(f"the chat template refuses this conversation: {describe(refusal)}") from refusal


def _without_nulls(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a tool without the null fields of its function. Templates would write null as "None"."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    return {**tool, "function": {name: value for name, value in function.items() if value is not None}}


def _filled(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a tool whose function has `parameters`. The function and each parameter get an empty description if they
    have none."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    parameters = {"type": "object", "properties": {}, **function.get("parameters", {})}
    if isinstance(properties := parameters["properties"], Mapping):
        described = {k: {"description": "", **v} if isinstance(v, Mapping) else v for k, v in properties.items()}
        parameters["properties"] = described
    return {**tool, "function": {"description": "", **function, "parameters": parameters}}


def _check_known(template: BoundedTemplate, options: ChatOptions) -> None:
    """Raises PromptError for an option that the template does not read, because this option would change nothing."""
    given = list(options.kwargs)
    if options.add_generation_prompt is False and not options.continue_final_message:
        given.append("add_generation_prompt")
    for name in given:
        if name not in template.variables:
            known = sorted(template.variables.difference(RESERVED))
            close = nearest(name, known) if name in options.kwargs and known else ""
            raise PromptError(f"the chat template does not know {name!r}, so giving it would change nothing{close}")


def _mark_end(messages: list[Message]) -> str:
    """Adds a mark to the end of the last message, and returns the mark. This message must be an assistant's.

    The prompt is cut before the mark, so text that the template writes after the content is dropped. transformers does
    the same (utils/chat_template_utils.py). The mark ends with a tab. If the rendered text lacks this tab, the
    template trims contents. Without the mark, such a template would have trimmed the white space at the end of the
    content, so _cut_at removes this white space.
    """
    last = messages[-1]
    content = last.get("content")
    if last["role"] != "assistant" or not isinstance(content, str):
        what = f"is of role {show(last['role'])}" if last["role"] != "assistant" else "has no content"
        raise PromptError(f"continue_final_message needs an assistant's message at the end; the last one {what}")
    mark = f"<continue-{zlib.crc32(content.encode(errors='replace')):08x}>\t"
    messages[-1] = {**last, "content": content + mark}
    return mark


def _cut_at(text: str, mark: str) -> str:
    """Returns the text before the mark. Raises PromptError if the template has not written the mark."""
    at = text.rfind(mark.rstrip())
    if at < 0:
        raise PromptError("the chat template changes the last message, so it cannot be continued")
    return text[:at] if text.startswith(mark, at) else text[:at].rstrip()


class ChatModel(Protocol):
    """The part of a model that is needed to turn a conversation into token ids."""

    @property
    def chat_template(self) -> str | None: ...

    def special_token(self, name: str) -> str: ...

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]: ...


def to_tokens(
    model: ChatModel,
    conversation: Conversation,
    options: ChatOptions | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> tuple[str, tuple[int, ...]]:
    """Returns a conversation as text and as token ids. Errors are as in render and Model.tokenize.

    Special tokens are recognised anywhere in the text, as in llama-server: a message that contains the text <|im_end|>
    ends its own turn. A program that passes on text from strangers must decide how to treat such text.
    """
    bos = model.special_token("bos")
    text = to_text(model, conversation, options, cancelled)
    return text, tuple(model.tokenize(text, add_special=not _begins_with(text, bos), parse_special=True))


def to_pieces(
    model: ChatModel,
    conversation: Conversation,
    mark: str,
    options: ChatOptions | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> tuple[str, list[list[int]]]:
    """Returns the text of a conversation with media, and the token ids of each piece of text. Errors are as in
    to_tokens.

    Args:
        mark: the text that stands for each picture or sound. The marks split the text into pieces.
    """
    bos = model.special_token("bos")
    text = to_text(model, conversation, options, cancelled)
    first, *others = text.split(mark)
    pieces = [model.tokenize(first, add_special=not _begins_with(text, bos), parse_special=True)]
    pieces += [model.tokenize(each, add_special=False, parse_special=True) if each else [] for each in others]
    return text, pieces


def _begins_with(text: str, bos: str) -> bool:
    """Returns True if the template itself has written BOS. In this case the tokenizer must not add a second BOS."""
    return bool(bos) and text.startswith(bos)


def to_text(
    model: ChatModel,
    conversation: Conversation,
    options: ChatOptions | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> str:
    """Returns a conversation as text. Errors are as in render."""
    bos, eos = model.special_token("bos"), model.special_token("eos")
    return render(model.chat_template, conversation, bos, eos, options, cancelled)


@functools.lru_cache(maxsize=8)
def _forms_of(template: str, several: bool) -> list[histories.Form]:
    return histories.best_forms(_compile(template), template, several)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> BoundedTemplate:
    with late_import("the code for chat templates"):
        from llamabatch.chat.template import BoundedTemplate  # imports jinja2, which only chats need

    # some model files contain the name of one of llama.cpp's templates instead of a template
    return BoundedTemplate(TEMPLATES.get(template.strip(), template))
