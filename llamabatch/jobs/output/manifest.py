"""The manifest OUT.job.json says which job an output belongs to. It is written before the first row, so that rows of
two jobs never mix."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamabatch.errors import ConfigError, InputError
from llamabatch.jobs.output.files import PLAIN
from llamabatch.jobs.output.own_files import OwnFiles, manifest_of, without_suffix
from llamabatch.utils.checks import integer, show

FORMAT = 1  # the version of the manifest and of the other side files
_MOST_BYTES = 2**28
_MOST_DEPTH = 64
_MOST_NAME = 200  # maximum number of characters of a name in a message
_SHOWN = 5  # maximum number of differences in a message
_BEGINS = re.compile(rb'\s*\{\s*"format"\s*:')
_SUMS = re.compile(r"([0-9a-f]{8})*")


@dataclass(frozen=True)
class Ending:
    """The end of a job.

    Attributes:
        rows: the number of rows in the output.
        errors: the number of failed rows among them.
        bytes: the size of the output.
        sums: the checksums of the output's ranges in order, 8 hexadecimal digits each.
    """

    rows: int
    errors: int
    bytes: int
    sums: str


@dataclass(frozen=True)
class Manifest:
    """The identity of a job.

    Attributes:
        settings: everything that decides the content of the rows, as plain JSON: model, inputs, parameters.
        seed: a random number. This number is the id of the job, and the source of seeds for rows without a seed.
        earlier: settings of earlier runs that --force replaced, the oldest first.
        ending: the end of the job; None: rows are missing.
    """

    settings: Mapping[str, Any]
    seed: int
    earlier: tuple[Mapping[str, Any], ...] = ()
    ending: Ending | None = None

    @classmethod
    def new(cls, settings: Mapping[str, Any], seed: int) -> Manifest:
        return cls(plain(settings), seed)

    @property
    def shard(self) -> tuple[int, int]:
        i, n = self.settings["output"]["shard"]
        return i, n

    def write(self, own: OwnFiles, path: Path, *, over: bool) -> None:
        """Writes the manifest atomically. Raises OutputError, or ConfigError if the name is taken and `over` false."""
        document = {
            "settings": self.settings,
            "earlier": list(self.earlier),
            "ending": None if self.ending is None else vars(self.ending),
        }
        content = json.dumps(document, indent=1, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        file = own.create()
        try:
            file.write(first_bytes(self.seed) + content.removeprefix(b"{"))
            own.commit(file, path, over=over)
        finally:
            file.close()

    def changed_to(self, settings: Mapping[str, Any]) -> Manifest:
        """Returns the manifest of the same job with other settings."""
        given = plain(settings)
        if given == self.settings:
            return self
        if given == extended(self.settings, given):
            return replace(self, settings=given, ending=None)
        return replace(self, settings=given, earlier=(*self.earlier, self.settings), ending=None)


@dataclass(frozen=True)
class FoundManifest:
    """A file that has the name of a manifest.

    Attributes:
        manifest: the manifest; None: it cannot be read.
        problem: the reason why it cannot be read.
        is_own: the file is a manifest, perhaps a damaged one.
        is_cut: the file has only the first few bytes of a manifest, or is empty.
    """

    manifest: Manifest | None
    problem: str = ""
    is_own: bool = True
    is_cut: bool = False


def new_seed() -> int:
    """Returns a random seed for a new job."""
    return secrets.randbits(63)


def id_of(seed: int) -> str:
    """Returns the id of the job with this seed. The first line of each side file names this id."""
    return f"{seed:016x}"


def first_bytes(seed: int) -> bytes:
    """Returns the first bytes of the manifest of a job."""
    return b'{\n "format": %d,\n "seed": %d,' % (FORMAT, seed)


def read(path: Path) -> FoundManifest | None:
    """Returns the manifest, or the reason why it cannot be read; None: there is no file. Never raises."""
    try:
        content = _content(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return FoundManifest(None, error.strerror or str(error), is_own=False)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else f"no JSON: {error}"
        return FoundManifest(
            None, problem, is_own=bool(_BEGINS.match(content)), is_cut=first_bytes(0).startswith(content)
        )
    if not isinstance(document, dict) or "format" not in document or not {"settings", "seed"} & document.keys():
        return FoundManifest(None, "it is no manifest of a job", is_own=False)
    try:
        return FoundManifest(_manifest(document))
    except InputError as error:
        return FoundManifest(None, str(error))


def _content(path: Path) -> bytes:
    """Returns the bytes of a manifest. Raises OSError, also for a link, a special file or a file that is too large."""
    if stat.S_ISLNK(os.lstat(path).st_mode):
        raise OSError(0, "it is a link")
    with open(os.open(path, os.O_RDONLY | PLAIN), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "it is no regular file")
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise OSError(0, f"it has more than {_MOST_BYTES:,} bytes")
    return content


def _manifest(document: dict[str, Any]) -> Manifest:
    """Returns the manifest that a JSON document contains. Raises ConfigError for a field that is missing or has a wrong
    value."""
    format = document.get("format")
    if isinstance(format, bool) or not isinstance(format, int) or format != FORMAT:
        raise ConfigError(f"its format is {show(format)}; this version of llamabatch reads {FORMAT}")
    _check_tree(document)
    integer(ConfigError, "seed", document.get("seed"), 0, 2**63 - 1)
    earlier = document.get("earlier")
    if not isinstance(earlier, list):
        raise ConfigError(f"earlier is {show(earlier)}; it must be a list")
    for settings in (document.get("settings"), *earlier):
        _check_settings(settings)
    return Manifest(document["settings"], document["seed"], tuple(earlier), _ending(document.get("ending")))


def _check_tree(document: dict[str, Any]) -> None:
    level: list[Any] = [document]
    for _ in range(_MOST_DEPTH):
        for each in level:
            if isinstance(each, float) and not math.isfinite(each):
                raise ConfigError("it holds Infinity, NaN, or a number that is too large")
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise ConfigError(f"it is nested more than {_MOST_DEPTH} levels deep")


def _check_settings(settings: object) -> None:
    if not isinstance(settings, dict):
        raise ConfigError(f"settings is {show(settings)}; it must be an object")
    output = settings.get("output")
    if not isinstance(output, dict):
        raise ConfigError(f"settings.output is {show(output)}; it must be an object")
    shard = output.get("shard")
    if not isinstance(shard, list) or len(shard) != 2:
        raise ConfigError(f"settings.output.shard is {show(shard)}; it must be a list of two whole numbers")
    integer(ConfigError, "settings.output.shard[1]", shard[1], 1, 2**63 - 1)
    integer(ConfigError, "settings.output.shard[0]", shard[0], 1, shard[1])


def _ending(value: object) -> Ending | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ConfigError(f"ending is {show(value)}; it must be an object, or null")
    for name in ("rows", "errors", "bytes"):
        integer(ConfigError, f"ending.{name}", value.get(name), 0, 2**63 - 1)
    sums = value.get("sums")
    if not isinstance(sums, str) or not _SUMS.fullmatch(sums):
        raise ConfigError(f"ending.sums is {show(sums)}; it must be a text of hexadecimal digits")
    return Ending(value["rows"], value["errors"], value["bytes"], sums)


def output_of(path: Path) -> Path | None:
    """Returns the output that a file belongs to; None: the file does not belong to a job. An output belongs to itself.
    Links are followed.

    Raises:
        ConfigError: the manifest of the output cannot be read.
    """
    out = Path(os.path.realpath(path))
    while True:
        found = read(manifest_of(out))
        if found is not None and found.is_own:  # otherwise another program's file has the manifest's name
            if found.manifest is None:
                raise ConfigError(
                    f"{path} is no input: it seems to belong to the job of {manifest_of(out)}, which is damaged "
                    f"({found.problem}); move that file away if it belongs to no job"
                )
            return out
        shorter = without_suffix(out.name)
        if shorter is None:
            return None
        out = out.with_name(shorter)


def extended(before: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings `before`, but with the limit of `settings` if that limit is larger or None. A larger limit
    only adds rows after the finished rows, so the job stays the same."""
    old, new = before.get("limit"), settings.get("limit")
    if isinstance(old, int) and "limit" in settings and (new is None or new > old):
        return {**before, "limit": new}
    return before


def differences(before: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Returns a text such as "limit: 5, now 7" for each field that differs, in the order of the fields. A missing
    field equals None."""
    old, new = dict(_fields(before)), dict(_fields(plain(settings)))
    names = [*new, *(name for name in old if name not in new)]
    absent = "nothing"
    return [
        f"{_printable(name)}: {absent if old.get(name) is None else show(old[name])}, "
        f"now {absent if new.get(name) is None else show(new[name])}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def refuse(out: Path, changed: list[str]) -> ConfigError:
    """Returns the error for an output that was begun with other settings and the same shard."""
    more = f"; and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    return ConfigError(
        f"{out} was begun with other settings ({'; '.join(changed[:_SHOWN])}{more}). Run it as before, give another "
        "name, or go on with the change for the rows that are left: --force"
    )


def refuse_shard(out: Path, before: Sequence[int], shard: Sequence[int]) -> ConfigError:
    """Returns the error for an output that belongs to another shard."""
    theirs, ours = ("/".join(map(str, each)) for each in (before, shard))
    return ConfigError(
        f"{out} holds rows of shard {theirs}, and this is shard {ours}; give each shard an output of its own, "
        f"or go on with this one with --shard {theirs}"
    )


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings after a round trip through JSON. Raises TypeError for values without a form in JSON."""
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found


def _fields(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _fields(value, f"{above}{name}.")
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            for i, each in enumerate(value):
                yield from _fields(each, f"{above}{name}[{i}].")
        else:
            yield f"{above}{name}", value


def _printable(name: str) -> str:
    """Returns the name of a field for a message, quoted if it is not printable or too long."""
    return name if name.isprintable() and len(name) <= _MOST_NAME else show(name)
