"""Compares the memory that the plan predicts for devices with the memory that llama.cpp says it reserves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamabatch.tools import synth

MIB = 2**20
SETTINGS = [
    (1, {"n_slots": 8}),
    (1, {"n_slots": 1, "n_ctx": 2048}),
    (1, {"n_slots": 4, "n_ctx": 1024, "n_gpu_layers": 3}),
    (1, {"n_slots": 4, "flash_attn": "off", "n_ctx": 1024}),
    (1, {"n_slots": 8, "kv": "unified", "kv_cells": 2048}),
    (1, {"n_slots": 16, "n_ubatch": 128, "type_k": "q8_0", "type_v": "q8_0"}),
    (2, {"n_slots": 8}),
    (2, {"n_slots": 4, "n_ctx": 512, "tensor_split": [3, 1]}),
    (2, {"n_slots": 4, "n_ctx": 1024, "flash_attn": "off"}),
    (2, {"n_slots": 32, "n_gpu_layers": 4, "tensor_split": [1, 1]}),
    (2, {"n_slots": 8, "split_mode": "none", "main_gpu": 1, "n_ctx": 1024}),
    (2, {"n_slots": 8, "n_ctx": 1024, "devices": "RPC1,RPC0"}),
    (2, {"n_slots": 4, "n_ctx": 512, "n_gpu_layers": 2}),
    (2, {"n_slots": 4, "n_ctx": 2048, "n_gpu_layers": 4, "tensor_split": [1, 3]}),
    (2, {"n_slots": 4, "n_ctx": 1024, "tensor_split": [5, 2]}),
]


def compared(found):
    """Yields a name, the predicted bytes and the reserved bytes for each GPU, in all and by kind."""
    names = found["names"]
    for number, name in enumerate(names):
        need, there = found["memory"]["gpus"][number], found["reserved"].get(name, {})
        yield name, need["total"], sum(there.values())
        yield f"{name} weights", need["weights"], there.get("model", 0)
        yield f"{name} cells", need["kv_cache"], there.get("KV", 0)


def differing(found):
    """Returns a line for each prediction that is off by more than a tenth."""
    assert found["memory"]["gpus"]
    return [
        f"{what}: {predicted / MIB:.2f} of {reserved / MIB:.2f} MiB"
        for what, predicted, reserved in compared(found)
        if abs(predicted - reserved) > 0.1 * reserved
    ]


def test_settings_on_two_devices(run):
    settings = [options for number, options in SETTINGS if number == 2]
    for options, found in zip(settings, run(2, *({**options, "prompts": 0} for options in settings)), strict=True):
        assert differing(found) == [], options


@pytest.mark.devices
def test_a_large_vocabulary_is_on_the_gpu_of_the_output_alone(run, tmp_path):
    shape = replace(synth.SHAPES["llama-3.2-1b"], n_layer=4, n_embd=256, n_ff=768, n_head=4, n_head_kv=2, head_dim=64)
    synth.write_model(shape, tmp_path / "model.gguf", "Q4_K_M")
    base = {"model": str(tmp_path / "model.gguf"), "strategy": "batched", "n_slots": 4, "n_ctx": 512}
    for found in run(2, base, {**base, "n_gpu_layers": 2}):
        [first, second] = found["memory"]["gpus"]
        for what, predicted, reserved in compared(found):
            assert abs(predicted - reserved) < max(0.1 * reserved, MIB), what
        assert second["compute"] > 3 * first["compute"]


@pytest.mark.devices
@pytest.mark.parametrize("options", [options for number, options in SETTINGS if number == 1])
def test_predicted_and_reserved(run, options):
    [found] = run(1, {**options, "prompts": 0})
    assert differing(found) == []
