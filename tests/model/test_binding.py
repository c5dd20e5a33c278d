"""Our rewritten copy of llama-cpp-python's binding works beside the installed original."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest

from llamabatch.native_build import binding
from llamabatch.utils.paths import bundled_model

CODE = """
import json, sys
import {first}
import {second}
assert llamabatch_llama._binding is not sys.modules.get("llama_cpp")
binding = llamabatch_llama._binding
assert "llama_cpp" in sys.modules or not {both}
model = binding.Llama(sys.argv[1], n_ctx=256, verbose=False, n_threads=1)
print(json.dumps(model("One, two,", max_tokens=4, temperature=0.0)["choices"][0]["text"]))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("binding") / "llamabatch_llama"
    original = Path(llama_cpp.__file__).parent
    folder.mkdir()
    (folder / "__init__.py").touch()
    binding.copy_binding(original, folder / "_binding", prefix="")
    (folder / "lib").symlink_to(Path(llama_cpp.llama_cpp._lib._name).parent)
    return folder


def generated(package, first, second, both):
    code = CODE.format(first=first, second=second, both=both)
    done = subprocess.run(
        [sys.executable, "-c", code, str(bundled_model())],
        env={"PYTHONPATH": str(package.parent), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_copy_generates_and_shadows_nothing(package):
    copy = binding.prove(package)
    assert copy.parent == package / "lib"
    ours = "llamabatch_llama._binding"
    alone = generated(package, ours, "json", False)
    assert alone.strip()
    assert generated(package, "llama_cpp", ours, True) == generated(package, ours, "llama_cpp", True) == alone


def test_nothing_of_the_original_is_missing(package):
    shutil.rmtree(package / "_binding" / "__pycache__", ignore_errors=True)
    left_out = {"server"}
    original = Path(llama_cpp.__file__).parent
    wanted = {
        path.relative_to(original)
        for path in original.rglob("*.py")
        if path.relative_to(original).parts[0] not in left_out
    }
    assert wanted == {path.relative_to(package / "_binding") for path in (package / "_binding").rglob("*.py")}
