"""Everything that decides what a build of llama.cpp contains, and where it is kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from native_patches import source
from native_patches.tools import cache_dir

RECIPE = 1
"""Raise it when the way of building changes in build.py, so that old wheels are not taken for new ones."""

MARKER = "llamabatch_build.json"


@dataclass(frozen=True)
class Plan:
    """Everything that decides what the wheel contains.

    patches, kernels: the hash of each file, by its name.
    """

    backend: str
    flags: tuple[str, ...]
    patches: Mapping[str, str]
    kernels: Mapping[str, str]
    compiler: str
    cpu: str
    environment: Mapping[str, str]

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

    @property
    def folder(self) -> Path:
        return cache_dir() / "wheels" / self.key

    @property
    def wheel(self) -> Path | None:
        return next(iter(sorted(self.folder.glob("*.whl"))), None)

    def marker(self) -> str:
        facts = {
            "version": self.version, "key": self.key, "backend": self.backend, "patches": dict(self.patches),
            "kernels": dict(self.kernels), "flags": list(self.flags), "compiler": self.compiler, "cpu": self.cpu,
        }  # fmt: skip
        return json.dumps(facts, indent=2, sort_keys=True) + "\n"


def jobs() -> int:
    """One compiler a core that we may use, and no more than memory allows at about 1 GB each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(ValueError, OSError):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return max(1, min(cores, memory // 1_000_000_000))
    return cores
