"""Compiles the sampler of native_patches/native when llamabatch is installed, wherever a C++ compiler is at hand.

Without one, or when it fails, the install goes on: llamabatch then samples with numpy, and `llamabatch doctor` says so.
With LLAMABATCH_RELEASE in the environment nothing is compiled: the wheel is for every system, and llamabatch-llama has
the sampler.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))  # a build runs with the packages of its own environment alone
from llamabatch.native_patches import helper


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # generic in newer releases of hatchling only
    """Adds the library to the wheel, and leaves it in the tree for editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("LLAMABATCH_RELEASE"):
            return
        path = f"llamabatch/sampling/{helper.LIBRARY}"
        problem = helper.compile_library(Path(self.root) / path)
        if problem:
            self.app.display_warning(f"The sampler was not compiled, numpy takes its place: {problem}")
            return
        build_data["artifacts"].append(path)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{helper.platform_tag()}"
