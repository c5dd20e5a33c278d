"""Translates patterns of JSON schemas (ECMA-262) to the notation that llguidance reads (Rust's regex).

The notations differ within character classes: in Rust, classes may be nested, and joined with &&, -- and ~~. Each class
is therefore rewritten as ranges. llguidance 1.9 has a fault: a class with all control characters, such as [^"], also
matches an escaped quotation mark or backslash. So a class loses the control characters that it does not name.
"""

from __future__ import annotations

from collections.abc import Iterator

from llamabatch.errors import SamplingError
from llamabatch.utils.checks import show

_LAST = 0x10FFFF
_Ranges = list[tuple[int, int]]
# A negated class never includes surrogates, nor control characters other than \t, \n, \f and \r.
_NEVER: _Ranges = [(0x00, 0x08), (0x0B, 0x0B), (0x0E, 0x1F), (0xD800, 0xDFFF)]

_DIGITS: _Ranges = [(0x30, 0x39)]
_WORD: _Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: _Ranges = [
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F)),
    *((0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]
_CONTROL = {"b": 0x08, "t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
_HEX_DIGITS = {"x": 2, "u": 4}


def of_ecma(pattern: str) -> str:
    """Returns a pattern in llguidance's notation. Raises SamplingError if a class or an escape is incomplete."""
    made, at = [], 0
    while at < len(pattern):
        if pattern[at] == "\\":
            if at + 1 == len(pattern):
                raise SamplingError(f"the pattern {show(pattern)} ends with a backslash")
            made.append(pattern[at : at + 2] if pattern[at + 1] not in "\n\r" else pattern[at + 1])
            at += 2
        elif pattern[at] == "[":
            text, at = _Class(pattern, at).read()
            made.append(text)
        else:
            made.append(pattern[at])
            at += 1
    return "".join(made)


class _Class:
    """A class of characters that begins at a position of a pattern."""

    def __init__(self, pattern: str, at: int) -> None:
        self._pattern = pattern
        self._start = at
        self._at = at + 1

    def read(self) -> tuple[str, int]:
        """Returns the class in llguidance's notation, and the position after the class in the pattern."""
        is_negated = self._pattern.startswith("^", self._at)
        self._at += is_negated
        ranges: _Ranges = []
        properties: list[str] = []
        while self._next() != "]":
            found = self._member(properties)
            if len(found) == 1 and found[0][0] == found[0][1] and self._is_range():
                self._at += 1
                end = self._member(properties)
                if len(end) != 1 or end[0][0] != end[0][1] or end[0][0] < found[0][0]:
                    raise SamplingError(f"the pattern {show(self._pattern)} has an invalid range in a class")
                found = [(found[0][0], end[0][1])]
            ranges += found
        self._at += 1
        if properties:  # Unicode properties keep their names
            inner = _spelled(ranges) + "".join(properties)
            return f"[{'^' if is_negated else ''}{inner}]", self._at
        return f"[{_spelled(_others(ranges) if is_negated else _joined(ranges)) or _NOTHING}]", self._at

    def _next(self) -> str:
        if self._at >= len(self._pattern):
            raise SamplingError(f"the pattern {show(self._pattern)} has a [ without its ]")
        return self._pattern[self._at]

    def _is_range(self) -> bool:
        return self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at)

    def _member(self, properties: list[str]) -> _Ranges:
        char = self._next()
        self._at += 1
        if char != "\\":
            return [(ord(char), ord(char))]
        kind = self._next()
        self._at += 1
        if kind in "dDwWsS":
            found = {"d": _DIGITS, "w": _WORD, "s": _SPACE}[kind.lower()]
            return found if kind.islower() else _others(found)
        if kind in "pP" and self._pattern.startswith("{", self._at) and "}" in self._pattern[self._at :]:
            end = self._pattern.index("}", self._at) + 1
            properties.append(f"\\{kind}{self._pattern[self._at : end]}")
            self._at = end
            return []
        code = self._code(kind)
        return [(code, code)]

    def _code(self, kind: str) -> int:
        """Reads the rest of an escape after its letter. Returns the code point of the escaped character."""
        text = ""
        if kind in _HEX_DIGITS and self._pattern.startswith("{", self._at):
            text, _, _ = self._pattern[self._at + 1 :].partition("}")
            length = len(text) + 2
        elif kind in _HEX_DIGITS:
            text, length = self._pattern[self._at : self._at + _HEX_DIGITS[kind]], _HEX_DIGITS[kind]
        if kind not in _HEX_DIGITS:
            return _CONTROL.get(kind, ord(kind))
        try:
            code = int(text, 16)
        except ValueError:
            code = _LAST + 1
        if code > _LAST or self._at + length > len(self._pattern):
            raise SamplingError(f"the pattern {show(self._pattern)} has an incomplete \\{kind}")
        self._at += length
        return code


_NOTHING = f"^\\x00-\\x{{{_LAST:X}}}"  # a class that no character matches


def _joined(ranges: _Ranges) -> _Ranges:
    """Returns the ranges in order, with touching ranges merged."""
    made: _Ranges = []
    for first, last in sorted(ranges):
        if made and first <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(made[-1][1], last))
        else:
            made.append((first, last))
    return made


def _others(ranges: _Ranges) -> _Ranges:
    """Returns the ranges of all characters that are neither in these ranges nor in _NEVER."""
    made: _Ranges = []
    at = 0
    for first, last in _joined([*ranges, *_NEVER]):
        if first > at:
            made.append((at, first - 1))
        at = last + 1
    return [*made, (at, _LAST)] if at <= _LAST else made


def _spelled(ranges: _Ranges) -> str:
    return "".join(_pieces(ranges))


def _pieces(ranges: _Ranges) -> Iterator[str]:
    for first, last in ranges:
        yield _letter(first) if first == last else f"{_letter(first)}-{_letter(last)}"


_ESCAPES = {"\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def _letter(code: int) -> str:
    """Returns a character as it is written in a class. ASCII letters and digits do not change."""
    char = chr(code)
    if char in _ESCAPES:
        return _ESCAPES[char]
    return char if char.isascii() and char.isalnum() else f"\\x{code:02X}" if code < 0x80 else f"\\x{{{code:X}}}"
