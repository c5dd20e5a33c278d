"""Lists and removes downloaded models in our cache folder and in the cache of huggingface_hub. Does not need that
package."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llamabatch.errors import InputError, ModelFileError
from llamabatch.gguf import resolve
from llamabatch.gguf.header import part_names
from llamabatch.utils.checks import nearest, show
from llamabatch.utils.paths import HUB, cache_dir, hub_home

_QUANTISATION = re.compile(
    r"(?<![a-z0-9])((?:ud-)?(?:i?q\d|tq\d|mxfp4|nvfp4)(?:_[a-z0-9]+)*|bf16|f16|f32|fp16)(?![a-z0-9_])", re.IGNORECASE
)


@dataclass(frozen=True)
class CachedModel:
    """A model in a cache.

    Attributes:
        name: the name to give to -m or LLM.
        quantisation: as in the name of its file, for example Q4_K_M; None if the name has no quantisation.
        n_bytes: size of all its parts.
        modified_s: time of the download, seconds since 1970.
        path: the file, or the first part.
        files: all parts.
    """

    name: str
    quantisation: str | None
    n_bytes: int
    modified_s: float
    path: Path
    files: tuple[Path, ...]


def hub_folder() -> Path:
    """Returns the folder of huggingface_hub's cache, as set by its environment variables. The folder need not exist."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expanduser(given)) if given else hub_home() / "hub"


def cached_models() -> list[CachedModel]:
    """Returns all models in both caches, sorted by name, without unfinished downloads."""
    return sorted([*_of_addresses(), *_of_the_hub()], key=lambda model: model.name.lower())


def find(name: str, models: list[CachedModel]) -> CachedModel:
    """Returns the model with this name (with or without "hf:"), or the only cached model of the repository `name`.

    Raises:
        ModelFileError: no model or several models have this name.
    """
    wanted = name.removeprefix(HUB).lower()
    exact = [model for model in models if model.name.lower() == wanted]
    found = exact or [model for model in models if re.split("[:@]", model.name.lower())[0] == wanted]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(model.name for model in found)
        raise ModelFileError(f"{show(name)} is the name of {len(found)} models in the cache; give one of {names}")
    known = [model.name for model in models]
    raise ModelFileError(f"there is no model {show(name)} in the cache{nearest(name, known) if known else ''}")


def remove(model: CachedModel) -> int:
    """Deletes a model's files and the folders that are then empty. Returns the model's bytes. Raises InputError."""
    try:
        if _folder_of_addresses() in model.path.parents:
            shutil.rmtree(model.path.parent)
        else:
            _remove_from_the_hub(model)
    except OSError as error:
        raise InputError(f"{model.name} cannot be removed: {error}") from error
    return model.n_bytes


def quantisation(name: str) -> str | None:
    """Returns the last quantisation in the name of a file, or None."""
    found = _QUANTISATION.findall(name.rsplit("/", 1)[-1])
    return found[-1].upper() if found else None


def _folder_of_addresses() -> Path:
    return cache_dir() / "models"


def _of_addresses() -> Iterator[CachedModel]:
    from llamabatch.gguf.download import RECORD, read_record  # imported late, because it imports urllib and ssl

    for record in _folder_of_addresses().glob(f"*/*.gguf{RECORD}"):
        path = record.with_name(record.name.removesuffix(RECORD))
        names = part_names(path.name)
        known = read_record(record)
        if known is None or path.name != names[0]:
            continue
        with contextlib.suppress(OSError):  # a part is missing, or the model is being removed
            yield _model(known.url, path, [path.with_name(name) for name in names])


def _of_the_hub() -> Iterator[CachedModel]:
    for repo in hub_folder().glob("models--*"):
        repo_id = "/".join(repo.name.split("--")[1:])
        heads = _heads(repo)
        seen: set[Path] = set()
        snapshots = sorted((repo / "snapshots").glob("*"), key=lambda folder: (folder.name != heads, folder.name))
        for snapshot in snapshots:
            revision = "" if snapshot.name == heads else f"@{snapshot.name[:8]}"
            names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
            for first in sorted({part_names(name)[0] for name in names}):
                files = [snapshot / name for name in part_names(first)]
                if not seen.issuperset(file.resolve() for file in files):
                    with contextlib.suppress(OSError):
                        yield _model(f"{repo_id}{revision}:{_short(first, names)}", files[0], files)
                seen.update(file.resolve() for file in files)


def _heads(repo: Path) -> str:
    """Returns the commit of main in a repository's folder, or "" if there is none."""
    try:
        return (repo / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _short(file: str, names: list[str]) -> str:
    """Returns the part of a model's name after the colon: the quantisation if it is unique, else the file's name."""
    short = quantisation(file)
    try:
        if short is not None and resolve.choose(names, short, "") == file:
            return short
    except ModelFileError:
        pass
    return file


def _model(name: str, path: Path, files: list[Path]) -> CachedModel:
    """Returns a CachedModel. Raises OSError if a file is missing."""
    stats = [file.stat() for file in files]
    size, newest = sum(stat.st_size for stat in stats), max(stat.st_mtime for stat in stats)
    return CachedModel(name, quantisation(path.name), size, newest, path, tuple(files))


def _remove_from_the_hub(model: CachedModel) -> None:
    """Deletes the links of all snapshots to the model's blobs, and then the blobs. Raises OSError."""
    repo = next(folder for folder in model.path.parents if folder.parent == hub_folder())
    links: dict[Path, list[Path]] = defaultdict(list)
    for path in (repo / "snapshots").rglob("*"):
        if path.is_symlink() or path.is_file():
            links[path.resolve()].append(path)
    for blob in [file.resolve() for file in model.files]:
        for path in links.pop(blob, []):
            path.unlink()
        blob.unlink(missing_ok=True)  # if the model's file was not a link, the blob is gone already
    if not links:
        shutil.rmtree(repo)
