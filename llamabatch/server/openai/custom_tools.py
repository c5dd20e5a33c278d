"""Custom tools: the model sees a function whose only argument is a text, and the caller gets only this text."""

from __future__ import annotations

import json
import re

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Matches all complete characters at the beginning of a JSON string that may be cut off. An escape must be whole, and a
# surrogate pair must have both halves.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})+'
)


class CustomInput:
    """The text of a custom tool call, read from the JSON arguments of the call while the model writes them."""

    def __init__(self) -> None:
        self.text = ""
        self._json = ""
        self._at: int | None = None  # offset of the first unread character; None: the string has not begun

    def add(self, json_text: str) -> str:
        """Adds a piece of JSON and returns the new characters of the text."""
        self._json += json_text
        if self._at is None:
            head = _HEAD.match(self._json)
            if head is None:
                return ""
            self._at = head.end()
        found = _WHOLE.match(self._json, self._at)
        if found is None:
            return ""
        self._at = found.end()
        new: str = json.loads(f'"{found[0]}"', strict=False)
        self.text += new
        return new

    def end(self) -> str:
        """Returns the remaining characters. If the JSON has no text as `input`, the text is the whole JSON."""
        whole = input_of(self._json)
        rest = whole[len(self.text) :] if whole.startswith(self.text) else ""
        self.text += rest
        return rest


def input_of(arguments: str) -> str:
    """Returns the text in a custom tool's arguments. If the JSON has no text as `input`, returns the whole JSON."""
    try:
        given = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):  # the JSON is cut off
        found = CustomInput()
        return found.add(arguments) or arguments
    text = given.get("input") if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments
