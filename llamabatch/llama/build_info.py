"""The build of llama.cpp in use: the folder of its libraries, and the marker that native_build writes into it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from llamabatch.planning.binding_choice import read_marker
from llamabatch.utils.system import kernel_lines


def library_dir(module: ModuleType) -> Path:
    """The folder of the libllama in use; `LLAMA_CPP_LIB_PATH` may have moved it out of the package."""
    return Path(module.llama_cpp._lib._name).resolve().parent


def build_marker(module: ModuleType) -> Mapping[str, Any] | None:
    """The marker of the libraries in use: patches, flags, compiler. None: a stock build.

    It stands beside the libraries, or in the package whose `lib` folder they are in, also where `LLAMA_CPP_LIB_PATH`
    names the folder.
    """
    return read_marker(library_dir(module))


def cpu_library(module: ModuleType) -> Path:
    """The file with the CPU kernels in use; libllama where everything is in one file.

    A folder may hold one ggml-cpu library for each kind of CPU. The right one is that of the code that ggml's registry
    of backends calls, else the one that this process has mapped.
    """
    folder = library_dir(module)
    found = _registered_cpu_library(module) or _mapped_cpu_library(folder, _mapped_files())
    if found is None:  # not Linux, and no dladdr
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
    """The file of the code of ggml's CPU backend, as dladdr tells it; None where neither can be asked."""
    pointer, cpu = ctypes.c_void_p, 0  # GGML_BACKEND_DEVICE_TYPE_CPU
    info = _DlInfo()
    try:
        library = module.llama_cpp._lib
        device = ctypes.CFUNCTYPE(pointer, ctypes.c_int)(("ggml_backend_dev_by_type", library))(cpu)
        if not device:
            return None
        backend = ctypes.CFUNCTYPE(pointer, pointer)(("ggml_backend_dev_backend_reg", library))(device)
        find = ctypes.CFUNCTYPE(pointer, pointer, ctypes.c_char_p)(("ggml_backend_reg_get_proc_address", library))
        code = find(backend, b"ggml_backend_set_n_threads")
        dladdr = ctypes.CFUNCTYPE(ctypes.c_int, pointer, ctypes.POINTER(_DlInfo))(("dladdr", ctypes.CDLL(None)))
        if not code or not dladdr(code, ctypes.byref(info)) or not info.file:
            return None
    except (AttributeError, ValueError, TypeError, OSError):  # CDLL(None) on Windows: TypeError
        return None
    found = Path(os.fsdecode(info.file))
    return found if found.is_file() else None


def _mapped_files() -> list[str]:
    return kernel_lines("/proc/self/maps")


def _mapped_cpu_library(folder: Path, maps: Iterable[str]) -> Path | None:
    """The ggml-cpu library of this folder among the lines of /proc/PID/maps; another build in the process has its own
    folder."""
    named = (line.split(maxsplit=5) for line in maps)
    files = dict.fromkeys(Path(parts[5]) for parts in named if len(parts) == 6)
    return next((p for p in files if _is_of_cpu(p) and p.parent.resolve() == folder), None)


def _is_of_cpu(path: Path) -> bool:
    return "ggml-cpu" in path.name
