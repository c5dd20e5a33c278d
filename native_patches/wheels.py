"""Makes both wheels: `make wheels`, into dist/.

    python -m native_patches.wheels [--arch x86_64|aarch64]... [--variants NAMES|native] [--out dist]

llamabatch is pure Python. llamabatch-llama contains llama.cpp with our patches, with the CPU backend once for each
variant (variants.py), libmtmd, the compiled sampler, and llama-cpp-python's Python files as llamabatch_llama._binding.

The compiler is zig's Clang, from PyPI. It compiles for an old glibc and for other CPUs, and contains libc++, so that
the libraries need only glibc. With `--variants native` the program instead packs the build that `make setup` made for
this CPU. That takes seconds, but the wheel runs only on this machine; it serves for tests. Builds are stored in the
cache, in folders named by the hash of their inputs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamabatch.native_build import binding, machine, recipe, sampler_library, source
from llamabatch.native_build.plan import RECIPE
from llamabatch.native_build.tools import (
    SetupFailure,
    cache_dir,
    explain,
    lock,
    main_guard,
    make_folder,
    require_space,
    run_logged,
    say,
)
from native_patches import local_wheel, variants

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTION = Path(__file__).parent / "packaging" / "llamabatch-llama"
PORTABLE = Path(__file__).parent / "portable"
RELEASE_VARIABLE = "LLAMABATCH_RELEASE"
"""Environment variable that makes a build of llamabatch pure Python, with llamabatch-llama as a dependency."""
PACKAGE_VARIABLE, TAG_VARIABLE = "LLAMABATCH_WHEEL_PACKAGE", "LLAMABATCH_WHEEL_TAG"
"""Environment variables of a build of llamabatch-llama, for the folder of the finished package and the wheel's tag."""

GLIBC = (2, 28)
TOOLS = ("ziglang==0.17.1", "cmake>=3.28,<5", "ninja>=1.11", "auditwheel>=6.4")
_NATIVE = "native"
_GIGABYTES = 1.5
_FLAGS = (*recipe.FLAGS, "-DGGML_NATIVE=OFF", "-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON", "-DGGML_OPENMP=OFF")
# Contraction across statements is GCC's default. -Bsymbolic makes a library call its own functions, not another's.
_COMPILE, _LINK = "-ffp-contract=fast", "-s -Wl,-Bsymbolic"
# zig reads -march of ARM as the name of a CPU. In zig, releases of the architecture are features of -mcpu=generic.
_COMPILER = r"""#!/bin/sh
for each do
    shift
    case $each in -march=armv*)
        each=$(echo "$each" | sed -e 's/+fp16/+fullfp16/' \
            -e 's/^-march=armv\([0-9]*\)-a/-mcpu=generic+v\1a/' \
            -e 's/^-march=armv\([0-9]*\)\.\([0-9]*\)-a/-mcpu=generic+v\1_\2a/')
    esac
    set -- "$@" "$each"
done
exec "{zig}" {command} "$@"
"""


@dataclass(frozen=True)
class Portable:
    """The inputs of a portable build for Linux."""

    arch: str
    variants: tuple[variants.Variant, ...]

    @property
    def target(self) -> str:
        """The target machine in zig's notation."""
        return f"{self.arch}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"

    @property
    def patches(self) -> list[Path]:
        return [*source.patches(), *source.patches(source.UNCOUNTED_FOLDER)]

    @property
    def key(self) -> str:
        own = [*PORTABLE.iterdir(), *sampler_library.sources(), recipe.OWN_NAMES]
        facts = [
            RECIPE, source.SHA256, self.target, TOOLS, _FLAGS, _COMPILE, _LINK,
            [[variant.name, *variant.sets] for variant in self.variants],
            [source.sha256_of(path) for path in (*self.patches, *source.kernels())],
            [source.sha256_of(path) for path in sorted(own, key=lambda path: path.name) if path.is_file()],
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    @property
    def folder(self) -> Path:
        return cache_dir() / "portable" / self.key

    def marker(self, release: str) -> str:
        facts = {
            "version": f"{source.VERSION}+llamabatch.{self.key[:8]}", "key": self.key, "release": release,
            "backend": "cpu", "portable": True, "arch": self.arch, "compiler": TOOLS[0].replace("==", " "),
            "flags": [*_FLAGS, _COMPILE, _LINK], "openmp": "teams",
            "patches": {path.name: source.sha256_of(path) for path in source.patches()},
            "kernels": {path.name: source.sha256_of(path) for path in source.kernels()},
            "variants": [
                {"name": each.name, "file": library_of(each), "needs": each.needs} for each in self.variants
            ],
        }  # fmt: skip
        return json.dumps(facts, indent=2) + "\n"


def library_of(variant: variants.Variant) -> str:
    """Returns the file name of a variant's library."""
    return f"lib{recipe.PREFIX}ggml-cpu-{variant.name}.so"


def release() -> str:
    """Returns the version of llamabatch, which is also that of llamabatch-llama."""
    text = (ROOT / "llamabatch" / "utils" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, flags=re.MULTILINE)
    if found is None:
        raise SetupFailure("llamabatch/utils/version.py states no version.")
    return found[1]


def portable_package(portable: Portable, folder: Path) -> Path:
    """Makes the package `llamabatch_llama` of a portable build in `folder`; returns its path."""
    made = portable_libraries(portable)
    package, libraries = _package(folder, portable.marker(release()), recipe.PREFIX)
    for path in made.iterdir():
        shutil.copy2(path, libraries / path.name)
    if portable.arch == platform.machine():
        binding.prove(package)
    return package


def _package(folder: Path, marker: str, prefix: str) -> tuple[Path, Path]:
    """Makes a package without libraries in `folder`; returns the package and the folder for its libraries."""
    log = make_folder(cache_dir() / "logs") / "package.log"
    tree = source.unpack(source.fetch(log), folder)
    package = folder / binding.PACKAGE
    libraries = binding.make_package(tree, package, release(), marker, prefix=prefix)
    shutil.copyfile(ROOT / "LICENSE", package / "licenses" / "llamabatch.txt")
    return package, libraries


def portable_libraries(portable: Portable) -> Path:
    """Returns the folder of a portable build's libraries, from the cache or built now."""
    folder = portable.folder
    if not folder.is_dir():
        make_folder(folder.parent)
        with lock(folder.parent / f"{folder.name}.lock"):
            if not folder.is_dir():  # another build may have made it while we waited
                _build(portable, folder)
    return folder


def _build(portable: Portable, folder: Path) -> None:
    require_space(folder.parent, _GIGABYTES)
    log = make_folder(cache_dir() / "logs") / f"portable-{folder.name}.log"
    log.write_text(portable.marker(release()), encoding="utf-8")
    say(f"Building llama.cpp for {portable.target}, {len(portable.variants)} CPU variants, once. Log: {log}")
    tools = tool_folder(log)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="build-") as temporary:
        place = Path(temporary)
        tree = source.patched_tree(log, place)
        variants.write_list(tree, portable.variants)
        compilers = _compilers(portable, tools, place)
        _compile(portable, tree, place / "build", tools, compilers, log)
        libraries = make_folder(place / "lib")
        for path in recipe.libraries(place / "build"):
            shutil.copy2(path, libraries / path.name)
        missing = [name for name in map(library_of, portable.variants) if not (libraries / name).is_file()]
        if missing:
            raise SetupFailure(f"The build left out {', '.join(missing)} (log: {log}).")
        _compile_sampler(portable, libraries, tools, compilers, place, log)
        if portable.folder != folder:  # the key depends on the files as they are now
            raise SetupFailure("A source of the build has changed since it began: run it again.")
        os.replace(libraries, folder)


def tool_folder(log: Path) -> Path:
    """Returns the `bin` folder of an environment with zig, cmake, ninja and auditwheel, which is made once."""
    home = cache_dir() / "tools" / hashlib.sha256(" ".join((*TOOLS, sys.version)).encode()).hexdigest()[:16]
    if not (home / "ready").is_file():
        say("  getting zig, cmake, ninja and auditwheel")
        shutil.rmtree(home, ignore_errors=True)
        pip: list[str | Path] = [home / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check"]
        commands: tuple[list[str | Path], ...] = ([sys.executable, "-m", "venv", home], [*pip, "--no-input", *TOOLS])
        for command in commands:
            if run_logged(command, log, "getting the tools") != 0:
                raise SetupFailure(f"The tools are not to be had: {explain(log, 'pip failed')} (log: {log}).")
        (home / "ready").touch()
    return home / "bin"


def _compilers(portable: Portable, tools: Path, place: Path) -> dict[str, Path]:
    """Writes programs that call zig as a compiler for the target; returns them by CMake's names."""
    [zig] = tools.parent.glob("lib/python*/site-packages/ziglang/zig")
    no_paths = shlex.quote(f"-ffile-prefix-map={place}=.")  # keeps paths of this machine out of the libraries
    made = {}
    for name, command in {
        "C_COMPILER": f"cc -target {portable.target} {no_paths}",
        "CXX_COMPILER": f"c++ -target {portable.target} {no_paths}",
        "AR": "ar", "RANLIB": "ranlib",
    }.items():  # fmt: skip
        program = place / f"zig-{name.lower()}"
        program.write_text(_COMPILER.format(zig=zig, command=command), encoding="utf-8")
        program.chmod(0o755)
        made[name] = program
    return made


def _environment(tools: Path) -> dict[str, str]:
    """Returns the compilers' environment, without the variables by which a user chooses compilers and flags."""
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_ARGS"):
        environment.pop(name, None)
    environment.setdefault("ZIG_GLOBAL_CACHE_DIR", str(cache_dir() / "zig"))
    return environment


def _compile(
    portable: Portable, tree: Path, target: Path, tools: Path, compilers: Mapping[str, Path], log: Path
) -> None:
    flags = [
        *_FLAGS, f"-DCMAKE_C_FLAGS={_COMPILE}", f"-DCMAKE_CXX_FLAGS={_COMPILE}",
        f"-DCMAKE_SHARED_LINKER_FLAGS={_LINK}", f"-DCMAKE_MODULE_LINKER_FLAGS={_LINK}",
        *(f"-DCMAKE_{name}={program}" for name, program in compilers.items()),
        f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={PORTABLE / 'portable.cmake'}",
        f"-DLLAMABATCH_VARIANTS={';'.join(variant.name for variant in portable.variants)}",
        "-DSKBUILD_PLATLIB_DIR=unused", "-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={portable.arch}",
    ]  # fmt: skip
    recipe.compile_tree(tree, target, log, flags, recipe.LIBRARIES, _environment(tools))


def _compile_sampler(
    portable: Portable, libraries: Path, tools: Path, compilers: Mapping[str, Path], place: Path, log: Path
) -> None:
    """Compiles the sampler. It takes our teams of threads from ggml's library, which is loaded anyway."""
    sources = [PORTABLE / "calls.c"]
    clones = ["-DLB_CLONES"] if portable.arch == "x86_64" else []
    if clones:
        sources.append(PORTABLE / "cpu_model.c")
    objects: list[Path] = []
    commands: list[list[str | Path]] = []
    for path in sources:
        objects.append(place / f"{path.stem}.o")
        commands.append([compilers["C_COMPILER"], "-O2", "-fPIC", "-c", path, "-o", objects[-1]])
    objects.append(place / "sampler.o")
    flags = [flag for flag in sampler_library.FLAGS if flag != "-shared"]
    commands.append(
        [compilers["CXX_COMPILER"], *flags, "-fopenmp", *clones, "-c", sampler_library.SOURCE, "-o", objects[-1]],
    )
    teams = libraries / f"lib{recipe.PREFIX}ggml-base.so"
    commands.append(
        [compilers["CXX_COMPILER"], "-shared", *_LINK.split(), "-Wl,-rpath,$ORIGIN", *objects, teams,
         "-o", libraries / sampler_library.LIBRARY]
    )  # fmt: skip
    for command in commands:
        if run_logged(command, log, "compiling the sampler", _environment(tools)) != 0:
            raise SetupFailure(f"The sampler was not compiled: {explain(log, 'see the end of the log')} (log: {log}).")


def native_package(folder: Path) -> Path:
    """Makes a package in `folder` from the build that `make setup` made for this CPU. It has one variant."""
    plan = machine.make_plan("cpu")
    wheel = local_wheel.kept(plan)
    if wheel is None:
        raise SetupFailure("There is no build of llama.cpp for this CPU in the cache: run make setup first.")
    facts = {**json.loads(plan.marker()), "release": release(), "cpu_flags": list(plan.cpu_flags)}
    package, libraries = _package(folder, json.dumps(facts, indent=2) + "\n", prefix="")
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if re.fullmatch(r"llama_cpp/lib/lib[\w-]+\.so", name):
                (libraries / Path(name).name).write_bytes(packed.read(name))
    if problem := sampler_library.compile_library(libraries / sampler_library.LIBRARY):
        say(f"  the sampler was not compiled: {problem}")
    binding.prove(package)
    return package


def package_here(folder: Path) -> tuple[Path, str]:
    """Makes the package with the CPU variants of this system in `folder`; returns it with the wheel's tag."""
    if sys.platform == "linux":
        portable = Portable(platform.machine(), variants.chosen(platform.machine()))
        return portable_package(portable, folder), tag(portable)
    return _package_of_another_system(folder), tag(None)


def _package_of_another_system(folder: Path) -> Path:
    """Makes a package for macOS or Windows with the system's compiler and ggml's own threads. Nobody has tried it."""
    arch = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine())
    wanted = variants.chosen(arch)
    log = folder / "build.log"
    log.touch()
    tree = source.patched_tree(log, folder)
    variants.write_list(tree, wanted)
    target = folder / "build"
    recipe.compile_tree(
        tree, target, log, (*_FLAGS, *recipe.names_flags()), recipe.LIBRARIES, recipe.with_cmake(folder, log)
    )
    suffix = ".dll" if sys.platform == "win32" else ".so"
    facts = json.loads(Portable(arch, wanted).marker(release()))
    facts |= {"compiler": "of the system", "flags": _FLAGS, "openmp": "none"}
    for entry in facts["variants"]:
        entry["file"] = Path(entry["file"]).stem + suffix
    package = folder / binding.PACKAGE
    libraries = binding.make_package(tree, package, release(), json.dumps(facts, indent=2) + "\n")
    for path in recipe.libraries(target):
        shutil.copy2(path, libraries / path.name)
    sampler_library.compile_library(libraries / sampler_library.LIBRARY)  # without it, numpy samples
    shutil.copyfile(ROOT / "LICENSE", package / "licenses" / "llamabatch.txt")
    binding.prove(package)
    return package


def tag(portable: Portable | None) -> str:
    """Returns the wheel's tag. `portable` None means this machine."""
    if portable is None:
        return f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    return f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_{portable.arch}"


def pack(out: Path, portables: Sequence[Portable | None]) -> list[Path]:
    """Writes llamabatch's wheel, and a wheel of llamabatch-llama for each build; None is the build for this CPU."""
    made = [_hatchling(ROOT, out, {RELEASE_VARIABLE: "1"})]
    for portable in portables:
        with tempfile.TemporaryDirectory() as temporary:
            place = Path(temporary)
            package = portable_package(portable, place) if portable else native_package(place)
            made.append(_hatchling(DISTRIBUTION, out, {PACKAGE_VARIABLE: str(package), TAG_VARIABLE: tag(portable)}))
        if portable is not None:
            check(made[-1], portable)
    return made


def _hatchling(project: Path, out: Path, variables: Mapping[str, str]) -> Path:
    """Builds the wheel of a project with this environment's hatchling; returns its path in `out`."""
    make_folder(out)
    with tempfile.TemporaryDirectory(dir=out) as temporary:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", temporary]
        done = subprocess.run(
            command, cwd=project, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        found = list(Path(temporary).glob("*.whl"))
        if done.returncode != 0 or len(found) != 1:
            raise SetupFailure(f"The wheel of {project.name} was not made: {(done.stderr or done.stdout).strip()}")
        target = out / found[0].name
        os.replace(found[0], target)
    return target


def check(wheel: Path, portable: Portable) -> None:
    """Raises SetupFailure unless auditwheel confirms that a wheel runs on all systems that its name promises."""
    log = make_folder(cache_dir() / "logs") / f"portable-{portable.key}.log"
    done = subprocess.run(
        [tool_folder(log) / "auditwheel", "show", str(wheel)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    found = re.search(r'platform\s+tag:\s+"manylinux_(\d+)_(\d+)_', " ".join(done.stdout.split()))
    if found is None or (int(found[1]), int(found[2])) > GLIBC:
        raise SetupFailure(f"{wheel.name} needs more than its name says: {done.stdout.strip() or done.stderr.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m native_patches.wheels", description=__doc__.split("\n\n", maxsplit=1)[0]
    )
    parser.add_argument("--arch", action="append", choices=("x86_64", "aarch64"), help="default: this machine's")
    parser.add_argument("--variants", default="", help="only these, with commas between; native: for this CPU, quickly")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    if sys.platform != "linux":
        raise SetupFailure("make wheels makes wheels for Linux, on Linux: see docs/install.md for other systems.")
    archs = options.arch or [platform.machine()]
    builds: list[Portable | None] = [None]
    if options.variants != _NATIVE:
        builds = [Portable(arch, variants.chosen(arch, options.variants)) for arch in archs]
    for wheel in pack(options.out, builds):
        print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    sys.exit(main_guard(main))
