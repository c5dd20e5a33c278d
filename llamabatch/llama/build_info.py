"""The build of llama.cpp in use: the folder of its libraries, and the marker that native_build writes into it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from llamabatch.llama import ggml
from llamabatch.planning.binding_choice import read_marker
from llamabatch.utils.system import kernel_lines


def library_dir(module: ModuleType) -> Path:
    """Returns the folder of the libllama in use. `LLAMA_CPP_LIB_PATH` may name a folder outside the package."""
    return Path(module.llama_cpp._lib._name).resolve().parent


def build_marker(module: ModuleType) -> Mapping[str, Any] | None:
    """Returns the marker of the libraries in use (patches, flags, compiler), or None for a stock build. The marker is
    in the folder of the libraries, or in the package above it if the folder is `lib`. The folder in
    `LLAMA_CPP_LIB_PATH` may have a marker, too."""
    return read_marker(library_dir(module))


def cpu_library(module: ModuleType) -> Path:
    """Returns the file with the CPU kernels in use: a ggml-cpu library, or libllama if everything is in one file.

    A folder may contain one ggml-cpu library for each kind of CPU. The library in use is found through ggml's
    backend registry, or else in the list of files that this process has mapped.
    """
    folder = library_dir(module)
    found = _registered_cpu_library(module) or _mapped_cpu_library(folder, _mapped_files())
    if found is None:  # the system has neither dladdr nor /proc/self/maps
        found = next((p for p in sorted(folder.iterdir()) if _is_of_cpu(p)), Path(module.llama_cpp._lib._name))
    return found.resolve()


class _DlInfo(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _registered_cpu_library(module: ModuleType) -> Path | None:
    """Returns the file with the code of ggml's CPU backend, from dladdr; None if ggml or dladdr cannot find it."""
    info = _DlInfo()
    try:
        library = module.llama_cpp._lib
        device = ggml.cpu_device(library)
        if not device:
            return None
        code = ggml.backend_function(library, device, b"ggml_backend_set_n_threads")
        dladdr = ggml.bind(ctypes.CDLL(None), "dladdr", ctypes.c_int, ggml.POINTER, ctypes.POINTER(_DlInfo))
        if not code or not dladdr(code, ctypes.byref(info)) or not info.file:
            return None
    except (AttributeError, ValueError, TypeError, OSError):  # on Windows, CDLL(None) raises TypeError
        return None
    found = Path(os.fsdecode(info.file))
    return found if found.is_file() else None


def _mapped_files() -> list[str]:
    return kernel_lines("/proc/self/maps")


def _mapped_cpu_library(folder: Path, maps: Iterable[str]) -> Path | None:
    """Returns the ggml-cpu library of `folder` among the lines of /proc/PID/maps. Files in other folders
    belong to other builds in the same process."""
    named = (line.split(maxsplit=5) for line in maps)
    files = dict.fromkeys(Path(parts[5]) for parts in named if len(parts) == 6)
    return next((p for p in files if _is_of_cpu(p) and p.parent.resolve() == folder), None)


def _is_of_cpu(path: Path) -> bool:
    return "ggml-cpu" in path.name
