"""OUT.job.json: of which job an output is. Written before the first row, so that no other job is mixed in."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamabatch.checks import show
from llamabatch.errors import ConfigError
from llamabatch.gguf_header import part_names
from llamabatch.jobs import endings
from llamabatch.jobs.files import Files
from llamabatch.model_file import file_bytes

FORMAT = 1
_SHOWN = 5  # differences in a message
_SAMPLES = 64
_SAMPLE_BYTES = 65536


@dataclass(frozen=True)
class Ending:
    """How a job ended: rows in its output, those of them that failed, and the size of the file."""

    rows: int
    errors: int
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """What a job is.

    Attributes:
        settings: all that decides what its rows are: model, inputs, parameters; plain JSON.
        seed: of the job: rows without a seed of their own draw with one made of it.
        earlier: settings that --force has overridden, the oldest in front: with these the first rows were made.
        ending: set when all rows are written.
    """

    settings: Mapping[str, Any]
    seed: int
    earlier: tuple[Mapping[str, Any], ...] = ()
    ending: Ending | None = None

    @classmethod
    def new(cls, settings: Mapping[str, Any]) -> Manifest:
        return cls(plain(settings), secrets.randbits(63))

    def write(self, files: Files, path: Path) -> None:
        """Atomically. Raises OutputError."""
        document = {
            "format": FORMAT,
            "seed": self.seed,
            "settings": self.settings,
            "earlier": list(self.earlier),
            "ending": None if self.ending is None else vars(self.ending),
        }
        files.replace_with(path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "replace"))

    def changed_to(self, settings: Mapping[str, Any]) -> Manifest:
        """The same job, going on with other settings."""
        given = plain(settings)
        if given == self.settings:
            return self
        if given == extended(self.settings, given):
            return replace(self, settings=given, ending=None)
        return replace(self, settings=given, earlier=(*self.earlier, self.settings), ending=None)


def read(path: Path) -> Manifest | None:
    """None where there is none.

    Raises:
        ConfigError: it cannot be read, or is no manifest of this format.
    """
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT:
            raise ConfigError(f"{path} has format {show(found['format'])}; this version of llamabatch reads {FORMAT}")
        ending = None if found["ending"] is None else Ending(**{k: int(v) for k, v in found["ending"].items()})
        if not isinstance(found["settings"], dict):
            raise TypeError("settings")
        return Manifest(found["settings"], int(found["seed"]), tuple(found["earlier"]), ending)
    except FileNotFoundError:
        return None
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path}, which says of which job the output is, cannot be read ({type(error).__name__}: {error}); "
            f"--force goes on without it"
        ) from error


def path_of(out: Path) -> Path:
    """Where the manifest of an output stands."""
    return out.with_name(out.name + endings.MANIFEST)


def output_of(path: Path) -> Path | None:
    """The output of a job that a file is, or is kept beside; None: it is of no job. Links are followed."""
    out = Path(os.path.realpath(path))
    while True:
        with contextlib.suppress(ConfigError):  # a file of that name that is none of ours
            if read(path_of(out)) is not None:
                return out
        shorter = next((out.name.removesuffix(each) for each in endings.ALL if out.name.endswith(each)), "")
        if not shorter:
            return None
        out = out.with_name(shorter)


def extended(before: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings before, with the limit of now if that is a larger one or none: rows come after those that are done,
    which stay what they are."""
    old, new = before.get("limit"), settings.get("limit")
    if isinstance(old, int) and "limit" in settings and (new is None or new > old):
        return {**before, "limit": new}
    return before


def differences(before: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """One "field: before, then now" for each field that differs, in the order of the fields."""
    old, new = dict(_fields(before)), dict(_fields(plain(settings)))
    names = [*new, *(name for name in old if name not in new)]
    absent = "nothing"
    return [
        f"{name}: {show(old[name]) if name in old else absent}, now {show(new[name]) if name in new else absent}"
        for name in names
        if (name in old, old.get(name)) != (name in new, new.get(name))
    ]


def refuse(out: Path, changed: list[str]) -> ConfigError:
    """The error for an output that was begun with other settings, of the same shard."""
    more = f"; and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    return ConfigError(
        f"{out} was begun with other settings ({'; '.join(changed[:_SHOWN])}{more}). Run it as before, give another "
        "name, or go on with the change for the rows that are left: --force"
    )


def refuse_shard(out: Path, before: Sequence[int], shard: Sequence[int]) -> ConfigError:
    """The error for the output of another shard, with which nothing goes on."""
    theirs, ours = ("/".join(map(str, each)) for each in (before, shard))
    return ConfigError(
        f"{out} holds rows of shard {theirs}, and this is shard {ours}; give each shard an output of its own, "
        f"or go on with this one with --shard {theirs}"
    )


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As it looks after a way through a file. Raises TypeError for what JSON does not know."""
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found


def model_identity(model: Path) -> dict[str, Any]:
    """What tells a model's file from others, wherever it lies: "name" without folders, "size" in bytes of all its
    parts, and "sha256" of 64 samples of each part, 64 KiB each at even distances, the first and the last bytes among
    them. Two models of one shape share their size, not their weights. Raises OSError."""
    digest = hashlib.sha256()
    for part in (model.with_name(name) for name in part_names(model.name)):
        with part.open("rb") as file:
            last = max(0, part.stat().st_size - _SAMPLE_BYTES)
            for offset in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return {"name": model.name, "size": file_bytes(model), "sha256": digest.hexdigest()}


def _fields(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _fields(value, f"{above}{name}.")
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            for i, each in enumerate(value):
                yield from _fields(each, f"{above}{name}[{i}].")
        else:
            yield f"{above}{name}", value
