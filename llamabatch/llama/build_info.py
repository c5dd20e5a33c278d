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
    """The marker of this build: patches, flags, compiler. None: a stock build, or libraries from another folder."""
    package = Path(str(module.__file__)).resolve().parent
    if library_dir(module) != package / "lib":
        return None
    try:
        marker = json.loads((package / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None
