"""Checks the messages of a conversation, and joins the content of each message into one text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llamabatch.errors import PromptError
from llamabatch.request.media import IMAGE, SOUND, Kind
from llamabatch.utils.checks import show

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
PICTURE_TYPES = ("image_url", "input_image", "image", "image_pil")
"""The `type` of a part with a picture: in OpenAI's chats, in its responses, in transformers and in vLLM."""
SOUND_TYPES = ("input_audio", "audio_url", "audio")
"""The `type` of a part with a sound."""
MEDIA_MARK = "media_mark"  # `type` of a part whose text is only the mark of a picture or a sound
Conversation = Sequence[Message]
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def check_conversation(conversation: object, *, media: bool = False) -> Conversation:
    """Returns the conversation unchanged. Raises PromptError unless it is a list of valid messages.

    Args:
        media: True: parts with pictures and sounds are allowed, and are not checked here.
    """
    messages = as_messages(conversation)
    for index, message in enumerate(messages):
        checked_message(index, _without_media(message) if media else message)
    return messages


def as_messages(conversation: object) -> Conversation:
    """Returns the conversation unchanged. Raises PromptError unless it is a list with at least one message."""
    if isinstance(conversation, (str, Mapping)) or not isinstance(conversation, Sequence):
        raise PromptError(f"a conversation is a list of messages, not {type(conversation).__name__}")
    if not conversation:
        raise PromptError("the conversation is empty; give at least one message")
    return conversation


def dropped_first(messages: Conversation) -> list[int]:
    """Returns the turn number of each message; 0: the message always stays.

    If a conversation is too long, its first turns are dropped. A turn is a question and all messages up to the next
    question. After the last question, each answer with the results of its calls is a turn. The last question, the last
    turn after it, and system messages stay.
    """
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    last = max((n for n, role in enumerate(roles) if role == "user"), default=-1)
    turns, turn, n_before = [], 0, 0
    for n, role in enumerate(roles):
        if n == last or role in ("system", "developer"):
            turns.append(0)
        else:
            begins = role == "user" if n < last else role == "assistant"
            turn += begins or turn == 0
            turns.append(turn)
        if n == last:
            n_before = turn
    return [0 if turn == max(turns) > n_before else turn for turn in turns]


def _without_media(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, (list, tuple)):
        return message
    return {**message, "content": [part for part in content if media_kind(part) is None]}


def media_kind(part: object) -> Kind | None:
    """Returns the kind of media in a part of a message; None: the part has no picture or sound."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return IMAGE if kind in PICTURE_TYPES else SOUND if kind in SOUND_TYPES else None


def checked_message(index: int, message: object, template: str | None = None) -> Message:
    """Returns a message with its content as one text. Checks the form and the tool calls of the message first.

    Args:
        index: position of the message in the conversation, for error messages.
        template: the chat template of the conversation; if given, a mistyped role is an error.

    Raises:
        PromptError: the message has no role or no content, or a field has the wrong form.
    """
    place = f"messages[{index}]"
    form = 'a message is {"role": "user" | "assistant" | "system" | "tool", "content": text}'
    if not isinstance(message, Mapping):
        raise PromptError(f"{place} is {show(message)}; {form}")
    role = message.get("role")
    if not isinstance(role, str):
        raise PromptError(f"{place} has {'no role' if role is None else f'the role {show(role)}'}; {form}")
    if "content" not in message and "tool_calls" not in message:
        raise PromptError(f"{place} has no content; {form}")
    if template is not None:
        _check_role(place, role, template)
    content = _content(place, message.get("content"))
    if content is None and role in ("user", "system"):
        raise PromptError(f"content of {place}, of role {role!r}, is None; give a text")
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, (list, tuple)):
            raise PromptError(f"tool_calls of {place} is {show(calls)}; give a list of them")
        for call in calls:
            _check_call(place, call)
    return {**message, "content": content}


def _check_role(place: str, role: str, template: str) -> None:
    """Raises PromptError for a mistyped role, because many templates would write this role unchanged. A role that
    resembles no usual role is allowed, because a model may have roles of its own."""
    if role in _ROLES:
        return
    name = role.lower()
    meant = difflib.get_close_matches(name, _ROLES, n=1, cutoff=0.8)
    if not meant or (name != meant[0] and meant[0] in name):  # tool_call and user2 are not mistyped
        return
    if not re.search(rf"['\"]{re.escape(role)}['\"]", template):
        raise PromptError(f"role of {place} is {show(role)}; did you mean {meant[0]!r}?")


def _content(place: str, content: object) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise PromptError(f"content of {place} is {show(content)}; give a text, or a list of text parts")
    joined, behind_mark = "", True
    for part in content:  # as in llama-server, a line break separates two texts, but not a text and a picture
        text, is_mark = _text_of(place, part)
        joined += text if is_mark or behind_mark else f"\n{text}"
        behind_mark = is_mark
    return joined


def _text_of(place: str, part: object) -> tuple[str, bool]:
    """Returns the text of a part, and True if the text is the mark of a picture or a sound."""
    if not isinstance(part, Mapping):
        raise PromptError(f"content of {place} has the part {show(part)}; give parts of text, pictures or sounds")
    kind = part.get("type")
    text = part.get(kind) if kind in ("text", "refusal", MEDIA_MARK) else None
    if text is None and kind == "text" and "text" in part:
        text = ""  # some programs store null as the text
    if not isinstance(text, str):
        raise PromptError(f"content of {place} has a part of type {show(kind)}; give parts of text, pictures or sounds")
    return text, kind == MEDIA_MARK


def _check_call(place: str, call: object) -> None:
    """Raises PromptError if `call` is not a tool call."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise PromptError(f'a tool call of {place} is {show(call)}; give {{"function": {{"name": …, "arguments": …}}}}')
