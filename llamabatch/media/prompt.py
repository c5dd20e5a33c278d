"""Conversations with or without pictures, and texts with pictures, to prompts of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from llamabatch.chat.conversation import ChatModel, ChatOptions, Conversation, to_pieces, to_text, to_tokens
from llamabatch.errors import PromptError
from llamabatch.media.parts import has_pictures, read_pictures, take_pictures
from llamabatch.media.sources import MediaSources
from llamabatch.request.media import Media, MediaRun, MediaTokens, moved
from llamabatch.utils.checks import counted

MARK = "<__media__>"  # of a picture in a text: libmtmd's and llama-server's
_SHOWN = "<picture>"  # in the text of a prompt
# The same in prompts for vLLM, by families of models. What libmtmd writes around a picture is a part of it.
_MARKS = re.compile(
    "|".join(
        (
            MARK,
            r"(?:<\|vision_start\|>)?(?:<\|image_pad\|>)+(?:<\|vision_end\|>)?",  # Qwen2-VL and its successors
            r"<start_of_image>|<image_soft_token>",  # Gemma 3
            r"(?:<\|begin_of_image\|>)?<\|image\|>(?:<\|end_of_image\|>)?",  # Llama 4, GLM-4V
            r"<\|image_\d+\|>",  # Phi
            r"\(<image>\./</image>\)",  # MiniCPM-V
            r"<image>|\[IMG\]",  # LLaVA, InternVL, SmolVLM, LFM2-VL; Pixtral
        )
    )
)


class PictureReader(Protocol):
    """The part of a projector that tells the tokens of a picture."""

    def tokens(self, media: Media) -> MediaTokens: ...


class MediaModel(ChatModel, Protocol):
    """A model that may read pictures."""

    media_sources: MediaSources

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
    reader = _reader("the conversation", model)
    messages, pictures, mark = take_pictures(conversation, model.media_sources)
    text, pieces = to_pieces(model, messages, mark, options, cancelled)
    if len(pieces) - 1 != len(pictures):
        raise PromptError(
            f"the chat template writes {counted(len(pieces) - 1, 'picture')} of a conversation that has {len(pictures)}"
        )
    return _joined(text.replace(mark, _SHOWN), pieces, pictures, reader)


def text_prompt(model: MediaModel, text: str, given: Sequence[Any]) -> Prompt:
    """The prompt of a text with marks for pictures: MARK, or what prompts for vLLM have in its place. The text is read
    with its special tokens.

    Args:
        given: the pictures in order, as of read_picture.

    Raises:
        PromptError: a picture cannot be read, the model reads none, or there are more marks or fewer.
        SetupError: Pillow is needed, and not installed.
    """
    reader = _reader("the prompt", model)
    first, *others = _MARKS.split(text)
    if len(others) != len(given):
        raise PromptError(
            f"the prompt has {counted(len(others), 'mark')} of a picture, and {counted(len(given), 'picture')} for it; "
            f"write {MARK} for each, or the model's own mark"
        )
    bos = model.special_token("bos")
    pieces = [model.tokenize(first, add_special=not (bos and first.startswith(bos)), parse_special=True)]
    pieces += [model.tokenize(each, add_special=False, parse_special=True) if each else [] for each in others]
    return _joined(text, pieces, read_pictures(given, model.media_sources), reader)


def _reader(what: str, model: MediaModel) -> PictureReader:
    if model.projector is None:
        raise PromptError(
            f"{what} has a picture, and this engine reads text alone; load the model with mmproj='….gguf', the file of "
            "its vision encoder, or 'auto' if that lies beside the model or in its repository"
        )
    return model.projector


def _joined(text: str, pieces: Sequence[Sequence[int]], pictures: Sequence[Media], reader: PictureReader) -> Prompt:
    """Pieces of text with a picture between each two."""
    ids, runs = list(pieces[0]), list[MediaRun]()
    for index, (picture, piece) in enumerate(zip(pictures, pieces[1:], strict=True)):
        tokens = reader.tokens(picture)
        runs += moved(tokens.runs, len(ids), index)
        ids += (*tokens.token_ids, *piece)
    return Prompt(text, tuple(ids), tuple(pictures), tuple(runs))


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
