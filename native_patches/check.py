"""Runs the checks of kernels and sampler over the patched source: with sanitizers, by clang, for older x86, for ARM.

    python -m native_patches.check [--only NAME]... [--json FILE]

`make test-native` runs this program. Each check builds its own llama.cpp in the user's cache, and takes some minutes.
The program skips a check if this machine lacks its compiler or an instruction set, and prints the reason. The exit
status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llamabatch.native_build import source
from llamabatch.native_build.plan import jobs
from llamabatch.native_build.tools import cache_dir, lock, main_guard, make_folder, require_space, run_logged, say

_HERE = Path(__file__).parent
TESTS = (_HERE / "kernels" / "tests", _HERE / "sampler" / "tests")
"""The folders with the checks of the kernels and of the sampler."""
MODEL = Path(__file__).parents[1] / "llamabatch" / "bundled" / "tiny.gguf"
GIGABYTES = 4.0
TIMEOUT_S = 3600

_KERNELS = ("flash_attention_check", "matmul_check", "state_check")
_ALL = (*_KERNELS, "decode_check", "sampler_check", "tokenizer_check")
_OPERATIONS = ("FLASH_ATTN_EXT", "GATED_DELTA_NET", "MUL_MAT", "MUL_MAT_ID", "SSM_SCAN")
_CMAKE = (
    *("-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
    *("-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_OPENSSL=OFF"),
)
_DEBUG = ("-O1", "-g1", "-fno-omit-frame-pointer")
_ARM = "aarch64-linux-gnu"
_AVX2 = frozenset({"avx2", "bmi2", "f16c", "fma"})
_X86 = ("-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")))


@dataclass(frozen=True)
class Check:
    """One build of the patched source and the programs that are run with it.

    Attributes:
        needs: programs that must be installed, each with its Debian package.
        cpu: features that the CPU must have, in Linux's names.
        sanitizers: the value of -fsanitize.
        targets: targets of cmake.
        run: command that starts each program, such as an emulator; empty: none.
        openmp: ggml uses OpenMP's threads. The thread sanitizer does not understand them.
    """

    name: str
    needs: tuple[tuple[str, str], ...] = (("g++", "g++"),)
    cpu: frozenset[str] = frozenset()
    compilers: tuple[str, str] = ("gcc", "g++")
    flags: tuple[str, ...] = ()
    sanitizers: str = ""
    cmake: tuple[str, ...] = ("-DGGML_NATIVE=ON",)
    targets: tuple[str, ...] = ("llama",)
    programs: tuple[str, ...] = _ALL
    run: tuple[str, ...] = ()
    openmp: bool = True

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        return (*self.flags, *((f"-fsanitize={self.sanitizers}",) if self.sanitizers else ()))


CHECKS = (
    Check("address", flags=(*_DEBUG, "-fno-sanitize-recover=all"), sanitizers="address,undefined"),
    Check("thread", flags=_DEBUG, sanitizers="thread", openmp=False),
    Check("clang", needs=(("clang++", "clang"),), compilers=("clang", "clang++"), flags=("-O3",), openmp=False),
    Check(
        "neon",
        needs=((f"{_ARM}-g++", f"g++-{_ARM}"), ("qemu-aarch64", "qemu-user")),
        compilers=(f"{_ARM}-gcc", f"{_ARM}-g++"),
        flags=("-O2",),
        cmake=(
            *("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DGGML_NATIVE=OFF"),
            "-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16",
        ),
        run=("qemu-aarch64", "-cpu", "max,sve=off,sme=off", "-L", f"/usr/{_ARM}"),
        openmp=False,
    ),
    Check("avx2", cpu=_AVX2, flags=("-O3",), cmake=_X86, targets=("ggml",), programs=_KERNELS),
    Check(
        "avx512",  # without VNNI
        cpu=_AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
        flags=("-O3",),
        cmake=(*_X86, "-DGGML_AVX512=ON"),
        targets=("ggml",),
        programs=_KERNELS,
    ),
    Check(
        "tiles",  # emulates the tiles of AMX, since most machines have none
        cpu=_AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"},
        flags=("-O3", "-DGGML_EMULATED_TILES=1"),
        cmake=(*_X86, *(f"-DGGML_{name}=ON" for name in ("AVX512", "AVX512_VNNI", "AVX512_BF16"))),
        targets=("ggml",),
        programs=("flash_attention_check", "matmul_check"),
    ),
    Check(
        "avx-vnni",
        cpu=_AVX2 | {"avx_vnni"},
        flags=("-O3",),
        cmake=(*_X86, "-DGGML_AVX_VNNI=ON"),
        targets=("ggml",),
        programs=_KERNELS,
    ),
    Check("backend-ops", flags=("-O3",), targets=("test-backend-ops",), programs=_OPERATIONS),
)


@dataclass(frozen=True)
class Result:
    """Outcome of one program of a check: "passed", "failed" or "skipped", and its last line or the reason."""

    check: str
    program: str
    outcome: str
    detail: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.check:12}{self.program:24}{self.outcome:9}{self.detail} ({self.seconds:.0f} s)"


def check_source(program: str) -> Path:
    """Returns the source file of a check."""
    return next(path for folder in TESTS if (path := folder / f"{program}.cpp").is_file())


def cpu_flags() -> frozenset[str]:
    """Returns the instruction sets of this CPU in Linux's names (`planning/cpu.py` also knows other systems)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    first = re.search(r"^(?:flags|Features)\s*:(.*)$", text, flags=re.MULTILINE)
    return frozenset(first[1].split() if first else ())


def missing(check: Check) -> str:
    """Returns why a check cannot run on this machine; "" if it can run."""
    if sys.platform != "linux":
        return "Linux only"
    if lacking := check.cpu - cpu_flags():
        return f"this CPU has no {', '.join(sorted(lacking))}"
    absent = [
        (program, package) for program, package in (*check.needs, ("cmake", "cmake")) if not shutil.which(program)
    ]
    packages = " ".join(package for _, package in absent)
    names = " and ".join(program for program, _ in absent)
    return f"{names} not installed (Debian: apt install {packages})" if absent else ""


def run_checks(checks: Sequence[Check]) -> Iterator[Result]:
    """Yields the results, check by check. Raises SetupFailure if the source is not available, or the disk is full."""
    home = make_folder(cache_dir() / "checks")
    require_space(home, GIGABYTES)
    able = [check for check in checks if not missing(check)]
    for check in checks:
        if check not in able:
            yield Result(check.name, "", "skipped", missing(check))
    with lock(home / "lock"), tempfile.TemporaryDirectory(dir=home, ignore_cleanup_errors=True) as temporary:
        log = make_folder(cache_dir() / "logs") / "checks.log"
        log.write_text("", encoding="utf-8")
        tree = source.patched_tree(log, Path(temporary))
        # beside the kernel that includes the header, since the path of an include flag may have blanks
        shutil.copy(TESTS[0] / "emulated_tiles.h", tree / source.KERNELS["repack-tiles.h"])
        for check in able:
            yield from _run(check, tree / "vendor" / "llama.cpp", Path(temporary) / check.name, log)


def _run(check: Check, tree: Path, place: Path, log: Path) -> Iterator[Result]:
    start = time.monotonic()
    say(f"{check.name}: building llama.cpp")
    for command in _build_commands(check, tree, place):
        if run_logged(command, log, check.name) != 0:
            yield Result(check.name, "build", "failed", f"see the end of {log}", time.monotonic() - start)
            return
    yield Result(check.name, "build", "passed", _version(check), time.monotonic() - start)
    for program in check.programs:
        yield _run_program(check, program, tree, place, log)
    shutil.rmtree(place, ignore_errors=True)


def _version(check: Check) -> str:
    done = subprocess.run([check.compilers[1], "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


def _build_commands(check: Check, tree: Path, place: Path) -> tuple[list[str | Path], ...]:
    flags = " ".join(check.compiler_flags)
    ops = "test-backend-ops" in check.targets
    options = [
        *(("-G", "Ninja") if shutil.which("ninja") else ()), *_CMAKE, *check.cmake, "-DBUILD_SHARED_LIBS=ON",
        f"-DGGML_OPENMP={'ON' if check.openmp else 'OFF'}",
        *(("-DLLAMA_BUILD_COMMON=ON", "-DLLAMA_BUILD_TESTS=ON") if ops else ()),
        f"-DCMAKE_C_COMPILER={check.compilers[0]}", f"-DCMAKE_CXX_COMPILER={check.compilers[1]}",
        # CMake does not know "Checked", so it adds neither -O3 nor -DNDEBUG, and llama.cpp's assertions stay
        "-DCMAKE_BUILD_TYPE=" + ("Checked" if check.sanitizers else "Release"),
        f"-DCMAKE_C_FLAGS={flags}", f"-DCMAKE_CXX_FLAGS={flags}",
    ]  # fmt: skip
    return (
        ["cmake", "-S", tree, "-B", place, *options],
        ["cmake", "--build", place, "--parallel", str(jobs()), "--target", *check.targets],
    )


def _run_program(check: Check, program: str, tree: Path, place: Path, log: Path) -> Result:
    start = time.monotonic()
    if program in _OPERATIONS:
        command: list[str | Path] = [place / "bin" / "test-backend-ops", "-b", "CPU", "-o", program]
    else:
        for step in _compile(check, program, tree, place):
            if run_logged(step, log, check.name) != 0:
                return Result(check.name, program, "failed", f"does not compile, see the end of {log}")
        arguments = {"decode_check": (MODEL,), "tokenizer_check": (tree / "src" / "llama-vocab.cpp",)}.get(program, ())
        command = [*check.run, place / program, *arguments]
    status, output = _output(command, place / "bin")
    with open(log, "a", encoding="utf-8") as file:
        file.write("$ " + " ".join(map(str, command)) + "\n" + output)
    return Result(
        check.name, program, "failed" if status else "passed", verdict(output, log), round(time.monotonic() - start, 1)
    )


def _compile(check: Check, program: str, tree: Path, place: Path) -> tuple[list[str | Path], ...]:
    """Returns the commands that compile and link a program.

    Sanitizers watch the library, but not the program with its slow reference in float64.
    """
    compiler, object_file = check.compilers[1], place / f"{program}.o"
    # these two programs contain the code that they check
    inside = program in ("sampler_check", "tokenizer_check")
    watched = check.compiler_flags if inside else (*check.flags, "-O2")
    include = [f"-I{tree / folder}" for folder in ("include", "ggml/include", "src")]
    libraries = ["-lllama"] if program in ("decode_check", "tokenizer_check") else []
    libraries = [] if program == "sampler_check" else [*libraries, "-lggml", "-lggml-cpu", "-lggml-base"]
    return (
        [
            compiler,
            "-std=c++17",
            "-fopenmp-simd",
            *watched,
            *include,
            "-c",
            check_source(program),
            "-o",
            object_file,
        ],
        [
            compiler,
            "-pthread",
            *check.compiler_flags,
            object_file,
            "-o",
            place / program,
            f"-L{place / 'bin'}",
            *libraries,
        ],
    )


def _output(command: Sequence[str | Path], libraries: Path) -> tuple[int, str]:
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(libraries), "GOMP_SPINCOUNT": "1000", "GGML_NO_BACKTRACE": "1",
        "UBSAN_OPTIONS": "print_stacktrace=1", "TSAN_OPTIONS": "halt_on_error=0",
    }  # fmt: skip
    try:
        done = subprocess.run(
            [str(part) for part in command], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", check=False, timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        shown = error.stdout or b""
        return 1, (shown if isinstance(shown, str) else shown.decode(errors="replace")) + "\nout of time\n"
    return done.returncode, done.stdout


def verdict(output: str, log: Path) -> str:
    """Returns the line of a program's output that states the outcome: a sanitizer's report, else a count of cases."""
    for pattern in (
        r"SUMMARY: (.*)",
        r"(\S+: runtime error: .*)",
        r"(\d+ of \d+ cases failed)",
        r"(\d+/\d+ tests passed)",
    ):
        if found := re.search(pattern, output):
            return found[1]
    return f"ended early, see the end of {log}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m native_patches.check", description=(__doc__ or "").split("\n\n")[0]
    )
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", action="append", choices=names, help="this check; repeatable; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the results, for machines")
    options = parser.parse_args()
    results: list[Result] = []
    for result in run_checks([check for check in CHECKS if not options.only or check.name in options.only]):
        results.append(result)
        print(result, flush=True)
    if options.json:
        rows = [asdict(result) for result in results]
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if any(result.outcome == "failed" for result in results):
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main_guard(main))
