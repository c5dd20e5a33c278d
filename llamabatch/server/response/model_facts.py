"""Facts about the served model and its file. Several dialects report these facts."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from llamabatch.errors import LlamaBatchError
from llamabatch.gguf.header import read_tensors
from llamabatch.llama.model import Model
from llamabatch.media.prompt import media_kinds
from llamabatch.request.media import IMAGE, SOUND
from llamabatch.server.request.infill import missing_marks
from llamabatch.server.request.reading import rules_of
from llamabatch.server.serving.serving import Serving

Json = dict[str, Any]


class FileFacts(NamedTuple):
    """Facts of the tensors in a file.

    Attributes:
        n_params: number of parameters.
        n_bytes: bytes of the parameters.
        weight_type: the type of most parameters, such as Q8_0; "" if the file is gone.
    """

    n_params: int = 0
    n_bytes: int = 0
    weight_type: str = ""


def file_facts(model: Model) -> FileFacts:
    """Returns the facts of a loaded model's file; zeros if the file is gone. Reads the file once for each model."""
    found = _facts.get(model)
    if found is None:
        try:
            found = _facts[model] = facts_of_file(model.path)
        except (OSError, LlamaBatchError):
            return FileFacts()
    return found


_facts: weakref.WeakKeyDictionary[Model, FileFacts] = weakref.WeakKeyDictionary()


def facts_of_file(path: Path) -> FileFacts:
    """Reads the facts of a file. Raises OSError and ModelFileError."""
    tensors = read_tensors(path)
    types: Counter[str] = Counter()
    for each in tensors:
        types[each.type_name] += each.n_elements
    n_bytes = sum(each.n_bytes for each in tensors)
    return FileFacts(sum(types.values()), n_bytes, max(types, key=types.__getitem__, default=""))


def architecture_of(model: Model) -> str:
    """Returns the architecture in the metadata of the model; "": the metadata has none."""
    return model.metadata.get("general.architecture", "")


def model_names(serving: Serving) -> list[str]:
    """Returns all valid model names for requests: the model's own names, then names of adapters."""
    return [*serving.names, *serving.client.adapters]


def model_card(serving: Serving, name: str) -> Json:
    """Returns the model's entry in ollama's list of models. /v1/models has the same entry, as in llama-server.

    Args:
        name: one of model_names.
    """
    digest = hashlib.sha256(f"{serving.fingerprint}:{name}".encode()).hexdigest()
    return card(name, file_facts(serving.model), architecture_of(serving.model), digest)


def card(name: str, facts: FileFacts, architecture: str, digest: str) -> Json:
    """Returns an entry as model_card does. The model need not be loaded."""
    return {
        "name": name,
        "model": name,
        "size": facts.n_bytes,
        "digest": digest,
        "details": details(architecture, facts),
    }


def details(architecture: str, facts: FileFacts) -> Json:
    """Returns the `details` of an entry. The model need not be loaded."""
    return {
        "parent_model": "",
        "format": "gguf",
        "family": architecture,
        "families": [architecture],
        "parameter_size": _short(facts.n_params),
        "quantization_level": facts.weight_type,
    }


def capabilities(serving: Serving) -> list[str]:
    """Returns the names of the model's capabilities: ollama's names, and also "rerank"."""
    model = serving.model
    generates = model.cannot_generate is None
    media = media_kinds(model)
    found = {
        "completion": generates,
        "embedding": model.cannot_embed is None,
        "rerank": model.cannot_classify is None,
        "vision": IMAGE in media,
        "audio": SOUND in media,
        "tools": generates,  # a message describes the tools if the chat template cannot
        "thinking": generates and rules_of(serving).thinks,
        "insert": generates and not missing_marks(model.special_ids),
    }
    return [name for name, can in found.items() if can]


def _short(n_params: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n_params >= size:
            return f"{n_params / size:.1f}{unit}"
    return str(n_params)
