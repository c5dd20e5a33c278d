"""Translates formats and patterns of a JSON schema into expressions of a Lark terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator

from llamabatch.request.lark_rules import slashed

_DATE = "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]+)?([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_DAYS = "[0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D"
_PARTS_OF_DAY = "[0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"({_BYTE}\.){{3}}{_BYTE}"
_HEX = "[0-9a-fA-F]"
_H16 = f"{_HEX}{{1,4}}"
_IPV6 = "|".join(
    (
        f"({_H16}:){{7}}{_H16}",
        f"({_H16}:){{1,7}}:",
        *(f"({_H16}:){{1,{7 - n}}}(:{_H16}){{1,{n}}}" for n in range(1, 7)),
        f":(:{_H16}){{1,7}}",
        "::",
    )
)
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_PCHAR = rf"([a-zA-Z0-9\-._~!$&'()*+,;=:@]|%{_HEX}{{2}})"
_AUTHORITY = (
    rf"(([a-zA-Z0-9\-._~!$&'()*+,;=:]|%{_HEX}{{2}})*@)?(\[({_IPV6})\]|([a-zA-Z0-9\-._~!$&'()*+,;=]|%{_HEX}{{2}})*)"
    "(:[0-9]*)?"
)
# The formats in json_schema.FORMATS follow RFC 3339 (dates, times, durations), 5321 (email), 1123 (hostname), 4291
# (ipv6), 4122 (uuid) and 3986 (uri).
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"({_DATE})[tT]{_TIME}",
    "duration": rf"P([0-9]+W|T({_PARTS_OF_DAY})|({_DAYS})(T({_PARTS_OF_DAY}))?)",
    "email": rf"{_ATOM}(\.{_ATOM})*@({_HOST}|\[{_IPV4}\])",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": f"{_HEX}{{8}}-({_HEX}{{4}}-){{3}}{_HEX}{{12}}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(//{_AUTHORITY}(/{_PCHAR}*)*|/({_PCHAR}+(/{_PCHAR}*)*)?|{_PCHAR}+(/{_PCHAR}*)*|)"
    rf"(\?({_PCHAR}|[/?])*)?(#({_PCHAR}|[/?])*)?",
    "unknown": "(?s:.*)",
}


def of_format(name: str) -> str:
    """Returns an expression that matches the texts of a format in json_schema.FORMATS."""
    return f"/{slashed(_FORMATS[name])}/"


def containing(text: str) -> str:
    """Returns an expression that matches any text with `text` in it."""
    escaped = re.escape(text).replace("\\ ", " ").replace("\\<", "<").replace("\\>", ">")
    return f"/(?s:.*){slashed(escaped)}(?s:.*)/"


def found_in_text(pattern: str) -> str:
    """Returns an expression that matches any text with a match of a JSON schema's pattern in it."""
    return " | ".join(_branches(pattern))


def _branches(pattern: str, depth: int = 0) -> Iterator[str]:
    branches = _alternatives(pattern)
    if branches is None:
        yield f"/{_of_lark(pattern)}/"  # llguidance refuses the pattern, because its parentheses do not match
        return
    for branch in branches:
        inner = branch[1:-1].removeprefix("?:")
        if depth < _DEEPEST and _is_group(branch) and not inner.startswith("?"):
            yield from _branches(inner, depth + 1)
            continue
        body = branch.removeprefix("^")
        start = "" if body != branch else "(?s:.*)"
        ends = body.endswith("$") and not _ESCAPED_END.search(body)
        body, end = (body[:-1], "") if ends else (body, "(?s:.*)")
        yield f"/{start}(?:{_of_lark(body)}){end}/"


def _of_lark(pattern: str) -> str:
    """Returns a pattern for Lark. Digits and letters are ASCII only, as in ECMA-262 and llguidance's own schemas."""
    return slashed(re.sub(r"\\(.)", lambda found: _CLASSES.get(found[1], found[0]), pattern, flags=re.DOTALL))


_DEEPEST = 8  # maximum number of nested groups around a whole pattern
_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9a-zA-Z_]", "W": "[^0-9a-zA-Z_]"}
_ESCAPED_END = re.compile(r"(?<!\\)(\\\\)*\\\$$")
# A piece of a regular expression is an escape, a class with its escapes, or any other character.
_PIECE = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def _alternatives(pattern: str) -> list[str] | None:
    """Splits a pattern at the bars (|) outside of groups. Returns None if the parentheses do not match."""
    found, depth, start = [], 0, 0
    for piece in _PIECE.finditer(pattern):
        depth += (piece[0] == "(") - (piece[0] == ")")
        if depth < 0:
            return None
        if piece[0] == "|" and not depth:
            found.append(pattern[start : piece.start()])
            start = piece.end()
    return None if depth else [*found, pattern[start:]]


def _is_group(regex: str) -> bool:
    """Returns True if the whole expression is one group, without an operator after the group."""
    depth = 0
    for piece in _PIECE.finditer(regex):
        depth += (piece[0] == "(") - (piece[0] == ")")
        if not depth:
            return piece[0] == ")" and piece.end() == len(regex)
    return False
