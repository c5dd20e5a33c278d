"""Types of command line parameters. They convert a text to a value, or raise a usage error with an example."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from llamabatch.scheduler.policies import STRATEGIES
from llamabatch.utils.paths import TINY, absolute


class AutoInt(click.ParamType):  # type: ignore[type-arg]  # generic in some releases of click only
    """A whole number, "auto", or one of `words`."""

    def __init__(self, *words: str) -> None:
        self._words = ("auto", *words)
        self.name = "|".join(("integer", *self._words))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self._words or isinstance(value, int):
            return value
        try:
            return int(value)
        except ValueError:
            words = " nor ".join(map(repr, self._words))
            self.fail(f"{value!r} is neither a whole number nor {words}", param, ctx)


class _Unset:
    """The type of UNSET."""


UNSET = _Unset()
"""The value of an option given as "none". The field becomes None. click uses None for an option that is missing."""


class OrNone(click.ParamType):  # type: ignore[type-arg]
    """A number of the type `kind`, or "none"."""

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = click.INT if kind is int else click.FLOAT
        self.name = self._kind.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, _Unset) or (isinstance(value, str) and value.lower() == "none"):
            return UNSET
        return self._kind.convert(value, param, ctx)


class Shares(click.ParamType):  # type: ignore[type-arg]
    """A tuple of numbers, given with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(float(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 3,1", param, ctx)


class Tags(click.ParamType):  # type: ignore[type-arg]
    """A pair of texts, given with a comma between them."""

    name = "start,end"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        start, comma, end = value.partition(",")
        if not comma:
            self.fail(f"{value!r} is not a pair of tags such as '<think>,</think>'", param, ctx)
        return start, end


class Bias(click.ParamType):  # type: ignore[type-arg]
    """A pair of a token id and the bias of its logit."""

    name = "id=bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        token_id, _, bias = value.partition("=")
        try:
            return int(token_id), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not a token id and a bias such as 13=-5.5", param, ctx)


class Param(click.ParamType):  # type: ignore[type-arg]
    """A pair of a name (a field of SamplingParams or its alias) and a value. A value that is not valid JSON is taken as
    a text."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        field, is_given, text = value.partition("=")
        if not is_given:
            self.fail(f"{value!r} is not a name and a value such as n=3", param, ctx)
        try:
            return field.replace("-", "_"), json.loads(text)
        except ValueError as error:
            if text.lstrip()[:1] in ("[", "{", '"'):
                quoted = json.dumps(text, ensure_ascii=False)
                self.fail(
                    f"the value of {field} is no valid JSON ({error}); to give it as a text, write {quoted}",
                    param,
                    ctx,
                )
            return field.replace("-", "_"), text


class File(click.ParamType):  # type: ignore[type-arg]
    """An absolute path. "-" and "" stay as they are; "-" means stdout."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return Path(value if str(value) in ("-", "") else absolute(value))


class ScaledFile(click.ParamType):  # type: ignore[type-arg]
    """A pair of a path and a scale. The scale is the number after the last equals sign, or 1 without a number."""

    name = "file[=scale]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        path, _, scale = value.rpartition("=")
        try:
            return (path, float(scale)) if path else (value, 1.0)
        except ValueError:
            return value, 1.0  # the equals sign is part of the file name


class Names(click.ParamType):  # type: ignore[type-arg]
    """A tuple of names of strategies, given with commas between them; () for "all"."""

    name = "all|names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in value.split(",") if name.strip())
        if not names:
            self.fail(f"{value!r} names no strategy; give all, or some of {', '.join(STRATEGIES)}", param, ctx)
        return () if "all" in names else names


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """A tuple of whole numbers, given with commas between them; () for "auto"."""

    name = "auto|integers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return () if value == "auto" else tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor a list such as 1,2,4,8", param, ctx)


def _values(line: str) -> list[str]:
    """Returns the values of a CSV line; empty if the line is not valid CSV."""
    try:
        return next(csv.reader([line], skipinitialspace=True), [])
    except csv.Error:
        return []


class Columns(click.ParamType):  # type: ignore[type-arg]
    """A tuple of names of columns, given with commas between them; or "all". A name that contains a comma must be in
    double quotes, as in CSV."""

    name = "all|names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple) or value == "all":
            return value
        names = tuple(name for name in _values(value) if name)
        if not names:
            self.fail(f"{value!r} names no column; give names such as label,source, or all", param, ctx)
        return names


class CachedName(click.ParamType):  # type: ignore[type-arg]
    """The name of a model in the caches."""

    name = "name"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in _cached(incomplete)]


class ModelName(click.ParamType):  # type: ignore[type-arg]
    """The name of a model. A shell completes it to folders, *.gguf files and the names in the caches."""

    name = "model"

    def split_envvar_value(self, rv: str) -> list[str]:
        """Returns the whole value as one name, since a name may contain blanks. For a repeatable option, click would
        split the value at blanks."""
        return [rv]

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        names = [TINY] if TINY.startswith(incomplete) else []
        return [CompletionItem(name) for name in (*names, *_files(incomplete, (".gguf",)), *_cached(incomplete))]


class Text(click.ParamType):  # type: ignore[type-arg]
    """A text. The library checks its value. A shell completes it to one of `choices`."""

    name = "text"

    def __init__(self, choices: tuple[str, ...]) -> None:
        self.choices = choices

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(choice) for choice in self.choices if choice.startswith(incomplete)]


def _cached(incomplete: str) -> list[str]:
    from llamabatch.gguf.model_cache import cached_models  # imported late, since only completions need it

    return [model.name for model in cached_models() if model.name.startswith(incomplete)]


def _files(incomplete: str, endings: tuple[str, ...]) -> list[str]:
    """Returns paths that begin with `incomplete`: folders with a final slash, and files with one of the `endings`."""
    folder, start = os.path.split(incomplete)
    try:
        entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda entry: entry.name)
        shown = [entry for entry in entries if entry.name.startswith(start) and (start or entry.name[0] != ".")]
        return [
            os.path.join(folder, entry.name) + ("/" if entry.is_dir() else "")
            for entry in shown
            if entry.is_dir() or entry.name.lower().endswith(endings)
        ]
    except OSError:
        return []


class Texts(click.ParamType):  # type: ignore[type-arg]
    """A tuple of texts, given with commas between them. A text that contains a comma must be in double quotes, as in
    CSV."""

    name = "texts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        texts = tuple(text for text in _values(value) if text)
        if not texts:
            self.fail(f"{value!r} holds no text; give some, as in yes,no", param, ctx)
        return texts


class Shard(click.ParamType):  # type: ignore[type-arg]
    """A part and the number of parts, written as 1/4. Parts count from 1."""

    name = "i/n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        try:
            i, n = value.split("/")
            return int(i), int(n)
        except ValueError:
            self.fail(f"{value!r} is not a part and a whole such as 1/4", param, ctx)
