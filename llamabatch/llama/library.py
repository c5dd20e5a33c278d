"""Loads the binding of llama.cpp: prepares the environment, imports the binding, checks its structs, forwards its log.

The order matters. libgomp reads its environment once, when it is loaded. The binding and the compiled sampler load
libgomp, so the environment is prepared before them, and only this module imports a binding. planning/binding_choice.py
chooses which of the installed bindings is used.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import itertools
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from llamabatch.config import KV_TYPES
from llamabatch.errors import ConfigError, EngineError, SetupError
from llamabatch.llama import backends, devices, ggml, log, rpc
from llamabatch.llama.abi_check import check_layout
from llamabatch.llama.build_info import build_marker, cpu_library, library_dir
from llamabatch.llama.environment import NOTHING_MEASURED, OnLoad, amx_is_off, is_mapped, prepared
from llamabatch.planning import binding_choice
from llamabatch.planning.binding_choice import Build, Choice, Origin
from llamabatch.sampling import native
from llamabatch.utils.lifetime import ForkGuard, in_forks

ATTENTION_PATCH = "0003-flash-attention-decode.patch"
ROWS_PATCH = "0006-repack-any-rows.patch"
AMX_PATCH = "0007-amx-can-be-off.patch"
SPLITTING_PATCH = "0008-split-without-recursion.patch"
CELLS_PATCH = "0009-cells-cost-nothing-until-used.patch"
WIDE_PATCH = "0012-sixteen-columns-and-tiles.patch"
ONE_ROW_PATCH = "0010-one-row-as-many.patch"
RAGGED_PATCH = "0011-ragged-ubatches.patch"
PAGES_PATCH = "0014-pages-of-copied-weights.patch"
PROMPTS_PATCH = "0020-rows-of-prompts.patch"

_lock = threading.Lock()
_module: ModuleType | None = None
_fork_guard = ForkGuard()  # the process that called llama_backend_init
_numa: str | None = None  # the NUMA strategy of this process's first model
_amx_off = False  # True if the environment turned AMX off when llama.cpp was loaded


def load(model_bytes: int | None = None, measured: OnLoad = NOTHING_MEASURED) -> ModuleType:
    """Returns the binding, ready for use: a module with the names of llama_cpp. Safe to call often and from any thread.

    The size of the model file and the measured settings have an effect only in the first call of a process, because
    libgomp and ggml read their environment once. Raises SetupError if no installed build of llama.cpp fits.
    """
    global _module, _fork_guard, _amx_off
    if _module is not None:
        return _module
    with _lock:
        if _module is None:
            with prepared(model_bytes, measured):
                module = _import_choice()
                native.available()  # loads the sampler, so that its threads use this environment, too
                rpc.load_named(module)
                module.llama_backend_init()
                if amx_is_off():
                    names = _extra_buffers(module)
                    _amx_off = names is not None and "AMX" not in names
            _module, _fork_guard = module, ForkGuard()
        return _module


def use_numa(strategy: str | None) -> None:
    """Places the threads of this process on NUMA nodes. The first model's strategy applies to the whole process.

    Args:
        strategy: None means "off" for the first model, and accepts any strategy for later models.

    Raises:
        ConfigError: the first model of this process was loaded with another strategy.
    """
    global _numa
    module = load()
    with _lock:
        if _numa is None:
            _numa = strategy or "off"
            if _numa != "off":
                module.llama_numa_init(int(getattr(module, f"GGML_NUMA_STRATEGY_{_numa.upper()}")))
        elif strategy not in (None, _numa):
            raise ConfigError(
                f"numa is {strategy!r}, but the first model of this process was loaded with {_numa!r}, and the "
                "process has one setting; give the same, or isolate=True"
            )


@in_forks
def _renew_locks() -> None:
    """Makes new locks in a fork. Threads that do not exist in the fork may hold the old locks."""
    global _lock
    _lock = threading.Lock()
    log.renew_lock()


def check_usable() -> None:
    """Raises EngineError in a fork that inherited GPUs. GPU drivers do not survive a fork, and llama.cpp would
    abort."""
    if not _fork_guard.is_here and gpu_names():
        raise EngineError(
            "llama.cpp was loaded before this process was forked, and a fork cannot use GPUs that its parent has used; "
            "start processes with spawn instead of fork"
        )


def _import_choice() -> ModuleType:
    """Imports the chosen binding, forwards its log and loads its CPU backend. Tries the next choice if this fails."""
    while True:
        build = binding_choice.choose().build
        try:
            module = import_build(build)
            log.forward(module)
            backends.load_cpu(module, library_dir(module))
            return module
        except SetupError as error:
            if backends.is_forced():  # the user named the variant, so no other build is tried
                raise
            binding_choice.reject(build, str(error))


def import_build(build: Build) -> ModuleType:
    """Imports the binding of a build with its libraries. Raises SetupError if the build does not fit."""
    name = "llamabatch-llama" if build.is_ours else "llama-cpp-python"
    try:
        module = _import_from(build)
    except ModuleNotFoundError as error:
        if error.name == build.module:
            raise SetupError(f"{name} is not installed") from error
        raise SetupError(f"{name} needs the package {error.name!r}: pip install {error.name}") from error
    except AttributeError as error:  # the binding has a function that the library does not have
        raise SetupError(f"{name} and its libllama differ ({error})") from error
    except (ImportError, OSError, RuntimeError) as error:
        raise SetupError(f"{name} cannot load its library ({' '.join(str(error).split())})") from error
    loaded = Path(module.llama_cpp._lib._name).absolute().parent
    if build.origin is Origin.NAMED and loaded.resolve() != build.libraries.resolve():
        raise SetupError(f"{build.package} was imported before, with the libraries in {loaded}")
    check_layout(module)
    return module


def _import_from(build: Build) -> ModuleType:
    """Imports the binding of a build from its folder, which need not be on sys.path."""
    package = sys.modules.get(build.package)
    file = getattr(package, "__file__", None)
    if package is not None and (file is None or Path(str(file)).parent.resolve() != build.folder.resolve()):
        if build.package == binding_choice.FOREIGN:
            raise ImportError(f"another llama_cpp has been imported, from {file}")
        _forget_modules(build.package)  # modules of a rejected build
    before = set(sys.modules)
    try:
        if build.package not in sys.modules and not _is_on_path(build):
            spec = importlib.util.spec_from_file_location(
                build.package, build.folder / "__init__.py", submodule_search_locations=[str(build.folder)]
            )
            assert spec is not None
            assert spec.loader is not None
            sys.modules[build.package] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        return importlib.import_module(build.module)
    except BaseException:
        for name in set(sys.modules) - before:
            if name.split(".")[0] == build.package:
                del sys.modules[name]
        raise


def _is_on_path(build: Build) -> bool:
    """Returns True if a plain import finds the package of this build."""
    found = binding_choice.installed(build.package)
    return found is not None and found.resolve() == build.folder.resolve()


def _forget_modules(package: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]


@dataclass(frozen=True)
class DeviceInfo:
    """A compute device of ggml. For a CPU, the memory is that of the machine."""

    name: str
    description: str
    kind: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class LibraryInfo:
    """The llama.cpp in use, for `llamabatch doctor`.

    Attributes:
        choice: the chosen build and the other installed builds.
        cpu_variant: name of the CPU kernels in use; None if the build has kernels for one kind of CPU only.
    """

    choice: Choice
    binding_version: str
    llama_version: str
    library_dir: Path
    libraries: tuple[Path, ...]
    marker: Mapping[str, Any] | None
    cpu_variant: str | None
    system_info: str
    devices: tuple[DeviceInfo, ...]
    supports_gpu_offload: bool
    max_parallel_sequences: int


def library_info() -> LibraryInfo:
    """Returns a description of the loaded library. Raises SetupError if no library can be loaded."""
    module = load()
    folder = library_dir(module)
    return LibraryInfo(
        choice=binding_choice.choose(),
        binding_version=str(getattr(module, "__version__", "unknown")),
        llama_version=ggml.text(module.llama_version()) if hasattr(module, "llama_version") else "unknown",
        library_dir=folder,
        libraries=tuple(sorted(p for p in folder.iterdir() if p.suffix in {".so", ".dylib", ".dll"})),
        marker=build_marker(module),
        cpu_variant=backends.variant_name(cpu_library(module)),
        system_info=ggml.text(module.llama_print_system_info()).strip(" |"),
        devices=tuple(
            DeviceInfo(each.name, each.description, each.kind, *devices.memory_here(module, each))
            for each in devices.devices(module)
        ),
        supports_gpu_offload=bool(module.llama_supports_gpu_offload()),
        max_parallel_sequences=int(module.llama_max_parallel_sequences()),
    )


def _extra_buffers(module: ModuleType) -> tuple[str, ...] | None:
    """Returns the names of the buffer types that repack weights; None if the names are not known. ggml makes its list
    of these types once: in this call, or when it loads the first model. It reads GGML_CPU_AMX at that time."""
    library = module.llama_cpp._lib
    try:
        device = ggml.cpu_device(library)
        found = ggml.backend_function(library, device, b"ggml_backend_dev_get_extra_bufts")
        name = ggml.bind(library, "ggml_backend_buft_name", ctypes.c_char_p, ggml.POINTER)
    except ggml.MISSING:
        return None
    if not found:
        return None
    types = ctypes.CFUNCTYPE(ctypes.POINTER(ggml.POINTER), ggml.POINTER)(found)(device)
    return tuple(ggml.text(name(buffer)) for buffer in itertools.takewhile(bool, types))


def extra_bufts_safe() -> bool:
    """Returns True if models may use llama.cpp's extra buffer types; see llamabatch/llama/extra_buffers.py."""
    from llamabatch.llama import extra_buffers

    return extra_buffers.safe(load())


def has_fast_attention() -> bool:
    """Returns True if this build has our flash attention for CPUs."""
    return _has_patch(ATTENTION_PATCH)


def has_lazy_cells() -> bool:
    """Returns True if this build leaves the zeroing of new cells to Linux. Unused cells then take no memory."""
    return sys.platform == "linux" and _has_patch(CELLS_PATCH)


def drops_copied_pages() -> bool:
    """Returns True if this build releases the pages of a mapped file after their weights have been copied."""
    return sys.platform == "linux" and _has_patch(PAGES_PATCH)


def has_equal_rows() -> bool:
    """Returns True if this build uses the same kernels for a single row as for many rows. Our build does so on x86 with
    AVX2. Returns False if a BLAS device exists, because ggml would use BLAS only for many rows."""
    has_others = any(device.kind == "accelerator" for device in devices.devices(load()))
    return _has_patch(ONE_ROW_PATCH) and _system_features().get("AVX2") == "1" and not has_others


def takes_ragged(context: int) -> bool:
    """Returns True if the sequences of a pass may have different numbers of tokens in a split KV cache. Our build can
    do this if the attention runs on CPUs. Builds without llama_takes_ragged cannot. `context` is a llama_context."""
    return _asked("llama_takes_ragged", context)


def takes_prompts(context: int) -> bool:
    """Returns True if a context has special kernels for tokens that a batch marks as prompt tokens. Our build has them
    on AMX. Returns False for builds without llama_takes_prompts: they would read the mark as an output mark."""
    return _asked("llama_takes_prompts", context)


def _asked(name: str, context: int) -> bool:
    try:
        ask = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)((name, load().llama_cpp._lib))
    except AttributeError:
        return False
    return bool(ask(context))


def amx_can_be_off() -> bool:
    """Returns True if AMX kernels are on, and `OnLoad.amx` can turn them off on this CPU and with this build."""
    has_kernels = _system_features().get("AMX_INT8") == "1" and _cpu_has_amx()
    return has_kernels and not amx_is_off() and _has_patch(AMX_PATCH)


def splits_without_recursion() -> bool:
    """Returns True if this build tokenizes a long word without overflowing the stack."""
    return _has_patch(SPLITTING_PATCH)


def _has_patch(name: str) -> bool:
    marker = build_marker(load())
    return marker is not None and name in marker.get("patches", {})


# The names in llama_print_system_info, mapped to the names in planning/weights.py.
_FEATURES = {"AMX_INT8": "amx", "AVX2": "avx2", "AVX512": "avx512", "DOTPROD": "neon"}

_ROWS_FEATURES = (("AVX2", "rows"), ("AVX512_VNNI", "vnni512"))


def repack_features() -> frozenset[str]:
    """Returns the names of the kernels for which weights are repacked, as in planning/weights.py. "amx" is included
    only if the CPU has AMX and the environment does not turn it off."""
    features = _system_features()
    found = {ours for theirs, ours in _FEATURES.items() if features.get(theirs) == "1"}
    if _has_patch(ROWS_PATCH):
        found |= {ours for theirs, ours in _ROWS_FEATURES if features.get(theirs) == "1"}
    if _has_patch(WIDE_PATCH):
        if features.get("AVX512") == "1":
            found |= {"wide"}
        elif {features.get(name) for name in ("AVX2", "FMA", "F16C")} == {"1"}:
            found |= {"wide8"}
    if "REPACK" not in features:
        found &= {"amx"}
    if _amx_off or not _cpu_has_amx():
        found -= {"amx"}
    if {"amx", "wide"} <= found and features.get("AVX512_BF16") == "1" and _has_patch(PROMPTS_PATCH):
        found |= {"prompts"}
    return frozenset(found)


def _system_features() -> dict[str, str]:
    """Returns the features of llama_print_system_info by name. The value "1" means that the build has the feature."""
    parts = ggml.text(load().llama_print_system_info()).split(" | ")
    pairs = dict(part.split(" = ") for part in parts if " = " in part)
    return {name.split()[-1]: value for name, value in pairs.items()}


def cuda_kv_pairs() -> frozenset[str] | None:
    """Returns the pairs of K and V types (such as q8_0-q8_0) that CUDA attention reads directly; None if not known."""
    pairs = _system_features().get("FA_QUANTS")
    if pairs is None:
        return None
    return frozenset(f"{k}-{v}" for k in KV_TYPES for v in KV_TYPES) if pairs == "all" else frozenset(pairs.split(";"))


def _cpu_has_amx() -> bool:
    from llamabatch.planning.cpu import cpu_flags

    return "amx_int8" in cpu_flags()


def gpu_names() -> tuple[str, ...]:
    """Returns the names of the devices that layers are offloaded to by default."""
    return tuple(device.shown for device in devices.gpus(load()))


def uses_libgomp() -> bool:
    """Returns True if the loaded library obeys GOMP_SPINCOUNT. libgomp obeys it, and so does our replacement of libgomp
    (native_patches/portable). Linux only; False elsewhere."""
    marker = build_marker(load())
    return is_mapped("libgomp") or (marker is not None and marker.get("openmp") == "teams")
