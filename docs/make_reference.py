"""Writes docs/reference.md: every public name with its signature and docstring. `python docs/make_reference.py`."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llamabatch

PAGE = Path(__file__).with_name("reference.md")
_HEAD = """# Reference

Every public name of `llamabatch`, from its docstring (`python docs/make_reference.py` writes this page). Times are in
seconds, speeds in tokens a second, memory in bytes unless a name says otherwise.
"""
_LONGEST_DEFAULT = 60
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$")


def page() -> str:
    """The whole page."""
    names = [name for name in llamabatch.__all__ if name != "__version__"]
    parts = [_HEAD, *(part for name in names for part in _entry(name, getattr(llamabatch, name)))]
    return "\n".join(parts).rstrip() + "\n"


def _entry(name: str, thing: Any) -> Iterator[str]:
    yield f"\n## {name}\n"
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        yield f"`class {name}({', '.join(base.__name__ for base in thing.__bases__)})`\n"
    elif typing.is_typeddict(thing):
        yield f"`class {name}(TypedDict)`\n"
    elif inspect.isclass(thing) and not issubclass(thing, enum.Enum) and not dataclasses.is_dataclass(thing):
        yield f"```\n{name}{_signature(thing)}\n```\n"
    yield _text(inspect.getdoc(thing) or "")
    if not inspect.isclass(thing):
        return
    if issubclass(thing, enum.Enum):
        yield f"\nValues: {', '.join(f'`{member.value}`' for member in thing)}"
    elif dataclasses.is_dataclass(thing):
        yield from _fields(thing)
    for member, value in _members(thing).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if member.startswith("_") or not inspect.isfunction(function) or not inspect.getdoc(function):
            continue
        title = f"{name}.{member}" + ("" if isinstance(value, property) else _signature(function))
        yield f"\n### {name}.{member}\n\n```\n{title}\n```\n"
        yield _text(inspect.getdoc(function) or "")


def _members(thing: Any) -> dict[str, Any]:
    """Members that a class and its bases in this package define, the class's own first."""
    ours = [base for base in thing.__mro__ if base.__module__.startswith("llamabatch")]
    members: dict[str, Any] = {}
    for base in ours:
        members |= {name: value for name, value in vars(base).items() if name not in members}
    return members


def _fields(thing: Any) -> Iterator[str]:
    yield "\n| field | type | default | |\n|---|---|---|---|"
    for field in dataclasses.fields(thing):
        default = "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        if len(default) > _LONGEST_DEFAULT:
            default = f"`{type(field.default).__name__}()`"
        kind = str(field.type).replace("|", "\\|")
        yield f"| `{field.name}` | `{kind}` | {default} | {field.metadata.get('help', '')} |"


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    signature = signature.replace(parameters=parameters)
    if len(str(signature)) < 100:
        return re.sub(r"ForwardRef\((\w+)\)", r"\1", str(signature).replace("'", ""))  # of named tuples, before 3.14
    lines, keywords = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not keywords:
            keywords = True
            lines.append("*")
        lines.append(str(p).replace("'", ""))
    end = "" if signature.return_annotation is signature.empty else f" -> {signature.return_annotation}"
    return "(\n    " + ",\n    ".join(lines) + f",\n){end}"


def _text(doc: str) -> str:
    """A docstring as Markdown: headings of its sections bold, their entries as lists."""
    lines, section = [], ""
    for line in doc.splitlines():
        heading = _SECTION.match(line)
        if heading:
            section = heading[1]
            lines.append(f"**{line}**\n")
        elif not section or not line.startswith("    "):
            section = section if not line else ""
            lines.append(line)
        elif line.startswith("     ") or section in ("Returns", "Yields"):
            lines.append(("" if section in ("Returns", "Yields") else "  ") + line.strip())
        else:
            lines.append(re.sub(r"^    ([\w, *]+):", r"- `\1`:", line) if ":" in line else f"- {line.strip()}")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
