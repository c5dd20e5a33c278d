"""Rules of a grammar in Lark's notation. In the grammar, the marks of a model family may be special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from llamabatch.errors import SamplingError


class Raw(NamedTuple):
    """A regular expression in a grammar, and a text that it matches."""

    regex: str
    sample: str


Part = str | Raw
Spell = Callable[[str], str]  # a mark -> its form in Lark: a text in quotes, or the name of a special token


class Rules:
    """Rules of a grammar.

    Args:
        marks: the texts that may be special tokens.
        spell: returns the form of a mark in Lark.

    Attributes:
        about: the purpose of the rules that come next. rule() writes this text as a comment, and about_line() reads the
            comment.
    """

    def __init__(self, marks: tuple[str, ...], spell: Spell) -> None:
        self.about = ""
        self._lines: list[str] = []
        self._terminals: dict[str, str] = {}  # content of a terminal -> its name
        self._left = MAX_CHARS
        self._marks = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")
        self._spell = spell

    def __str__(self) -> str:
        return "".join(self._lines)

    def rule(self, name: str, right: str, *, says: bool = True) -> str:
        """Adds a rule, or a terminal if its name has capital letters. Returns the name.

        Args:
            says: True: `about` is added as a comment. False: not added, because another rule has this comment.
        """
        self._left -= len(right)
        if self._left < 0:
            raise SamplingError(
                f"tools are refused: the grammar for {self.about} has more than {MAX_CHARS:,} characters"
            )
        about = f"{_COMMENT}{self.about}" if says and self.about else ""
        self._lines.append(f"{name}: {right}{about}\n")
        return name

    def add(self, others: Rules) -> None:
        self._lines += others._lines

    def lazy(self, name: str, content: str, end: str, start: str = "") -> str:
        """Adds a rule that matches `start`, then `content` up to the first `end`, then `end`. All three are expressions
        of a terminal."""
        if content not in self._terminals:
            self._terminals[content] = self.rule(name.upper(), content)
        self.rule(f"{name}[lazy]", f"{start} {self._terminals[content]} {end}".strip(), says=False)
        return name

    def up_to(self, end: str) -> str:
        """Returns an expression for any text up to and including the first `end`. `end` begins with a mark."""
        mark = self._marks.match(end)
        assert mark is not None
        if self._spell(mark[0]) == quoted(mark[0]):
            return self.lazy("any", ANY, quoted(end))
        return f"{ANY} {self.text(end)}"  # free text cannot contain a special token

    def text(self, *parts: Part) -> str:
        """Returns an expression for literal text. Marks in the text may be special tokens."""
        made: list[str] = []
        for part in parts:
            if isinstance(part, Raw):
                made.append(f"/{part.regex}/")
                continue
            at = 0
            for found in self._marks.finditer(part):
                made += [quoted(part[at : found.start()]) if found.start() > at else "", self._spell(found[0])]
                at = found.end()
            made.append(quoted(part[at:]) if part[at:] else "")
        return " ".join(filter(None, made))


ANY = "/(?s:.*)/"
GUIDANCE = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})", "json_allowed_escapes": 'nrbtf\\"'}  # options of %json
MAX_CHARS = 2**18  # maximum number of characters in a grammar
_COMMENT = " // \x1f"  # starts the comment of a rule; the words of a comment never contain \x1f


def quoted(text: str) -> str:
    """Returns a string of Lark: a JSON string, except that Lark's lexer accepts U+007F only as an escape.

    Marks are also written in this form, except those that are special tokens.
    """
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def slashed(regex: str) -> str:
    """Returns a regular expression, escaped so that it can be written between slashes."""
    escaped = re.sub(r"\\.|/", lambda found: found[0] if len(found[0]) > 1 else r"\/", regex, flags=re.DOTALL)
    return escaped.replace("\n", r"\n").replace("\r", r"\r")


def form_of(kind: str, text: str) -> str | None:
    """Returns the right side of a Lark rule for a Structure (kind and text); None if the text is a whole grammar."""
    if kind == "json":
        schema = json.loads(text)
        given = schema.get("x-guidance", {})
        guidance = {**GUIDANCE, **given} if isinstance(given, dict) else given
        return f"%json {json.dumps({**schema, 'x-guidance': guidance})}"
    if kind == "regex":
        return f"/{slashed(text)}/"
    return " | ".join(map(quoted, json.loads(text))) if kind == "choice" else None


def about_line(lark: str, number: int) -> str:
    """Returns the comment (the purpose) of the rule in line `number`; "": there is no comment. Lines count from 1."""
    lines = lark.split("\n")
    line = lines[number - 1] if 0 < number <= len(lines) else ""
    return line.rpartition(_COMMENT)[2] if _COMMENT in line else ""


TEXT = "TEXT"  # prefix of terminals for arguments that are texts. The trial checks each such terminal alone
PARAMETERS = "the parameters"  # stands for a function's parameters in the comment of a rule
CALL = "call"  # name of the rule for a call of any function; with a number: for a call of one function


def without_call(lark: str, number: int) -> tuple[str, str] | None:
    """Removes one function from a grammar of calls. Line `number` is part of the function's rules. Returns the new
    grammar, and the comment of the function's rule. Returns None if the line belongs to no function, or if the grammar
    has no other function."""
    lines = lark.split("\n")
    rule = _OF_FUNCTION.match(lines[number - 1]) if 0 < number <= len(lines) else None
    at, calls = _calls(lines)
    name = f"{CALL}{rule[1]}" if rule is not None else ""
    others = [call for call in calls if call != name]
    if rule is None or not others or len(others) == len(calls):
        return None
    lines[at] = f"{CALL}: {' | '.join(others)}"
    about = about_line(lark, _line_of(name, lines))
    return "\n".join(line for line in lines if not line.startswith(f"{TEXT}{rule[1]}_")), about


def each_call(lark: str) -> Iterator[tuple[int, str]]:
    """Yields (line number of the rule, grammar) for each function in a grammar of calls. The new grammar allows only
    calls of this function."""
    lines = lark.split("\n")
    at, calls = _calls(lines)
    for name in calls:
        yield _line_of(name, lines), "\n".join([*lines[:at], f"{CALL}: {name}", *lines[at + 1 :]])


def _calls(lines: list[str]) -> tuple[int, list[str]]:
    """Returns the index of the line with the rule CALL, and the rule names of the functions; (0, []) if there is no
    rule CALL."""
    at = next((at for at, line in enumerate(lines) if line.startswith(f"{CALL}: ")), None)
    return (0, []) if at is None else (at, lines[at].partition(": ")[2].split(" | "))


def _line_of(name: str, lines: list[str]) -> int:
    return next(k for k, line in enumerate(lines, 1) if line.startswith(f"{name}: "))


_OF_FUNCTION = re.compile(r"[A-Za-z]+(\d+)")
