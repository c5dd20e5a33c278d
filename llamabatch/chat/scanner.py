"""Scanner: gives generated text piece by piece to parsers that are written as generators.

A parser reads as if all text had come already, and yields where more text is needed: `yield from
scanner.accept("<tool_call>")`. Emitted text cannot be taken back. So text that may be the start of a marker is held
until its meaning is certain. As a result, the joined output does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

_SPACES = re.compile(r"\s*")


class Scanner:
    """Text that is read once, in order. A parser may set a mark, and later go back to this mark.

    Attributes:
        ended: no more text comes.
        at: position of the next character in `buffer`.
        buffer: text that is still needed. The buffer starts at the mark; if no mark is set, at the next character.
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.at = 0
        self.ended = False
        self._mark: int | None = None
        self._num_pushed = 0

    def push(self, text: str) -> None:
        """Appends text."""
        if not text:
            return
        self._num_pushed += 1
        kept = self.at if self._mark is None else self._mark
        self.buffer = self.buffer[kept:] + text
        self.at -= kept
        if self._mark is not None:
            self._mark = 0

    def mark(self, length: int) -> None:
        """Remembers the position `length` characters before the current position."""
        self._mark = self.at - length

    def unmark(self) -> None:
        """Forgets the mark: the scanner cannot go back any more."""
        self._mark = None

    def back(self, length: int) -> None:
        """Goes back to the position `length` characters after the mark, and forgets the mark."""
        assert self._mark is not None
        self.at, self._mark = self._mark + length, None

    @property
    def rest(self) -> str:
        """The part of the received text that has not been read."""
        return self.buffer[self.at :]

    def more(self) -> Reading[bool]:
        """Waits for more text; returns False if the text has ended."""
        before = self._num_pushed
        while self._num_pushed == before and not self.ended:
            yield
        return self._num_pushed > before

    def peek(self) -> Reading[str]:
        """Returns the next character without reading it; "" at the end."""
        while self.at == len(self.buffer):
            if not (yield from self.more()):
                return ""
        return self.buffer[self.at]

    def accept(self, *texts: str) -> Reading[str]:
        """Reads one of these texts if it comes next: the longest that fits. Returns the text; "" if none of them comes
        next."""
        longest_first = sorted(texts, key=len, reverse=True)
        while True:
            if not any(len(text) > len(self.buffer) - self.at and text.startswith(self.rest) for text in texts):
                break
            if not (yield from self.more()):
                break
        for text in longest_first:
            if self.buffer.startswith(text, self.at):
                self.at += len(text)
                return text
        return ""

    def spaces(self) -> Reading[str]:
        """Reads whitespace and returns it."""
        read = ""
        while True:
            match = _SPACES.match(self.buffer, self.at)
            assert match is not None
            read, self.at = read + match[0], match.end()
            if self.at < len(self.buffer) or not (yield from self.more()):
                return read

    def until(self, markers: tuple[str, ...], emit: Callable[[str], object]) -> Reading[str]:
        """Emits text up to the first marker. Reads and returns the marker; returns "" if the text has no marker."""
        while True:
            first, marker = self._find(markers, self.at)
            held = self._held(markers)
            if marker and (first <= held or self.ended):
                self._emit_to(first, emit)
                self.at += len(marker)
                return marker
            self._emit_to(held, emit)
            if not (yield from self.more()) and not self._find(markers, self.at)[1]:
                self._emit_to(len(self.buffer), emit)
                return ""

    def text_until(self, markers: tuple[str, ...], most: int) -> Reading[tuple[str, str]]:
        """Reads up to the first marker. Returns (text, marker), or ("", "") if no marker comes within `most`
        characters."""
        longest = max(map(len, markers))
        while True:
            first, marker = self._find(markers, self.at)
            if marker and first - self.at <= most:
                text = self.buffer[self.at : first]
                self.at = first + len(marker)
                return text, marker
            if len(self.buffer) - self.at >= most + longest or not (yield from self.more()):
                return "", ""

    def _find(self, markers: tuple[str, ...], start: int) -> tuple[int, str]:
        """Returns the position of the first marker, and the marker. The marker is "" if the text has none."""
        places = [(at, marker) for marker in markers if (at := self.buffer.find(marker, start)) >= 0]
        return min(places, default=(-1, ""))

    def _emit_to(self, end: int, emit: Callable[[str], object]) -> None:
        if end > self.at:
            emit(self.buffer[self.at : end])
            self.at = end

    def _held(self, markers: tuple[str, ...]) -> int:
        """Returns the position from which text is held back, because the text from there on may become a marker. If no
        text is held back, returns the length of the buffer."""
        longest = max(map(len, markers))
        for start in range(max(self.at, len(self.buffer) - longest + 1), len(self.buffer)):
            tail = self.buffer[start:]
            if any(marker.startswith(tail) for marker in markers):
                return start
        return len(self.buffer)


_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY, _COLON, _NEXT, _STRING, _ESCAPE, _HEX, _SCALAR, _DONE, _BAD = range(12)
_SPECIAL = re.compile('["\\\\\x00-\x1f]')
_SCALARS = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_OF_SCALARS = frozenset("truefalsn-+.eE0123456789")
_MOST_DEPTH = 100


class JsonScan:
    """A scanner that follows one JSON value, piece by piece, and finds its end.

    JSON forbids control characters within strings, but models write such characters. `read` returns escapes instead.
    """

    def __init__(self) -> None:
        self._state = _VALUE
        self._closers: list[str] = []
        self._is_key = False
        self._n_hex = 0
        self._scalar = ""

    @property
    def done(self) -> bool:
        """True if the value has ended."""
        return self._state == _DONE

    @property
    def bad(self) -> bool:
        """True if the text is not JSON."""
        return self._state == _BAD

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Reads the next part of the value, from position `at` of a text. Returns the position after this part, and the
        part."""
        made: list[str] = []
        while at < len(text) and self._state not in (_DONE, _BAD):
            if self._state == _STRING:
                match = _SPECIAL.search(text, at)
                end = len(text) if match is None else match.start()
                made.append(text[at:end])
                at = end
                if match is not None:
                    made.append(self._in_string(text[at]))
                    at += 1
                continue
            char = text[at]
            if self._state == _SCALAR and char not in _OF_SCALARS:
                self._state = self._after_value() if _SCALARS.fullmatch(self._scalar) else _BAD
                continue
            self._step(char)
            if self._state == _BAD:
                break
            made.append(char)
            at += 1
        return at, "".join(made)

    def end(self) -> None:
        """Ends the text. This may complete a number, true, false or null that is outside of lists and objects."""
        if self._state == _SCALAR and not self._closers:
            self._state = _DONE if _SCALARS.fullmatch(self._scalar) else _BAD

    def _in_string(self, char: str) -> str:
        if char == '"':
            self._state = _COLON if self._is_key else self._after_value()
        elif char == "\\":
            self._state = _ESCAPE
        else:
            return json.dumps(char)[1:-1]
        return char

    def _after_value(self) -> int:
        return _NEXT if self._closers else _DONE

    def _step(self, char: str) -> None:
        state = self._state
        if state == _SCALAR:
            self._scalar += char
        elif state == _ESCAPE:
            self._state, self._n_hex = (_HEX, 4) if char == "u" else (_STRING if char in '"\\/bfnrt' else _BAD, 0)
        elif state == _HEX:
            self._n_hex -= 1
            self._state = _BAD if char not in "0123456789abcdefABCDEF" else _HEX if self._n_hex else _STRING
        elif char in " \t\r\n":
            pass
        elif state == _COLON:
            self._state = _VALUE if char == ":" else _BAD
        elif self._closers and char == self._closers[-1] and state in (_NEXT, _FIRST_ITEM, _FIRST_KEY):
            self._closers.pop()
            self._state = self._after_value()
        elif state == _NEXT:
            self._state = _BAD if char != "," else _KEY if self._closers[-1] == "}" else _VALUE
        elif state in (_KEY, _FIRST_KEY):
            self._state, self._is_key = (_STRING, True) if char == '"' else (_BAD, False)
        else:
            self._begin(char)

    def _begin(self, char: str) -> None:
        if char in "{[" and len(self._closers) < _MOST_DEPTH:
            self._closers.append("}" if char == "{" else "]")
            self._state = _FIRST_KEY if char == "{" else _FIRST_ITEM
        elif char == '"':
            self._state, self._is_key = _STRING, False
        elif char in "tfn-0123456789":
            self._state, self._scalar = _SCALAR, char
        else:
            self._state = _BAD
