"""A build for CUDA: its contents, its messages without a GPU, and equal texts on the CPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from llamabatch.native_build import binding, source
from llamabatch.utils.subprogram import command
from tests.cuda import toolkit

without_driver = pytest.mark.skipif(toolkit.has_driver(), reason="for a machine without NVIDIA's driver")
LIBRARY = f"lib{binding.PREFIX}ggml-cuda.so"


def doctor(environment):
    done = subprocess.run(
        command("llamabatch", "doctor", "--json"), env=environment, capture_output=True, text=True, check=False
    )
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_kernels_for_the_device_are_in_it(package):
    sections = subprocess.run(
        ["readelf", "-SW", package / "lib" / LIBRARY], capture_output=True, text=True, check=True
    ).stdout
    [fields] = [line.split("]", 1)[1].split() for line in sections.splitlines() if "] .nv_fatbin " in line]
    assert int(fields[4], 16) > 1_000_000


def test_every_library_that_it_is_linked_with_is_found(package):
    linked = subprocess.run(["ldd", package / "lib" / LIBRARY], capture_output=True, text=True, check=True).stdout
    assert "libcublas.so" in linked
    assert [line for line in linked.splitlines() if "not found" in line] == []


def test_it_names_the_folder_of_its_toolkit(package):
    """Programs find cuBLAS without an environment variable. The other tests rely on this."""
    told = subprocess.run(
        ["readelf", "-dW", package / "lib" / LIBRARY], capture_output=True, text=True, check=True
    ).stdout
    [path] = [
        line.split("[", 1)[1].rstrip("]") for line in told.splitlines() if "(RUNPATH)" in line or "(RPATH)" in line
    ]
    folders = [folder for folder in path.split(":") if folder != "$ORIGIN"]
    assert any(list(Path(folder).glob("libcublas.so.*")) for folder in folders), path


def test_it_has_the_patches(package):
    marker = json.loads((package / "llamabatch_build.json").read_text())
    assert marker["backend"] == "cuda"
    assert set(marker["patches"]) == {patch.name for patch in source.patches()}


@without_driver
def test_doctor_says_that_there_is_no_gpu_and_what_to_do(cuda):
    checks = doctor(cuda)
    assert (checks["gpu"]["status"], checks["gpu"]["detail"]) == (
        "warn", "this build is for GPUs (cuda), but finds none"
    )  # fmt: skip
    assert "install NVIDIA's driver" in checks["gpu"]["cure"]
    assert checks["instructions"]["status"] == "ok"
    hidden = doctor({**cuda, "CUDA_VISIBLE_DEVICES": "-1"})
    assert hidden["gpu"]["cure"] == "CUDA_VISIBLE_DEVICES hides all of them: unset it"


@without_driver
def test_a_device_that_is_not_here_is_refused(run):
    [found] = run({"devices": "CUDA0"})
    assert found["type"] == "ConfigError"
    assert "devices names 'CUDA0', which is no GPU of this machine" in found["error"]


PLACES = [{"devices": "none"}, {"devices": "none", "kv": "unified"}, {"devices": "none", "flash_attn": "off"}]


def test_the_cpus_texts_to_the_last_bit(run, on_cpu):
    """The patches of the CPU's kernels work in the CUDA build as in the build of .venv."""
    for options, here, there in zip(PLACES, run(*PLACES), on_cpu(*PLACES), strict=True):
        assert here["errors"] == []
        assert here["texts"] == there["texts"], options
        assert here["logprobs"] == there["logprobs"], options
        assert here["ragged"] == there["ragged"], options


@without_driver
def test_without_a_gpu_all_layers_are_on_the_cpu(run, on_cpu):
    settings = [{}, {"batch_invariant": True}, {"isolate": True}]
    for options, here, there in zip(settings, run(*settings), on_cpu(*settings), strict=True):
        assert here["gpus"] == here["names"] == []
        assert (here["texts"], here["logprobs"]) == (there["texts"], there["logprobs"]), options
        assert here["memory"]["gpus"] == []
        assert set(here["reserved"]) == set(there["reserved"])
