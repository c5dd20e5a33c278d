"""Makes the prompts of a model from conversations with or without media, and from texts with media."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from llamabatch.chat.conversation import ChatModel, to_pieces, to_text, to_tokens
from llamabatch.chat.messages import Conversation, media_kind
from llamabatch.chat.options import ChatOptions
from llamabatch.errors import PromptError
from llamabatch.media.parts import MediaInput, has_media, marked
from llamabatch.media.sources import MediaSources
from llamabatch.request.media import IMAGE, SOUND, Kind, Media, MediaRun, MediaTokens, moved
from llamabatch.utils.checks import counted

MARK = "<__media__>"  # the mark of libmtmd and llama-server for a picture or audio in a text
_SHOWN = {IMAGE: "<picture>", SOUND: "<sound>"}  # placeholders for media in the text of a prompt
# The marks of all model families, including marks in prompts for vLLM. A match includes the tokens around media,
# because libmtmd adds these tokens itself.
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
            r"(?:<\|audio_bos\|>)?<\|AUDIO\|>(?:<\|audio_eos\|>)?",  # Qwen2-Audio, Qwen2.5-Omni
            r"<\|audio\|>|<\|audio_\d+\|>|\(<audio>\./</audio>\)|<audio_soft_token>",  # Ultravox, Phi, MiniCPM-o, Gemma
        )
    )
)


class MediaReader(Protocol):
    """A projector that returns the tokens of a picture or of audio.

    Attributes:
        reads_pictures: True if the projector reads pictures.
        sound_rate: samples per second of the audio that the projector reads; 0: the projector does not read audio.
    """

    reads_pictures: bool
    sound_rate: int

    def tokens(self, media: Media) -> MediaTokens: ...


class MediaModel(ChatModel, Protocol):
    """A model that may read pictures and audio."""

    media_sources: MediaSources

    @property
    def projector(self) -> MediaReader | None: ...


class Prompt(NamedTuple):
    """A prompt of text, tokens and media.

    Attributes:
        text: the text; None: only the token ids are known.
        media_runs: the positions of the media among the tokens.
        num_truncated: the number of tokens in the turns that were dropped.
    """

    text: str | None
    token_ids: tuple[int, ...]
    media: tuple[Media, ...] = ()
    media_runs: tuple[MediaRun, ...] = ()
    num_truncated: int = 0

    def behind(self, token_ids: tuple[int, ...], n_dropped: int) -> Prompt:
        """Returns a prompt in which `token_ids` replace the first `n_dropped` tokens of this prompt."""
        by = len(token_ids) - n_dropped
        runs = tuple(run._replace(start=run.start + by) for run in self.media_runs)
        return self._replace(token_ids=(*token_ids, *self.token_ids[n_dropped:]), media_runs=runs)


def media_kinds(model: MediaModel) -> frozenset[Kind]:
    """Returns the kinds of media that a model reads."""
    reader = model.projector
    found = () if reader is None else [IMAGE] * reader.reads_pictures + [SOUND] * (reader.sound_rate > 0)
    return frozenset(found)


def chat_prompt(
    model: MediaModel,
    conversation: Conversation,
    options: ChatOptions | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Prompt:
    """Returns the prompt of a conversation. Raises the errors of conversation.to_tokens.

    Raises:
        PromptError: a picture or audio cannot be read, the model does not read it, or the template leaves it out.
        SetupError: Pillow or miniaudio is needed and not installed.
    """
    if not has_media(conversation):
        return Prompt(*to_tokens(model, conversation, options, cancelled))
    messages, parts, mark = marked(conversation)
    reader, given = _reader("the conversation", model, len(parts), cancelled)
    text, pieces = to_pieces(model, messages, mark, options, cancelled)
    if len(pieces) - 1 != len(parts):
        raise PromptError(
            f"the chat template writes {len(pieces) - 1} pictures and sounds of a conversation that has {len(parts)}"
        )
    for part in parts:
        given.add_part(part)
    return _joined(_shown(text, mark, parts), pieces, given.media, reader)


def text_prompt(
    model: MediaModel,
    text: str,
    media: Sequence[tuple[Kind | None, Any]],
    cancelled: Callable[[], bool] | None = None,
    mark: str | None = None,
) -> Prompt:
    """Returns the prompt of a text with a mark for each picture and audio clip. Special tokens in the text are parsed.

    Args:
        media: pairs (kind, picture or audio) in order; see MediaInput.add.
        mark: the mark in the text. None: the mark is MARK if the text has one MARK for each of `media`; otherwise,
            each match of _MARKS is a mark.

    Raises:
        PromptError: a picture or audio cannot be read, the model does not read it, or the number of marks differs.
        SetupError: Pillow or miniaudio is needed and not installed.
    """
    reader, given = _reader("the prompt", model, len(media), cancelled)
    if mark is None and 0 < text.count(MARK) == len(media):
        mark = MARK
    first, *others = _MARKS.split(text) if mark is None else text.split(mark)
    if len(others) != len(media):
        raise PromptError(
            f"the prompt has {counted(len(others), 'mark')} for media, but {len(media)} pictures or sounds are given; "
            f"write {MARK} for each, or the model's own mark"
        )
    for kind, each in media:
        if media_kind(each) is not None:  # here, `each` is a message part from the body of an HTTP request
            given.add_part(each)
        else:
            given.add(each, kind)
    bos = model.special_token("bos")
    pieces = [model.tokenize(first, add_special=not (bos and first.startswith(bos)), parse_special=True)]
    pieces += [model.tokenize(each, add_special=False, parse_special=True) if each else [] for each in others]
    return _joined(text, pieces, given.media, reader)


def _reader(
    what: str, model: MediaModel, n: int, cancelled: Callable[[], bool] | None
) -> tuple[MediaReader, MediaInput]:
    reader = model.projector
    if reader is None:
        raise PromptError(
            f"{what} has a picture or a sound, but this engine reads text only; load the model with mmproj='….gguf' "
            "(--mmproj), the file of its encoder, or 'auto' if that lies beside the model or in its repository"
        )
    return reader, MediaInput(n, reader.reads_pictures, reader.sound_rate, model.media_sources, cancelled)


def _joined(text: str, pieces: Sequence[Sequence[int]], media: Sequence[Media], reader: MediaReader) -> Prompt:
    """Joins tokenized pieces of text, with a picture or audio between every two pieces. Returns the prompt."""
    ids, runs = list(pieces[0]), list[MediaRun]()
    for index, (each, piece) in enumerate(zip(media, pieces[1:], strict=True)):
        tokens = reader.tokens(each)
        runs += moved(tokens.runs, len(ids), index)
        ids += (*tokens.token_ids, *piece)
    return Prompt(text, tuple(ids), tuple(media), tuple(runs))


def _shown(text: str, mark: str, parts: Sequence[Mapping[str, Any]]) -> str:
    """Returns a text with a placeholder such as <picture> for each mark."""
    first, *others = text.split(mark)
    words = (_SHOWN[media_kind(part) or IMAGE] for part in parts)
    return first + "".join(word + piece for word, piece in zip(words, others, strict=False))


def chat_text(
    model: ChatModel,
    conversation: Any,
    options: ChatOptions | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> str:
    """Returns a conversation as text, with a placeholder for each piece of media. Raises the errors of to_text."""
    if not has_media(conversation):
        return to_text(model, conversation, options, cancelled)
    messages, parts, mark = marked(conversation)
    return _shown(to_text(model, messages, options, cancelled), mark, parts)
