"""Finds the mmproj file of a model: the file of its encoder for pictures and audio.

The file is given by path, or lies next to the model or in its repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from llamabatch.errors import ModelFileError
from llamabatch.gguf import resolve as models
from llamabatch.utils.paths import AUTO, HUB, TINY, is_remote, model_name, one_line

_TYPES = ("f16", "bf16", "q8_0", "f32")  # types of weights, the preferred type first
_WORD = re.compile(r"[a-z0-9.]+(?:_[0-9klms]\b)*")  # q8_0 is one word


def resolve_mmproj(mmproj: str, model: str) -> Path:
    """Returns the path of an mmproj file. Raises as resolve.

    Args:
        mmproj: a name as for a model, or "auto" for the file next to the model or in its repository.

    Raises:
        ModelFileError: for "auto", there is no mmproj file for this model, or more than one.
    """
    if mmproj != AUTO:
        try:
            return models.resolve(mmproj)
        except ModelFileError as error:
            said = str(error).partition("; give the path")[0]  # drops advice meant for models, such as "tiny"
            raise ModelFileError(f"mmproj: {said}; give the path of an mmproj file, or {AUTO!r}") from error
    model = model_name(model)
    if model.startswith(HUB):
        return models.fetch_reference(model, pick=choose)
    if model == TINY or is_remote(model):
        raise ModelFileError(
            f"no folder is known for {model}, in which its mmproj file might lie; give its path as mmproj (--mmproj)"
        )
    path = models.resolve(model)
    return path.parent / choose(beside(path), path.name, one_line(path.parent))


def beside(model: Path) -> list[str]:
    """Returns the names of the mmproj files in a model's folder."""
    return sorted(name for name in models.gguf_files(model.parent) if "mmproj" in name.lower())


def choose(names: Iterable[str], model: str | None, where: str) -> str:
    """Chooses the mmproj file for a model among the files of its folder or repository.

    The name of the chosen file has the most words in common with the model's name. If several files have equally many,
    F16 is preferred.

    Args:
        model: the name of the model's file, or some words of this name; None: no words.

    Raises:
        ModelFileError: there is no mmproj file, or more than one that fits.
    """
    found = [name for name in names if "mmproj" in name.lower() and name.lower().endswith(".gguf")]
    if not found:
        raise ModelFileError(f"{where} has no file with mmproj in its name; give the path of one as mmproj (--mmproj)")
    wanted = _words(model or "")
    shared = {name: len(wanted & _words(name)) for name in found}
    found = [name for name in found if shared[name] == max(shared.values())]
    by_type = [name for kind in _TYPES for name in found if kind in _WORD.findall(name.lower().replace(".gguf", ""))]
    unlike = {frozenset(_words(name)) for name in found}
    if len(unlike) > 1 or (len(found) > 1 and not by_type):
        raise ModelFileError(f"{where} has {', '.join(sorted(found))}; give the path of one as mmproj (--mmproj)")
    return (by_type or found)[0]


def _words(name: str) -> set[str]:
    """Returns the words of a file's name, except "mmproj", "model" and types of weights."""
    words = set(_WORD.findall(Path(name).name.lower().replace(".gguf", "")))
    return {each for each in words if each not in (*_TYPES, "mmproj", "model")}
