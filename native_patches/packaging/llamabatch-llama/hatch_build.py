"""Puts the package `llamabatch_llama` into the wheel. `make wheels` has built the package, or this hook builds it."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the build's environment lacks native_patches
from native_patches import wheels


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # generic in newer releases of hatchling only
    """Adds the package to the wheel and sets the wheel's tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        package, tag = os.environ.get(wheels.PACKAGE_VARIABLE), os.environ.get(wheels.TAG_VARIABLE)
        if not package or not tag:
            self.made = tempfile.TemporaryDirectory()
            found, tag = wheels.package_here(Path(self.made.name))
            package = str(found)
        build_data["force_include"] = {package: "llamabatch_llama"}
        build_data["pure_python"] = False
        build_data["tag"] = tag
