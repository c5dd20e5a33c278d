from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

MARKER = "llamabatch_build.json"


def library_dir(module: ModuleType) -> Path:
    """The folder of the libllama in use; `LLAMA_CPP_LIB_PATH` may have moved it out of the package."""
    return Path(module.llama_cpp._lib._name).resolve().parent


def build_marker(module: ModuleType) -> Mapping[str, Any] | None:
    """What native_patches wrote about this build, or None: a stock build, or libraries from another place."""
    package = Path(str(module.__file__)).resolve().parent
    if library_dir(module) != package / "lib":
        return None
    try:
        marker = json.loads((package / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None
