"""Engines on Vulkan: the same texts as on the CPU, the plan's memory, and features that the device lacks."""

from __future__ import annotations

import json
import subprocess

import pytest

from llamabatch.utils.subprogram import command
from tests.devices.test_devices import same
from tests.devices.test_memory import SETTINGS, differing

NO_SHADERS = {"prompts": 0}
"""A load alone; a driver for CPUs takes minutes to compile the shaders of a pass."""
PLACES = [
    {},
    {"n_gpu_layers": 3},
    {"n_gpu_layers": 0},
    {"devices": "none"},
    {"devices": "Vulkan0", "split_mode": "none"},
    {"kv": "unified"},
    {"flash_attn": "off"},
    {"offload_kqv": False, "op_offload": False},
    {"device_sampling": "off"},
    {"speculate": "lookup"},
    {"isolate": True},
    {"strategy": "multi-instance", "instances": 2, "n_slots": 4},
]


@pytest.mark.parametrize("options", PLACES, ids=json.dumps)
def test_texts_are_those_of_the_cpu(run, on_cpu, options):
    [found] = run(options)
    same(found, on_cpu["texts"])


def test_it_computes_on_vulkan(run):
    everywhere, nowhere = run(NO_SHADERS, {**NO_SHADERS, "devices": "none"})
    assert len(everywhere["gpus"]) == 1
    assert everywhere["names"] == ["Vulkan0"]
    assert everywhere["reserved"]["Vulkan0"]["KV"] > 0
    assert "Vulkan0" not in nowhere["reserved"]


def test_rows_of_any_slots_share_a_pass_on_the_cpu_alone(run):
    on_device, only_the_pass, alone = run(
        NO_SHADERS, {**NO_SHADERS, "n_gpu_layers": 0}, {**NO_SHADERS, "devices": "none"}
    )
    assert on_device["ragged"] == only_the_pass["ragged"] == [False]
    assert alone["ragged"] == [True]


def test_the_device_finds_the_likeliest_tokens(run):
    found, off = run({}, {"device_sampling": "off"})
    assert min(found["top"], found["whole"]) > 0  # "top" rows without logprobs, "whole" rows with them
    assert off["top"] == 0
    assert found["bare_texts"] == off["bare_texts"]


@pytest.mark.parametrize("options", [options for number, options in SETTINGS if number == 1], ids=json.dumps)
def test_memory_predicted_and_reserved(run, options):
    [found] = run({**options, **NO_SHADERS})
    assert differing(found) == []


REFUSED = [
    ({"devices": "Vulkan7"}, "devices names 'Vulkan7', which is no GPU of this machine; here are Vulkan0"),
    ({"split_mode": "row"}, "split_mode is 'row', which Vulkan0 (Vulkan) cannot"),
    ({"batch_invariant": True}, "batch_invariant"),
]


def test_what_vulkan_cannot_do_is_refused(run):
    settings = [options for options, _ in REFUSED]
    for found, (options, message) in zip(run(*settings), REFUSED, strict=True):
        assert found.get("type") == "ConfigError", (options, found)
        assert message in found["error"], options


def test_doctor_names_the_device_or_what_hides_it(vulkan):
    there, hidden = doctor(vulkan), doctor({**vulkan, "GGML_VK_VISIBLE_DEVICES": "70"})
    assert "Vulkan0" in there["devices"]["detail"]
    assert (there["gpu"]["status"], there["gpu"]["detail"]) == ("ok", "layers are offloaded to Vulkan0")
    assert "finds none" in hidden["gpu"]["detail"]
    assert "GGML_VK_VISIBLE_DEVICES=70 may name none" in hidden["gpu"]["cure"]


def doctor(environment):
    done = subprocess.run(
        command("llamabatch", "doctor", "--json"), env=environment, capture_output=True, text=True, check=False
    )
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}
