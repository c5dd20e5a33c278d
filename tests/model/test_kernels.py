"""Compiles and runs native_patches/kernels/tests, which compare our CPU kernels in the library in use with float64."""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from llamabatch.llama import build_info, library

pytestmark = pytest.mark.alone  # threads on all cores

SOURCES = Path(__file__).parents[2] / "native_patches" / "kernels" / "tests"
COMPILER = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


# every=31: only each 31st combination is tested. 31 has no factor in common with the numbers of types, shapes, rows and
# threads, so each of these still occurs.
@pytest.mark.parametrize("every", [1, pytest.param(31, marks=pytest.mark.guard)])
@pytest.mark.parametrize("name", ["flash_attention_check", "matmul_check", "state_check"])
@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
@pytest.mark.skipif(not library.has_fast_attention(), reason="llama.cpp is not the patched build")
def test_types_shapes_and_threads(tmp_path, name, every):
    libraries = build_info.library_dir(library.load())
    program = tmp_path / "check"
    include = Path(sysconfig.get_path("platlib")) / "llama_cpp" / "include"
    command = [
        COMPILER, "-O2", "-std=c++17", f"-I{include}", str(SOURCES / f"{name}.cpp"), "-o", str(program),
        f"-L{libraries}", "-lggml-cpu", "-lggml-base", "-lggml",
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=300)
    environment = os.environ | {"LD_LIBRARY_PATH": str(libraries), "GOMP_SPINCOUNT": "1000"}
    done = subprocess.run([program, "every", str(every)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    failed, of = map(int, re.search(r"(\d+) of (\d+) cases failed", done.stdout).groups())
    assert failed == 0 < of
