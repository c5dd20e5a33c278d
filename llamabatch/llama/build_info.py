"""The build of llama.cpp in use: the folder of its libraries, and the marker that native_patches writes into it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

MARKER = "llamabatch_build.json"
"""The file that native_patches/build.py puts into the llama_cpp package: patches, flags, compiler."""


def library_dir(module: ModuleType) -> Path:
    """The folder of the libllama in use; `LLAMA_CPP_LIB_PATH` may have moved it out of the package."""
    return Path(module.llama_cpp._lib._name).resolve().parent


def build_marker(module: ModuleType) -> Mapping[str, Any] | None:
    """The marker of the libraries in use: patches, flags, compiler. None: a stock build.

    It stands beside the libraries, or in the package whose `lib` folder they are in, also where `LLAMA_CPP_LIB_PATH`
    names the folder.
    """
    folder = library_dir(module)
    for place in (folder, folder.parent) if folder.name == "lib" else (folder,):
        try:
            marker = json.loads((place / MARKER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(marker, dict):
            return marker
    return None
