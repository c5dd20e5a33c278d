"""The portable build of `make wheels`, if this machine has one: its CPU variants, threads and library names."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from llamabatch.planning.cpu import cpu_flags
from native_patches import variants, wheels

ARCH = platform.machine()
BUILD = wheels.Portable(ARCH, variants.chosen(ARCH)) if sys.platform == "linux" and ARCH in variants.VARIANTS else None
NAMES = [each.name for each in BUILD.variants if set(each.needs) <= cpu_flags()] if BUILD else []
pytestmark = pytest.mark.skipif(BUILD is None or not BUILD.folder.is_dir(), reason="make wheels has not built it here")

ANSWER = """
from llamabatch import LLM, SamplingParams
with LLM("tiny", n_slots=4) as llm:
    answers = llm.chat([[{"role": "user", "content": f"What is the capital of {c}?"}] for c in ("France", "Spain")] * 2,
        SamplingParams(temperature=0, max_tokens=12))
print([each.text for each in answers])
"""
PEER = """
import llama_cpp
from llamabatch.utils.paths import bundled_model
peer = llama_cpp.Llama(str(bundled_model()), n_ctx=256, verbose=False, seed=1)
print(peer.create_chat_completion([{"role": "user", "content": "What is the capital of France?"}],
    max_tokens=12, temperature=0)["choices"][0]["message"]["content"])
"""
MAPPED = """
print(sorted({line.split("/")[-1].strip() for line in open("/proc/self/maps") if "ggml" in line}))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("portable")
    return wheels.portable_package(BUILD, folder)


def told(code, package, tmp_path, **more):
    environment = {**os.environ, "LLAMABATCH_LLAMA": str(package), **more}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_each_variant_that_this_cpu_can_run_answers(package, tmp_path, name):
    answers, mapped = told(ANSWER + MAPPED, package, tmp_path, LLAMABATCH_CPU_VARIANT=name)
    assert answers.count("Paris") == 2
    assert answers.count("Madrid") == 2
    files = [file for file in json.loads(mapped.replace("'", '"')) if "ggml-cpu" in file]
    assert files == [f"libllamabatch-ggml-cpu-{name}.so"]  # only the library of this variant is mapped


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_another_llama_cpp_in_the_process_keeps_its_ggml_and_ours_keeps_ours(package, tmp_path, first):
    parts = [ANSWER, PEER] if first == "ours" else [PEER, ANSWER]
    *answers, mapped = told("".join(parts) + MAPPED, package, tmp_path)
    assert [("Paris" in answer, len(answer) > 0) for answer in answers] == [(True, True)] * 2
    assert "libllamabatch-ggml-base.so" in mapped
    assert "'libggml-base.so" in mapped


def test_the_marker_says_what_each_variant_needs(package):
    marker = json.loads((package / "llamabatch_build.json").read_text())
    assert [each["name"] for each in marker["variants"]] == [each.name for each in BUILD.variants]
    assert {each["file"] for each in marker["variants"]} <= {path.name for path in (package / "lib").iterdir()}
    assert marker["openmp"] == "teams"


def test_a_step_waits_as_the_spin_count_says(package, tmp_path):
    """The portable build's own thread teams read GOMP_SPINCOUNT when they are loaded, as libgomp does."""
    code = "from llamabatch.llama import library; print(library.uses_libgomp())"
    assert told(code, package, tmp_path) == ["True"]


def test_the_libraries_need_nothing_but_glibc(package):
    needed = set()
    for path in Path(package / "lib").iterdir():
        listed = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=True).stdout
        needed |= {line.split()[0] for line in listed.splitlines() if "=>" in line}
    allowed = {"libm.so.6", "libc.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "linux-vdso.so.1"}
    assert {name for name in needed if not name.startswith("libllamabatch-")} <= allowed
