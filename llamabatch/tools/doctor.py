"""`llamabatch doctor`: checks the machine and the installation, and gives a cure for each problem."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import psutil

from llamabatch.errors import SetupError
from llamabatch.llama import extra_buffers, library, vetting
from llamabatch.llama.environment import undecided
from llamabatch.llama.library import LibraryInfo
from llamabatch.llama.rpc import SERVERS_VARIABLE
from llamabatch.planning import binding_choice, profile_store
from llamabatch.planning.binding_choice import Origin, of_another_release
from llamabatch.planning.cpu import cpu_flags, cpu_name
from llamabatch.planning.machine import Machine
from llamabatch.sampling import native
from llamabatch.utils import disk_cache, paths
from llamabatch.utils.checks import counted
from llamabatch.utils.cures import in_checkout, patched_build
from llamabatch.utils.system import command_output
from llamabatch.utils.version import __version__


class Status(str, Enum):
    """The severity of a finding. Only ERROR keeps llamabatch from working."""

    OK = "ok"
    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True)
class Check:
    """One finding. `cure` is the action to take if `status` is not OK."""

    name: str
    status: Status
    detail: str
    cure: str = ""


@dataclass(frozen=True)
class Report:
    """All findings, in the order of display. `facts`: machine and installation as plain values, for programs."""

    checks: tuple[Check, ...]
    facts: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        return all(check.status is not Status.ERROR for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Returns `{"ok": bool, "checks": [{"name", "status", "detail", "cure"}, ...], "facts": {...}}`."""
        checks = [{**asdict(check), "status": check.status.value} for check in self.checks]
        return {"ok": self.ok, "checks": checks, "facts": dict(self.facts)}


def examine(environment: Mapping[str, str] | None = None) -> Report:
    """Runs every check. Loads the native library. The first call on a machine may also try the library's kernels in a
    child process."""
    given = dict(os.environ if environment is None else environment)  # a copy, since loading the library adds variables
    try:
        info: LibraryInfo | None = library.library_info()
        problem = ""
    except SetupError as error:
        info, problem = None, str(error)
    flags = cpu_flags()
    checks = [*_versions(info), *_machine(flags)]
    if info is None:
        checks.append(Check("library", Status.ERROR, problem, _cure(problem, patched_build())))
    else:
        checks += [
            *_library(info),
            *_choice(info),
            _build(info),
            _instructions(info, flags),
            _extra_buffers(info),
            _gpu(info),
        ]
    checks.append(_sampler())  # after library_info, which sets the variables of libgomp: _sampler may load libgomp
    checks += [*_environment(given), *_extras(), _model(), _profiles(), _trials(), _cache()]
    return Report(tuple(checks), _facts(info, flags))


def _facts(info: LibraryInfo | None, flags: frozenset[str]) -> dict[str, Any]:
    machine = Machine.here()
    facts = {
        "llamabatch": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cpu_features": [words for flag, words in _NOTEWORTHY.items() if flag in flags],
        "cores": machine.cores,
        "available_bytes": machine.available_bytes,
        "extras": _installed_extras(),
    }
    if info is None:
        return facts
    return facts | {
        "llama_cpp_python": info.binding_version,
        "llama_cpp": info.llama_version,
        "library_dir": str(info.library_dir),
        "origin": info.choice.build.origin.name.lower(),
        "passed_over": {str(each.build.folder): each.reason for each in info.choice.passed_over},
        "build": dict(info.marker) if info.marker else None,
        "cpu_variant": info.cpu_variant,
        "devices": [asdict(device) for device in info.devices],
        "extra_buffers": library.extra_bufts_safe(),
    }


def _versions(info: LibraryInfo | None) -> Iterator[Check]:
    def installed(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    binding = info.binding_version if info else installed("llama-cpp-python")
    yield Check(
        "versions",
        Status.OK,
        f"llamabatch {__version__}, Python {platform.python_version()}, llama-cpp-python {binding}, "
        f"numpy {installed('numpy')}",
    )
    yield Check("system", Status.OK, f"{platform.system()} {platform.release()} on {platform.machine()}")


_NOTEWORTHY = {
    "amx_tile": "AMX", "amx_int8": "AMX-INT8", "amx_bf16": "AMX-BF16", "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI", "avx512_bf16": "AVX-512 BF16", "avx_vnni": "AVX-VNNI", "avx2": "AVX2", "fma": "FMA",
    "f16c": "F16C", "asimd": "NEON", "asimddp": "NEON dot product", "i8mm": "I8MM", "sve": "SVE", "sme": "SME",
}  # fmt: skip


def _machine(flags: frozenset[str]) -> Iterator[Check]:
    known = [words for flag, words in _NOTEWORTHY.items() if flag in flags]
    yield Check("cpu", Status.OK, f"{cpu_name()}: {', '.join(known) or 'features unknown'}")
    machine = Machine.here()
    load = psutil.getloadavg()[0]
    busy = load > max(1.0, 0.5 * machine.cores)
    yield Check(
        "cores",
        Status.WARN if busy else Status.OK,
        f"{machine.cores} of {os.cpu_count()} usable, load {load:.1f}",
        "other programs use the CPU, and a busy core costs more than its share: close them before measuring"
        if busy
        else "",
    )
    free = machine.available_bytes
    scarce = free < 1 << 30
    yield Check(
        "memory",
        Status.WARN if scarce else Status.OK,
        f"{_gib(free)} available of {_gib(psutil.virtual_memory().total)}",
        "close programs or raise the limit of the container" if scarce else "",
    )


def _library(info: LibraryInfo) -> Iterator[Check]:
    yield Check("library", Status.OK, f"llama.cpp {info.llama_version} in {info.library_dir}")
    variant = f"{info.cpu_variant} of several kinds of CPU: " if info.cpu_variant else ""
    yield Check("compiled for", Status.OK, f"{variant}{info.system_info}")
    devices = [f"{d.name} ({d.kind}, {d.description}, {_gib(d.free_bytes)} free)" for d in info.devices]
    yield Check(
        "devices",
        Status.OK if devices else Status.WARN,
        "; ".join(devices) or "this build does not list them",
        "" if devices else patched_build(),
    )
    yield Check(
        "sequences",
        Status.OK if info.max_parallel_sequences > 1 else Status.ERROR,
        f"at most {info.max_parallel_sequences} in one context",
        "" if info.max_parallel_sequences > 1 else patched_build(),
    )


def _choice(info: LibraryInfo) -> Iterator[Check]:
    choice = info.choice
    others = "; not needed: " + ", ".join(other.describe() for other in choice.others) if choice.others else ""
    yield Check("build", Status.OK, choice.build.describe() + others)
    for passed in choice.passed_over:
        cure = _cure(passed.reason, _CURES[passed.build.origin])
        if passed.reason == binding_choice.NO_GPU:
            cure = _DRIVERS.get(binding_choice.gpu_backend(passed.build) or "", _DRIVER)
        yield Check("passed over", Status.WARN, f"{passed.build.describe()}: {passed.reason}", cure)


_CURES = {
    Origin.NAMED: "correct the variable, or unset it",
    Origin.IMPORTED: "import llamabatch first, or install a llama-cpp-python from 0.3.36 up to 0.4",
    Origin.BUILT: "run `llamabatch build` again, or remove it: `llamabatch build --list`, `--remove KEY`",
    Origin.GPU: "install it again for this system, or uninstall llama-cpp-python",
    Origin.WHEEL: "pip install --force-reinstall llamabatch-llama",
    Origin.INSTALLED: "pip install --force-reinstall llama-cpp-python",
}


def _build(info: LibraryInfo) -> Check:
    if info.marker is None:
        detail = "none: a stock build of llama.cpp, slower on CPUs with many requests at once"
        return Check("patches", Status.WARN, detail, f"{patched_build()} for the patched build")
    patches = ", ".join(name.removesuffix(".patch") for name in info.marker.get("patches", {}))
    detail = f"{patches or 'none'} ({info.marker.get('backend')}, {info.marker.get('compiler')})"
    if other := of_another_release(info.marker):
        found = f"of another release of llamabatch, with other {other}: {detail}"
        is_wheel = info.choice.build.origin is Origin.WHEEL
        cure = f"pip install llamabatch-llama=={__version__}" if is_wheel else f"{patched_build()} for those of this"
        return Check("patches", Status.WARN, found, cure)
    return Check("patches", Status.OK, detail)


def _instructions(info: LibraryInfo, flags: frozenset[str]) -> Check:
    """Warns if the build does not use all instruction sets of this CPU. This is the usual reason for a slow wheel."""
    wanted = {"avx2": "AVX2 = 1", "fma": "FMA = 1", "avx512f": "AVX512 = 1", "amx_int8": "AMX_INT8 = 1"}
    unused = [_NOTEWORTHY[flag] for flag, words in wanted.items() if flag in flags and words not in info.system_info]
    if unused:
        return Check("instructions", Status.WARN, f"not used by this build: {', '.join(unused)}", patched_build())
    return Check("instructions", Status.OK, "the build uses what this CPU has")


def _extra_buffers(info: LibraryInfo) -> Check:
    if library.extra_bufts_safe():
        return Check("extra buffers", Status.OK, "on: weights are repacked for this CPU's fast kernels")
    return Check(
        "extra buffers",
        Status.WARN,
        f"off: the AMX kernels of this build crash or could not be tried (it lacks {extra_buffers.PATCH}), "
        "and without them models run 2 to 3 times slower",
        patched_build(),
    )


_DRIVER = "install the driver of the GPU"
_DRIVERS = {
    "cuda": "install NVIDIA's driver, which has libcuda.so.1; a container must be started with the GPU, as by "
    "`docker run --gpus all`",
    "hip": "install AMD's driver; a container needs /dev/kfd and /dev/dri",
    "vulkan": "install the GPU's Vulkan driver (Debian and Ubuntu: apt install mesa-vulkan-drivers; NVIDIA's has its "
    "own); a container needs /dev/dri; one that computes on the CPU, as llvmpipe, is no GPU to llama.cpp",
    "rpc": f"name servers: {SERVERS_VARIABLE}=host:port",
}
_CHOOSING = {"cuda": "CUDA_VISIBLE_DEVICES", "hip": "HIP_VISIBLE_DEVICES", "vulkan": "GGML_VK_VISIBLE_DEVICES"}
# Keys: names of libraries in the error message of a failed load. Values: the cures.
_MISSING = {
    "libcuda.so": _DRIVERS["cuda"],
    "libcudart": "install the CUDA runtime that it was built with, and let LD_LIBRARY_PATH name its folder",
    "libcublas": "install the cuBLAS that it was built with, and let LD_LIBRARY_PATH name its folder",
    "libamdhip64": _DRIVERS["hip"],
    "libvulkan": "install the Vulkan loader (Debian and Ubuntu: apt install libvulkan1)",
}


def _cure(problem: str, usual: str) -> str:
    """Returns the cure for a build that does not load: to install the missing GPU library, or `usual`."""
    return next((cure for name, cure in _MISSING.items() if name in problem), usual)


def _gpu(info: LibraryInfo) -> Check:
    gpus = [device.name for device in info.devices if device.kind in ("gpu", "integrated gpu")]
    if gpus:
        return Check("gpu", Status.OK, f"layers are offloaded to {', '.join(gpus)}")
    backend = binding_choice.gpu_backend(info.choice.build)
    if backend is not None:
        name = _CHOOSING.get(backend, "")
        chosen = os.environ.get(name)
        cure = _DRIVERS.get(backend, _DRIVER)
        if chosen in ("", "-1"):
            cure = f"{name} hides all of them: unset it"
        elif chosen is not None:
            cure = f"{name}={chosen} may name none that is here: unset it; or {cure}"
        return Check("gpu", Status.WARN, f"this build is for GPUs ({backend}), but finds none", cure)
    if _has_nvidia_gpu():
        return Check("gpu", Status.WARN, "an NVIDIA GPU is here, but this build does not use it", patched_build("cuda"))
    return Check("gpu", Status.OK, "none, or none that this build can use")


def _sampler() -> Check:
    reason = native.why_not()
    if not reason:
        return Check("sampler", Status.OK, f"compiled: {native.file()}")
    cure = patched_build()
    if in_checkout():
        cure = f"install a C++ compiler (Debian and Ubuntu: apt install g++), then {cure}"
    if native.VARIABLE in reason:
        cure = f"unset {native.VARIABLE}"
    return Check("sampler", Status.WARN, f"numpy, several times slower: the compiled helper is {reason}", cure)


_BAD_ENVIRONMENT: dict[str, tuple[Callable[[str], bool], str]] = {
    "OMP_WAIT_POLICY": (
        lambda value: value.lower() == "active",
        "waiting threads never sleep, which is very slow beside any other program: unset it",
    ),
    "OMP_PROC_BIND": (
        lambda value: value.lower() not in {"", "false"},
        "several instances would share the same cores: unset it",
    ),
    "GOMP_CPU_AFFINITY": (bool, "several instances would share the same cores: unset it"),
    "OMP_THREAD_LIMIT": (
        lambda value: value.isdigit() and int(value) < Machine.here().cores,
        "llama.cpp gets fewer threads than there are cores: unset it",
    ),
    "LLAMA_CPP_LIB_PATH": (bool, "llama-cpp-python takes its libraries from there: unset it unless you mean it"),
}


def _environment(given: Mapping[str, str]) -> Iterator[Check]:
    relevant = {
        name: value
        for name, value in sorted(given.items())
        if name.startswith(("GOMP_", "OMP_", "KMP_", "GGML_", "LLAMA_", "LLAMABATCH_", "CUDA_VISIBLE_DEVICES"))
    }
    bad = {name: words for name, (is_bad, words) in _BAD_ENVIRONMENT.items() if is_bad(relevant.get(name, ""))}
    for name, words in bad.items():
        yield Check(f"${name}", Status.WARN, relevant[name], words)
    fine = [f"{name}={value}" for name, value in relevant.items() if name not in bad]
    chosen = [f"{name}={value}" for name, value in undecided(None, given).items()]
    text = f"yours: {', '.join(fine) or 'none'}; set by llamabatch: {', '.join(chosen) or 'none'}"
    yield Check("environment", Status.OK, text)


@dataclass(frozen=True)
class Extra:
    """Optional packages that are installed together.

    Attributes:
        use: the features that need the packages.
        modules: the module of each package, by the package's name.
    """

    use: str
    modules: Mapping[str, str]


# A copy of the extras in pyproject.toml, because that file is not installed. tests/unit/tools/test_doctor.py compares
# the two.
EXTRAS = {
    "tools": Extra(
        "`llamabatch synth`, and pictures (--plot)", {"matplotlib": "matplotlib", "gguf": "gguf"}
    ),
    "hub": Extra("models by name from Hugging Face's hub", {"huggingface_hub": "huggingface_hub"}),
    "images": Extra("pictures in files for models that read them", {"pillow": "PIL"}),
    "sounds": Extra("sounds in files for models that read them", {"miniaudio": "miniaudio"}),
    "parquet": Extra("`llamabatch run` from and to Parquet files", {"pyarrow": "pyarrow"}),
    "excel": Extra(".xlsx files of `run`", {"fastexcel": "fastexcel", "pyarrow": "pyarrow"}),
    "zstd": Extra(".zst files of `run`, which Python 3.14 reads itself", {"backports.zstd": "backports.zstd"}),
    "columns": Extra("`llamabatch.columns` of pandas and polars", {"narwhals": "narwhals"}),
    "metrics": Extra("files of figures for Prometheus (--metrics-file)", {"prometheus-client": "prometheus_client"}),
    "server": Extra(
        "`llamabatch serve`",
        {
            "starlette": "starlette", "uvicorn": "uvicorn", "httptools": "httptools",
            "python-multipart": "python_multipart", "uvloop": "uvloop",
            "prometheus-client": "prometheus_client",
        },
    ),
    "lm-eval": Extra("`llamabatch eval`", {"lm_eval": "lm_eval"}),
    "langchain": Extra("`ChatLlamaBatch` and embeddings of LangChain", {"langchain-core": "langchain_core"}),
    "inspect": Extra("models of Inspect AI", {"inspect_ai": "inspect_ai"}),
    "litellm": Extra("models of LiteLLM and DSPy", {"litellm": "litellm"}),
    "ray": Extra("datasets of Ray Data", {"ray": "ray"}),
    "gpu": Extra("memory, use and power of NVIDIA GPUs", {"nvidia-ml-py": "pynvml"}),
}  # fmt: skip


def _installed_extras() -> dict[str, dict[str, str | None]]:
    """Returns the version of each package of each extra; None if the package is not installed."""
    return {
        name: {package: _version_of(package, module) for package, module in extra.modules.items()}
        for name, extra in EXTRAS.items()
    }


def _version_of(package: str, module: str) -> str | None:
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except ModuleNotFoundError:  # the parent package of `module` is missing
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _extras() -> Iterator[Check]:
    """Reports the extras. Warns if only a part of an extra is installed, or if there is an NVIDIA GPU without the extra
    `gpu`."""
    for name, versions in _installed_extras().items():
        use, get = EXTRAS[name].use, f'pip install "llamabatch[{name}]"'
        missing = [package for package, version in versions.items() if version is None]
        there = [f"{package} {version}" for package, version in versions.items() if version is not None]
        check = f"extra {name}"
        if not missing:
            yield Check(check, Status.OK, f"{', '.join(there)}: {use}")
        elif there or (name == "gpu" and _has_nvidia_gpu()):
            state = "; ".join([f"{', '.join(missing)} not installed", *there])
            yield Check(check, Status.WARN, f"{state}: {use}", get)
        else:
            yield Check(check, Status.OK, f"not installed ({', '.join(missing)}): {use}; {get}")


def _model() -> Check:
    path = paths.bundled_model()
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
        size = path.stat().st_size
    except OSError as error:
        return Check("bundled model", Status.ERROR, f"{path}: {error.strerror}", "install llamabatch again")
    if magic != b"GGUF":
        return Check("bundled model", Status.ERROR, f"{path} is not a GGUF file", "install llamabatch again")
    return Check("bundled model", Status.OK, f"tiny, {size / 1e6:.1f} MB")


def _profiles() -> Check:
    found = profile_store.here()
    if not found:
        return Check("profiles", Status.OK, "none: `llamabatch tune -m MODEL` measures what is fastest here")
    return Check("profiles", Status.OK, "; ".join(f"{profile.model} ({profile.created})" for profile in found))


def _trials() -> Check:
    found = [each.get("loads") for each in disk_cache.all_of(vetting.MODELS)]
    if not found:
        return Check("trial loads", Status.OK, "none: the first load of a model file tries it out in a child process")
    refused = f", {found.count(False)} refused" if False in found else ""
    good = found.count(True)
    known = f"{counted(good, 'file')} known to load{refused}"
    return Check("trial loads", Status.OK, f"{known}; to forget: {disk_cache.folder()}")


def _cache() -> Check:
    folder = paths.cache_dir()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if os.access(existing, os.W_OK):
        return Check("cache", Status.OK, str(folder))
    cure = "set LLAMABATCH_CACHE to a folder that you may write"
    return Check("cache", Status.WARN, f"{folder} cannot be written", cure)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 30):.1f} GiB"


def _has_nvidia_gpu() -> bool:
    return "GPU 0" in command_output("nvidia-smi", "-L")
