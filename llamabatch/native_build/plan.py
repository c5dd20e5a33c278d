"""The plan of a build: everything that determines its contents, its key in the cache, and its marker."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass

from llamabatch.native_build import source

RECIPE = 3
"""Version of the recipe. Increase it if recipe.py changes the result of a build, so that no old build is used."""

MARKER = "llamabatch_build.json"


@dataclass(frozen=True)
class Plan:
    """Everything that determines the contents of a build.

    Attributes:
        patches: the hash of each patch, by the name of its file.
        kernels: the hash of each kernel, by the name of its file.
        cpu: hash of the compiler's macros for the CPU. In a portable build, hash of the kind of CPU.
        cpu_flags: Linux's names of the required instruction sets of the CPU. Not in the key, since `cpu` covers them.
    """

    backend: str
    flags: tuple[str, ...]
    patches: Mapping[str, str]
    kernels: Mapping[str, str]
    compiler: str
    cpu: str
    environment: Mapping[str, str]
    cpu_flags: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        facts = [
            RECIPE, source.SHA256, self.backend, self.flags, dict(self.patches), dict(self.kernels),
            self.compiler, self.cpu, dict(self.environment), sysconfig.get_platform(),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def version(self) -> str:
        return f"{source.VERSION}+llamabatch.{self.key[:8]}"

    def marker(self) -> str:
        facts = {
            "version": self.version, "key": self.key, "backend": self.backend, "patches": dict(self.patches),
            "kernels": dict(self.kernels), "flags": list(self.flags), "compiler": self.compiler, "cpu": self.cpu,
        }  # fmt: skip
        return json.dumps(facts, indent=2, sort_keys=True) + "\n"


def jobs() -> int:
    """Returns the number of parallel compilers: one per core that the process may use, at most one per GB of memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if sys.platform != "win32":
        with contextlib.suppress(ValueError, OSError):
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            return max(1, min(cores, memory // 1_000_000_000))
    return cores
