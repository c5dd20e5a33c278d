"""Conversations with or without pictures to prompts of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from llamabatch.chat.conversation import ChatModel, ChatOptions, Conversation, to_pieces, to_text, to_tokens
from llamabatch.errors import PromptError
from llamabatch.media.parts import has_pictures, take_pictures
from llamabatch.request.media import Media, MediaRun, MediaTokens, moved
from llamabatch.utils.checks import counted

_SHOWN = "<picture>"  # in the text of a prompt


class PictureReader(Protocol):
    """The part of a projector that tells the tokens of a picture."""

    def tokens(self, media: Media) -> MediaTokens: ...


class MediaModel(ChatModel, Protocol):
    """A model that may read pictures."""

    @property
    def projector(self) -> PictureReader | None: ...


class Prompt(NamedTuple):
    """A prompt: its text, where it has one, its tokens, and its pictures with their places among these."""

    text: str | None
    token_ids: tuple[int, ...]
    media: tuple[Media, ...] = ()
    media_runs: tuple[MediaRun, ...] = ()

    def behind(self, token_ids: tuple[int, ...], n_dropped: int) -> Prompt:
        """This prompt behind other tokens, without the first `n_dropped` of its own."""
        by = len(token_ids) - n_dropped
        runs = tuple(run._replace(start=run.start + by) for run in self.media_runs)
        return self._replace(token_ids=(*token_ids, *self.token_ids[n_dropped:]), media_runs=runs)


def chat_prompt(
    model: MediaModel,
    conversation: Conversation,
    options: ChatOptions | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Prompt:
    """The prompt of a conversation. Raises as conversation.to_tokens.

    Raises:
        PromptError: a picture cannot be read, the model reads none, or the template leaves one out.
        SetupError: Pillow is needed, and not installed.
    """
    if not has_pictures(conversation):
        return Prompt(*to_tokens(model, conversation, options, cancelled))
    if model.projector is None:
        raise PromptError(
            "the conversation has a picture, and this engine reads text alone; load the model with mmproj='….gguf', "
            "the file of its vision encoder"
        )
    messages, pictures, mark = take_pictures(conversation)
    text, [first, *others] = to_pieces(model, messages, mark, options, cancelled)
    if len(others) != len(pictures):
        raise PromptError(
            f"the chat template writes {counted(len(others), 'picture')} of a conversation that has {len(pictures)}"
        )
    ids, runs = list(first), list[MediaRun]()
    for index, (picture, piece) in enumerate(zip(pictures, others, strict=True)):
        tokens = model.projector.tokens(picture)
        runs += moved(tokens.runs, len(ids), index)
        ids += (*tokens.token_ids, *piece)
    return Prompt(text.replace(mark, _SHOWN), tuple(ids), tuple(pictures), tuple(runs))


def chat_text(
    model: ChatModel,
    conversation: Any,
    options: ChatOptions | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> str:
    """A conversation as text, with a word for each picture. Raises as conversation.to_text."""
    if not has_pictures(conversation):
        return to_text(model, conversation, options, cancelled)
    messages, _, mark = take_pictures(conversation)
    return to_text(model, messages, options, cancelled).replace(mark, _SHOWN)
