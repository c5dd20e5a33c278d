"""Custom tools: the model knows each as a function with one text, and its caller gets that text."""

from __future__ import annotations

import json
import re

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Whole characters of a JSON string: an escaped one is whole once all of it is there, of a pair both halves.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})+'
)


class CustomInput:
    """The text that a model gives a custom tool, out of the JSON of its arguments as that grows."""

    def __init__(self) -> None:
        self.text = ""
        self._json = ""
        self._at: int | None = None  # the first character of the string that has not been read

    def add(self, json_text: str) -> str:
        """The characters of the text that a piece of JSON brings."""
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
        """The characters that were left: all of the arguments where they are no object with a text as `input`."""
        whole = input_of(self._json)
        rest = whole[len(self.text) :] if whole.startswith(self.text) else ""
        self.text += rest
        return rest


def input_of(arguments: str) -> str:
    """The text of the arguments of a custom tool; the arguments as they are where they have none."""
    try:
        given = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):  # cut off
        found = CustomInput()
        return found.add(arguments) or arguments
    text = given.get("input") if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments
