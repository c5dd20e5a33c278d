"""Finds a CUDA toolkit: the toolkit of nvcc, or, if that lacks cuBLAS, a folder of links with cuBLAS added."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from llamabatch.native_build.tools import SetupFailure, cache_dir, lock, make_folder, run_logged, say

ARCHITECTURES = "90"
"""Those of H100 and H200; a build for any card takes several times as long."""
NO_VMM = "-DGGML_CUDA_NO_VMM=ON"
"""Leaves out ggml's calls into the driver's own library, without which a build does not load."""
QUICKLY = "--Ofast-compile=max"
"""Kernels that no GPU will run are compiled without optimisation, in a third of the time; nvcc knows it since 12.9."""
_HEADER = "cublas_v2.h"


def environment() -> dict[str, str]:
    """Returns the variables with which a CUDA build compiles, and finds its libraries when it is loaded.

    Raises:
        SetupFailure: there is no nvcc, or cuBLAS cannot be downloaded.
    """
    toolkit = whole_toolkit()
    flags = os.environ.get("CMAKE_ARGS", "")
    compiler = toolkit / "bin" / "nvcc"
    cuda_flags = os.environ.get("CUDAFLAGS", "")
    if not has_driver():
        if "GGML_CUDA_NO_VMM" not in flags:
            flags = f"{flags} {NO_VMM}".strip()
        if not cuda_flags and _knows(compiler, QUICKLY):
            cuda_flags = QUICKLY
    return {
        "PATH": _before("PATH", toolkit / "bin"),
        "LD_LIBRARY_PATH": _before("LD_LIBRARY_PATH", toolkit / "lib", toolkit / "lib64"),
        "CUDAToolkit_ROOT": str(toolkit),
        "CUDACXX": str(compiler),
        "CUDAFLAGS": cuda_flags,
        "CUDAARCHS": os.environ.get("CUDAARCHS", ARCHITECTURES),
        "CMAKE_ARGS": flags,
    }


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _knows(compiler: Path, option: str) -> bool:
    """Returns True if the compiler has this option, which has the form `--name=value`."""
    told = subprocess.run([compiler, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return option.partition("=")[0] in told.stdout


def whole_toolkit() -> Path:
    """Returns the folder of nvcc's toolkit if it has cuBLAS, or else a folder of links in the cache with cuBLAS."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise SetupFailure("The CUDA compiler nvcc is not on PATH: install the CUDA toolkit; a GPU is not needed.")
    own, release = _told(nvcc)
    if any(own.glob(f"**/{_HEADER}")):
        return own
    home = make_folder(cache_dir() / "cuda")
    target = home / f"toolkit-{release}"
    with lock(home / "lock"):
        if not target.is_dir():
            _join(own, target, release)
    return target


def _told(nvcc: str) -> tuple[Path, str]:
    """Returns the folder of the toolkit, and its release, such as `13.0`. It asks the compiler, because the nvcc on
    PATH may be a script outside the toolkit."""
    version, dry_run = (
        subprocess.run([nvcc, *options], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        for options in (["--version"], ["--dryrun", "-x", "cu", os.devnull])
    )
    release = re.search(r"release (\d+\.\d+)", version.stdout)
    top = re.search(r"^#\$ TOP=(.+)$", dry_run.stderr, flags=re.MULTILINE)
    if release is None or top is None:
        raise SetupFailure(f"{nvcc} --version and --dryrun name no release and no folder: install the toolkit again.")
    return Path(top[1].strip()).resolve(), release[1]


def _join(own: Path, target: Path, release: str) -> None:
    """Makes a folder of links to all files of a toolkit, and installs cuBLAS of the same release beside them."""
    major = int(release.partition(".")[0])
    name = "nvidia-cublas" if major > 12 else f"nvidia-cublas-cu{major}"
    say(f"The toolkit {own} lacks cuBLAS: getting {name} {release} from the package index (400 MB)")
    log = make_folder(cache_dir() / "logs") / "cuda.log"
    log.write_bytes(b"")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="join-", ignore_cleanup_errors=True) as temporary:
        place = Path(temporary)
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--dest", place]
        if run_logged([*command, f"{name}=={release}.*"], log, "downloading cuBLAS") != 0:
            raise SetupFailure(f"{name} {release} is not to be had (log: {log}): install all of the CUDA toolkit.")
        with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
            wheel.extractall(place / "wheel")
        whole = place / "whole"
        shutil.copytree(own, whole, symlinks=True, copy_function=os.symlink)
        root = next((place / "wheel" / "nvidia").glob("cu*"))
        libraries = whole / ("lib64" if (whole / "lib64").is_dir() else "lib")
        shutil.copytree(root / "include", whole / "include", dirs_exist_ok=True)
        for library in sorted((root / "lib").glob("*.so.*")):
            shutil.move(library, libraries / library.name)
            (libraries / f"{library.name.partition('.so')[0]}.so").symlink_to(library.name)
        os.replace(whole, target)


def _before(name: str, *added: Path) -> str:
    return os.pathsep.join(filter(None, (*(str(each) for each in added if each.is_dir()), os.environ.get(name))))
