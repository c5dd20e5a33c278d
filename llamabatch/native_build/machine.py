"""Plans the build for this machine: backend, compiler, and instruction sets of the CPU."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from llamabatch.native_build import sampler_library, source
from llamabatch.native_build.plan import Plan
from llamabatch.native_build.recipe import FLAGS
from llamabatch.native_build.tools import COMPILER_CURE, SetupFailure, say

BACKENDS = ("cpu", "cuda", "metal", "rpc", "vulkan")
_BACKEND_FLAGS: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "cuda": ("-DGGML_CUDA=ON",),
    "metal": ("-DGGML_METAL=ON",),
    "rpc": ("-DGGML_RPC=ON",),
    "vulkan": ("-DGGML_VULKAN=ON",),
}
_VULKAN_HEADERS = {"the Vulkan headers": "vulkan/vulkan.hpp", "the SPIR-V headers": "spirv/unified1/spirv.hpp"}
_VULKAN_NEEDS = "VK_EXT_layer_settings"  # the newest extension that ggml-vulkan uses
_VULKAN_CURE = (
    "Debian 13 and Ubuntu 24.04: apt install libvulkan-dev glslc spirv-headers; Fedora: dnf install vulkan-headers "
    "vulkan-loader-devel glslc spirv-headers-devel; Arch: pacman -S vulkan-headers vulkan-icd-loader shaderc "
    "spirv-headers; macOS: brew install vulkan-headers vulkan-loader shaderc spirv-headers molten-vk; Windows and "
    "elsewhere: the Vulkan SDK of https://vulkan.lunarg.com, with VULKAN_SDK naming its folder"
)
_ENVIRONMENT = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDAFLAGS", "MACOSX_DEPLOYMENT_TARGET")
_NO_COMPILER = f"No C++ compiler was found: install one ({COMPILER_CURE}), or name yours with CXX, and run it again."

# The instruction sets for which ggml has code. Keys: the macros that compilers define for them. Values: Linux's names.
_INSTRUCTION_SETS = {
    "__SSE4_2__": "sse4_2", "__AVX__": "avx", "__AVX2__": "avx2", "__FMA__": "fma", "__F16C__": "f16c",
    "__BMI2__": "bmi2", "__AVXVNNI__": "avx_vnni", "__AVX512F__": "avx512f", "__AVX512BW__": "avx512bw",
    "__AVX512VL__": "avx512vl", "__AVX512VBMI__": "avx512vbmi", "__AVX512VNNI__": "avx512_vnni",
    "__AVX512BF16__": "avx512_bf16", "__AMX_TILE__": "amx_tile", "__AMX_INT8__": "amx_int8",
    "__AMX_BF16__": "amx_bf16", "__ARM_FEATURE_DOTPROD": "asimddp", "__ARM_FEATURE_MATMUL_INT8": "i8mm",
    "__ARM_FEATURE_SVE": "sve", "__ARM_FEATURE_SVE2": "sve2", "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp",
}  # fmt: skip
_PORTABLE_X86 = ("avx", "avx2", "bmi2", "f16c", "fma", "sse4_2")  # ggml's defaults without GGML_NATIVE


def make_plan(
    backend: str,
    patch_folder: Path = source.PATCH_FOLDER,
    kernel_folder: Path = source.KERNEL_FOLDER,
    *,
    portable: bool = False,
) -> Plan:
    """Returns the plan for this machine.

    Args:
        backend: one of BACKENDS, or "auto" for metal or cuda if the machine has it, else cpu.
        portable: True builds for any CPU of this kind with AVX2 or NEON. False uses all instruction sets of this CPU.

    Raises:
        SetupFailure: this machine cannot build that backend, or has no C++ compiler.
    """
    backend = default_backend() if backend == "auto" else backend
    compiler, macros = _compiler()
    nvcc = _nvcc_version() if backend == "cuda" else ""
    compiler += f"; {nvcc}" if nvcc else ""
    if backend == "metal" and sys.platform != "darwin":
        raise SetupFailure("The metal backend exists on macOS only: choose cpu, cuda or vulkan.")
    if backend == "vulkan":
        require_vulkan()
        compiler += f"; {_glslc_version()}"  # the plan has this version, because a newer glslc compiles more shaders
    if portable:
        instructions: tuple[str, ...] = _PORTABLE_X86 if platform.machine().lower() in ("x86_64", "amd64") else ()
        macros = platform.machine()
    else:
        instructions = cpu_flags(macros)
    user_flags = tuple(shlex.split(os.environ.get("CMAKE_ARGS", "")))
    return Plan(
        backend=backend,
        flags=(
            f"-DGGML_NATIVE={'OFF' if portable else 'ON'}",
            *FLAGS,
            *_BACKEND_FLAGS[backend],
            *_cuda_architecture(backend, nvcc),
            *user_flags,
        ),
        patches={patch.name: source.sha256_of(patch) for patch in source.patches(patch_folder)},
        kernels={kernel.name: source.sha256_of(kernel) for kernel in source.kernels(kernel_folder)},
        compiler=compiler,
        cpu=hashlib.sha256(macros.encode()).hexdigest()[:16],
        environment={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        cpu_flags=instructions,
    )


def cpu_flags(macros: str) -> tuple[str, ...]:
    """Returns Linux's names of the instruction sets that the compiler's macros report and that ggml has code for."""
    found = set(re.findall(r"^#define (\w+) ", macros, flags=re.MULTILINE))
    return tuple(sorted(name for macro, name in _INSTRUCTION_SETS.items() if macro in found))


def default_backend() -> str:
    """Returns this machine's backend: metal, cuda or cpu. cuda needs its compiler and a driver that sees a GPU."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "metal"
    return "cuda" if shutil.which("nvcc") and _has_nvidia_gpu() else "cpu"


def _compiler() -> tuple[str, str]:
    """Returns the compiler's version line, and all its macros for this CPU (they name instruction sets)."""
    command = sampler_library.find_compiler()
    version = _output([*command, "--version"]) if command else None
    if version is None:
        raise SetupFailure(_NO_COMPILER)
    for native in ("-march=native", "-mcpu=native"):
        macros = _output([*command, native, "-dM", "-E", "-x", "c++", os.devnull])
        if macros is not None:
            return version.splitlines()[0], "\n".join(sorted(macros.splitlines()))
    return version.splitlines()[0], platform.machine()


def _nvcc_version() -> str:
    lines = (_output(["nvcc", "--version"]) or "").strip().splitlines()
    if not lines:
        raise SetupFailure(
            "The cuda backend needs the CUDA compiler nvcc, which is not on PATH: install the CUDA toolkit, "
            "or choose the cpu backend."
        )
    return lines[-1]


def require_vulkan() -> None:
    """Raises SetupFailure if something for the vulkan backend is missing. For use before compiling."""
    if "-DVulkan_" in os.environ.get("CMAKE_ARGS", ""):  # the user tells CMake where Vulkan is
        return
    places = _vulkan_places()
    missing = [] if _glslc() else ["the shader compiler glslc"]
    compiler = [*sampler_library.find_compiler(), *(f"-I{place / 'include'}" for place in places)]
    for name, header in _VULKAN_HEADERS.items():
        macros = _output([*compiler, "-dM", "-E", "-include", header, "-x", "c++", os.devnull])
        if macros is None:
            missing.append(name)
        elif "#define VK_HEADER_VERSION " in macros and f"#define {_VULKAN_NEEDS} " not in macros:
            missing.append(f"{name} of 1.3.275 or newer (those here are of {_vulkan_version(macros)})")
    if sys.platform != "win32" and not _has_vulkan_loader(compiler, places):
        missing.append("the Vulkan loader's library for linking")
    if missing:
        raise SetupFailure(
            f"The vulkan backend lacks {', '.join(missing)}: install what is missing ({_VULKAN_CURE}), "
            "or choose the cpu backend."
        )


def _vulkan_places() -> list[Path]:
    """Returns folders with `bin`, `include` and `lib`. CMake searches them in addition to the system's folders."""
    named = (os.environ.get("VULKAN_SDK", ""), *os.environ.get("CMAKE_PREFIX_PATH", "").split(os.pathsep))
    return [Path(place) for place in named if place]


def _glslc() -> str | None:
    places = (None, *(str(place / "bin") for place in _vulkan_places()))
    return next(filter(None, (shutil.which("glslc", path=place) for place in places)), None)


def _glslc_version() -> str:
    found = _glslc()
    return next(iter((_output([found, "--version"]) or "").splitlines()), "") if found else ""


def _vulkan_version(macros: str) -> str:
    """Returns the version in the headers' macros, for example `1.3.239`."""
    complete = re.search(r"#define VK_HEADER_VERSION_COMPLETE \w+\((?:\d+, *)?(\d+), *(\d+), *\w+\)", macros)
    patch = re.search(r"#define VK_HEADER_VERSION (\d+)", macros)
    return ".".join([*(complete.groups() if complete else ("1", "?")), patch[1] if patch else "?"])


def _has_vulkan_loader(compiler: list[str], places: list[Path]) -> bool:
    names = ("lib", "lib64", f"lib/{sysconfig.get_config_var('MULTIARCH') or 'lib'}")
    folders = [f"-L{place / name}" for place in places for name in names]
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "linked")
        line = [*compiler, "-shared", "-fPIC", "-x", "c++", os.devnull, "-o", out, *folders, "-lvulkan"]
        return _output(line) is not None


def _has_nvidia_gpu() -> bool:
    return "GPU 0" in (_output(["nvidia-smi", "-L"]) or "")


def _cuda_architecture(backend: str, nvcc: str) -> tuple[str, ...]:
    """Returns the flag with the GPU architectures of a CUDA build.

    These are the architectures in CUDAARCHS. If CUDAARCHS is not set, they are the architectures of this machine's
    GPUs, which saves most of the compile time. If no GPU is visible, they are all current architectures. Without the
    flag, ggml asks CMake for "native", which fails if no GPU is visible, as in the build of a container.

    Args:
        nvcc: the last line of `nvcc --version`.
    """
    if backend != "cuda" or "CUDA_ARCHITECTURES" in os.environ.get("CMAKE_ARGS", ""):
        return ()
    named = os.environ.get("CUDAARCHS", "")
    if named:  # without this flag, ggml's default would override CUDAARCHS
        return (f"-DCMAKE_CUDA_ARCHITECTURES={named}",)
    found = _output(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]) or ""
    capabilities = sorted({(int(major), int(minor)) for major, minor in re.findall(r"(\d+)\.(\d+)", found)})
    if capabilities:
        return (f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(f'{major}{minor}' for major, minor in capabilities)}",)
    chosen = _all_cuda_architectures(nvcc)
    say(
        f"No GPU is visible here: the build is for the CUDA architectures {', '.join(chosen)}, which takes several "
        "times as long as one for a single card. CUDAARCHS names others: CUDAARCHS=90 is for H100 and H200 alone."
    )
    return (f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(chosen)}",)


def _all_cuda_architectures(nvcc: str) -> tuple[str, ...]:
    """Returns the architectures of a build for any machine, as in ggml-cuda/CMakeLists.txt. nvcc's version decides."""
    match = re.search(r"(?:cuda_|release )(\d+)\.(\d+)", nvcc)
    version = (int(match[1]), int(match[2])) if match else (12, 0)
    chosen = ["75-virtual", "80-virtual", "86-real"]
    if version < (13, 0):
        chosen = ["50-virtual", "61-virtual", "70-virtual", *chosen]
    if version >= (11, 8):
        chosen += ["89-real", "90-virtual"]
    if version >= (12, 8):
        chosen += ["120a-real"]
    if version >= (12, 9):
        chosen += ["121a-real"]
    return tuple(chosen)


def _output(command: list[str]) -> str | None:
    """Returns the standard output of a command, or None if the command is missing or fails."""
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None
