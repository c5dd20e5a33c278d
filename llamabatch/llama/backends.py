"""The CPU variant of a build: one of several libraries with ggml's kernels, each compiled for another kind of CPU.

The libraries of the wheel load no backend by themselves (GGML_BACKEND_DL); load_cpu() registers one. Linux lists the
instruction sets that the CPU has and the system has enabled. The build's marker lists the instruction sets that each
variant needs. So llamabatch knows the best variant for this CPU before it maps a variant's code. ggml would map all
variants to choose one, and would ask only the CPU, not the system. Where the system lists no instruction sets, a child
process tries the variants, and the verdict is kept.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from llamabatch.errors import SetupError
from llamabatch.llama import ggml, probe_runs
from llamabatch.llama.build_info import build_marker
from llamabatch.planning.cpu import cpu_flags, cpu_name
from llamabatch.utils import disk_cache

logger = logging.getLogger(__name__)

VARIABLE = "LLAMABATCH_CPU_VARIANT"
"""The environment variable that names the variant to use."""

_VERDICTS = "cpu-variant"
_BASELINE = {"x86_64": "sse2", "aarch64": "asimd"}
"""A feature that every CPU of a machine type has. A list without it describes the host of an emulator, not this CPU."""
_MARK = "ggml-cpu-"  # the part of a file name before the variant's name


@dataclass(frozen=True)
class Variant:
    """A library with the kernels for one kind of CPU.

    Attributes:
        needs: the CPU features that the code uses, by Linux's names.
    """

    name: str
    path: Path
    needs: frozenset[str]


def is_forced() -> bool:
    """Returns True if the environment names a variant."""
    return bool(os.environ.get(VARIABLE))


def load_cpu(module: ModuleType, folder: Path) -> str | None:
    """Registers the CPU backend of the build in `folder`, before llama_backend_init.

    Returns:
        The name of the variant. None if the build has no variants, or if a CPU backend is already registered.

    Raises:
        SetupError: LLAMABATCH_CPU_VARIANT names a variant that is missing or that this CPU cannot run; or no variant
            can be loaded; or the build has no CPU kernels.
    """
    variants = variants_in(folder, build_marker(module))
    wanted = os.environ.get(VARIABLE, "")
    if not variants:
        if _files(folder) and not _has_cpu(module):  # in a build of another project, ggml chooses the variant
            _load_what_ggml_takes(module, folder)
        if not _has_cpu(module):
            raise SetupError(
                f"{folder} has no library of CPU kernels that can be loaded, so that nothing can be computed: install "
                "the build again"
            )
        return None
    if _has_cpu(module):
        return None
    candidates = [_forced(wanted, variants)] if wanted else usable(variants)
    for variant in candidates:
        if _load(module, variant.path):
            return variant.name
        logger.debug("the CPU variant %s could not be loaded from %s", variant.name, variant.path)
    raise SetupError(
        f"no CPU variant in {folder} runs on this CPU: tried {_listed(candidates) or 'none'}, there are "
        f"{_listed(variants)}; `llamabatch build` makes a build for this CPU"
    )


def variants_in(folder: Path, marker: Mapping[str, Any] | None) -> list[Variant]:
    """Returns the variants of one of our builds, best first, or an empty list if the build has none."""
    listed = (marker or {}).get("variants")
    found = []
    for entry in listed if isinstance(listed, list) else []:
        path = folder / str(entry["file"])
        if path.is_file():
            found.append(Variant(str(entry["name"]), path, frozenset(map(str, entry["needs"]))))
    return found


def variant_name(cpu_library: Path) -> str | None:
    """Returns the name of the variant in the file name of a library: `haswell` for libggml-cpu-haswell.so."""
    _, marked, name = cpu_library.name.rpartition(_MARK)
    return name.rpartition(".")[0] if marked else None


def usable(variants: Sequence[Variant]) -> list[Variant]:
    """Returns the variants that this CPU can run, best first. If the CPU features are not known, child processes try
    the variants. The list then has the first variant that runs, and the variants without required CPU features."""
    flags = cpu_flags()
    if _is_known(flags):
        return [variant for variant in variants if variant.needs <= flags]
    tried = (variant for variant in variants if variant.needs and _runs(variant))
    return [*itertools.islice(tried, 1), *(variant for variant in variants if not variant.needs)]


def _is_known(flags: frozenset[str]) -> bool:
    """Returns True if the system lists all instruction sets of this CPU. Linux does, except in an emulator."""
    return sys.platform == "linux" and _BASELINE.get(platform.machine()) in flags


def _forced(name: str, variants: Sequence[Variant]) -> Variant:
    found = next((variant for variant in variants if variant.name == name), None)
    if found is None:
        raise SetupError(f"{VARIABLE} is {name!r}, which is no CPU variant of this build: it has {_listed(variants)}")
    flags = cpu_flags()
    missing = found.needs - flags
    if missing and _is_known(flags):
        raise SetupError(
            f"{VARIABLE} is {name!r}, which needs {', '.join(sorted(missing))} of the CPU, and this one lacks that: "
            f"it can run {_listed(usable(variants))}"
        )
    return found


def _runs(variant: Variant) -> bool:
    """Returns True if a child process can run the bundled model with this variant. Stores the verdict on disk."""
    cpu = f"{platform.machine()} {cpu_name()} {sorted(cpu_flags())}"  # several machines may share the cache
    key = probe_runs.key(variant.path, cpu)
    kept = disk_cache.read(_VERDICTS, key)
    if kept is not None and isinstance(kept.get("runs"), bool):
        return bool(kept["runs"])
    status = probe_runs.status(f"the CPU variant {variant.name}", {VARIABLE: variant.name})
    if status is not None:
        disk_cache.keep(_VERDICTS, key, {"runs": status == 0, "variant": variant.name})
    return status == 0


def _load(module: ModuleType, path: Path) -> bool:
    """Lets ggml load a backend. Returns False if the file cannot be loaded or the backend refuses this CPU."""
    return ggml.load_backend(module.llama_cpp._lib, path)


def _load_what_ggml_takes(module: ModuleType, folder: Path) -> None:
    try:
        load = ggml.bind(module.llama_cpp._lib, "ggml_backend_load_all_from_path", None, ctypes.c_char_p)
    except ggml.MISSING:
        return
    load(os.fsencode(folder))


def _has_cpu(module: ModuleType) -> bool:
    try:
        return bool(ggml.cpu_device(module.llama_cpp._lib))
    except ggml.MISSING:  # only a build in a single library lacks the function, and such a build has the CPU backend
        return True


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if variant_name(path) is not None]


def _listed(variants: Sequence[Variant]) -> str:
    return ", ".join(variant.name for variant in variants)
