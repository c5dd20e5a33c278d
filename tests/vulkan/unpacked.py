"""Unpacks wheels of native_patches into the cache, so that .venv keeps its own build."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from llamabatch.native_build.tools import make_folder


def package(wheel: Path, home: Path) -> Path:
    """Unpacks a wheel into `home`, where it replaces other wheels. Returns the folder of its package `llama_cpp`."""
    folder = make_folder(home) / wheel.parent.name
    if not folder.is_dir():
        for old in home.iterdir():
            shutil.rmtree(old, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=home, ignore_cleanup_errors=True) as temporary:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(Path(temporary) / "whole")
            os.replace(Path(temporary) / "whole", folder)
    return folder / "llama_cpp"
