"""Where llamabatch keeps what it made and may make again: wheels, verdicts, profiles.

`native_patches/build.py` runs before anything is installed and so has its own copy of `cache_dir`; a test
holds the two together.
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """The user's cache folder for llamabatch; `LLAMABATCH_CACHE` overrides it. The folder need not exist yet."""
    override = os.environ.get("LLAMABATCH_CACHE")
    if override:
        return Path(override).expanduser()
    return Path(platformdirs.user_cache_dir("llamabatch", appauthor=False))


def bundled_model() -> Path:
    """The file behind the name `tiny`. It may be missing in a checkout where it has not been built."""
    return Path(__file__).parent / "models" / "tiny.gguf"
