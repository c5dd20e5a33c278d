"""Conversations to prompts: the GGUF's own jinja2 template, in jinja2's sandbox."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from datetime import datetime
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llamabatch.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from llamabatch.llama.model import Model

Message = Mapping[str, Any]
Conversation = ListLike[Message]


def render(template: str | None, conversation: Conversation, bos: str, eos: str) -> str:
    """The prompt of a conversation, ending where the assistant's answer begins.

    Args:
        template: jinja2 source from the model's metadata.
        conversation: messages with "role" and "content".
        bos, eos: text of these special tokens, for templates that write them.

    Raises:
        ConfigError: the model has no chat template.
        PromptError: a message has no role or content, or the template refuses the conversation.
    """
    if template is None:
        raise ConfigError("this model has no chat template; use generate with a prompt of its own format")
    _check(conversation)
    compiled = _compile(template)
    try:
        return compiled.render(
            messages=conversation, add_generation_prompt=True, bos_token=bos, eos_token=eos, tools=None
        )
    except Exception as error:  # a template is a program: it can raise whatever Python raises
        raise PromptError(f"the model's chat template refuses this conversation: {error}") from error


def to_tokens(model: Model, conversation: Conversation) -> tuple[str, tuple[int, ...]]:
    """A conversation as text and token ids. Raises what render and Model.tokenize raise.

    The whole text is read with its special tokens, as llama-server does: a message that spells out <|im_end|> ends its
    turn. Those who pass on text of strangers must decide what to do about that.
    """
    bos = model.special_token("bos")
    text = render(model.chat_template, conversation, bos, model.special_token("eos"))
    # a template that writes BOS itself must not get a second one
    add_special = not (bos and text.startswith(bos))
    return text, tuple(model.tokenize(text, add_special=add_special, parse_special=True))


def _check(conversation: Conversation) -> None:
    if isinstance(conversation, (str, Mapping)) or not isinstance(conversation, ListLike):
        raise PromptError(f"a conversation is a list of messages, not {type(conversation).__name__}")
    if not conversation:
        raise PromptError("the conversation is empty; give at least one message")
    for message in conversation:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise PromptError('a message is {"role": "user" | "assistant" | "system", "content": text}')


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    # the settings that Hugging Face's templates are written for (transformers, chat_template_utils.py), tojson included
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the model's chat template cannot be compiled: {error}") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
