"""Libraries that this process has loaded are distinguished from others in the same folder."""

import shutil
import subprocess
import sys
from pathlib import Path

from llamabatch.llama import build_info, library
from llamabatch.planning import binding_choice


def test_the_cpu_library_is_the_one_that_ggml_calls_and_the_system_has_mapped():
    module = library.load()
    found = build_info.cpu_library(module)
    assert found.parent == build_info.library_dir(module)
    assert "ggml-cpu" in found.name
    assert build_info._registered_cpu_library(module).resolve() == found
    if sys.platform == "linux":
        assert build_info._mapped_cpu_library(found.parent, build_info._mapped_files()) == found


def test_a_variant_for_another_cpu_beside_it_is_not_taken(tmp_path):
    folder = tmp_path / "lib"
    shutil.copytree(binding_choice.installed("llama_cpp") / "lib", folder, symlinks=True)
    (folder / "libggml-cpu-a.so").write_bytes(b"kernels for another CPU")
    code = (
        "from llamabatch.llama import build_info, library; module = library.load()\n"
        "print(build_info.cpu_library(module)); print(build_info._registered_cpu_library(module).resolve())"
    )
    root = str(Path(library.__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-c", code], env={"LLAMA_CPP_LIB_PATH": str(folder), "PYTHONPATH": root},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for line in run.stdout.splitlines():
        assert Path(line).parent == folder.resolve()
        assert Path(line).name.startswith("libggml-cpu.")
