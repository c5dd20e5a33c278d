"""What a model's headers say for the memory arithmetic, kept beside the verdict on its files, so that a start need not
walk a large vocabulary again."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from llamabatch import verdicts
from llamabatch.gguf_header import read_parts
from llamabatch.gguf_walk import TensorInfo
from llamabatch.model_facts import ModelFacts
from llamabatch.trial import Known

HEADERS = "header"
_VERSION = 2  # of the note


def facts_of(path: Path, known: Known) -> ModelFacts:
    """As ModelFacts.read, of files that are as `known` says. Raises ModelFileError and OSError."""
    kept = verdicts.read(HEADERS, known.key)
    try:
        return _from_note(path, known, kept)
    except (KeyError, TypeError, ValueError, AttributeError):  # none, or one of other files or of another version
        pass
    parts = read_parts(path)
    found = ModelFacts.from_headers(path, parts)
    arch = parts[0].architecture
    starts = (f"{arch}.", "general.name", "general.architecture")
    note = {
        "version": _VERSION,
        "identity": known.identity,
        "texts": {key: text for key, text in parts[0].texts().items() if key.startswith(starts)},
        "n_tokens": parts[0].n_tokens,
        "tensors": [astuple(tensor) for tensor in found.tensors],
        "parts": found.parts,
    }
    verdicts.keep(HEADERS, known.key, note)
    return found


def _from_note(path: Path, known: Known, kept: Any) -> ModelFacts:
    if kept["version"] != _VERSION or kept["identity"] != [list(each) for each in known.identity]:
        raise ValueError("the files have changed")
    tensors = tuple(
        TensorInfo(name, tuple(dims), kind, offset, n_bytes) for name, dims, kind, offset, n_bytes in kept["tensors"]
    )
    facts = ModelFacts.from_header(path, kept["texts"], tensors, kept["n_tokens"], known.n_bytes)
    return replace(facts, parts=tuple(kept["parts"]))
