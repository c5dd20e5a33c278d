"""Puts the package `llamabatch_llama` into the wheel: one that `make wheels` has built, or one built here and now."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a build runs with the packages of its environment alone
from native_patches import wheels


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # generic in newer releases of hatchling only
    """Adds the package and the tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        package, tag = os.environ.get(wheels.PACKAGE_VARIABLE), os.environ.get(wheels.TAG_VARIABLE)
        if not package or not tag:
            self.made = tempfile.TemporaryDirectory()
            found, tag = wheels.package_here(Path(self.made.name))
            package = str(found)
        build_data["force_include"] = {package: "llamabatch_llama"}
        build_data["pure_python"] = False
        build_data["tag"] = tag
