"""Puts patches and kernels into the wheel, and compiles the sampler if there is a C++ compiler.

`llamabatch build` applies the patches. In a wheel they are beside the code that applies them
(native_build/source.py). An editable install finds them at the top of the checkout.

Without a C++ compiler, or if compiling fails, the install continues. llamabatch then samples with numpy, and
`llamabatch doctor` says so. With LLAMABATCH_RELEASE in the environment nothing is compiled: the wheel is for every
system, and llamabatch-llama contains the sampler.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the build's environment lacks llamabatch
from llamabatch.native_build import sampler_library, source


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # generic in newer releases of hatchling only
    """Adds the patches and the compiled sampler to the wheel; the sampler stays in the tree for editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build_data["force_include"] |= {
            str(path): f"llamabatch/native_build/native_patches/{path.relative_to(source.PATCH_FOLDER).as_posix()}"
            for path in source.build_files()
        }
        if os.environ.get("LLAMABATCH_RELEASE"):
            return
        path = f"llamabatch/sampling/{sampler_library.LIBRARY}"
        problem = sampler_library.compile_library(Path(self.root) / path)
        if problem:
            self.app.display_warning(f"The sampler was not compiled, numpy takes its place: {problem}")
            return
        build_data["artifacts"].append(path)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sampler_library.platform_tag()}"
