"""Engines on devices other than the CPU give the same texts, whichever device computes a layer."""

from __future__ import annotations

import pytest

EVERYWHERE = [
    (1, {}),
    (1, {"n_gpu_layers": 3}),
    (1, {"n_gpu_layers": 0}),
    (1, {"kv": "unified"}),
    (2, {}),
    (2, {"tensor_split": [3, 1]}),
    (2, {"n_gpu_layers": 4, "tensor_split": [1, 1]}),
    (2, {"isolate": True}),
    (2, {"speculate": "lookup"}),
    (2, {"instances": 2}),
    (2, {"device_sampling": "off"}),
]


PLAIN = {"extra_bufts": "off", "batch_invariant": True}
"""Weights as in the file, and prompts by the kernels of other rows. By default a CPU has repacked weights, and kernels
for prompts where it has tiles; both sum up in another order."""
CACHES = [{}, {"type_k": "q8_0", "type_v": "q8_0"}, {"flash_attn": "off"}]


def same(found, wanted):
    """Checks that the texts are equal. One of 24 may part where the model was undecided (docs/compare.md)."""
    assert found["errors"] == []
    assert sum(one != other for one, other in zip(found["texts"], wanted, strict=True)) <= 1


def test_log_probabilities_are_those_of_the_cpu_to_the_last_bit(run):
    """A device with the CPU's kernels gives the CPU's floats, whatever the types of the KV cache."""
    on_cpu = run(0, *({**options, **PLAIN} for options in CACHES))
    on_device = run(2, *CACHES)
    for options, here, there in zip(CACHES, on_cpu, on_device, strict=True):
        assert there["texts"] == here["texts"], options
        assert there["logprobs"] == here["logprobs"], options
    assert on_device[0]["logprobs"] != on_device[1]["logprobs"]


def test_layers_on_two_devices(run, on_cpu):
    found, here = run(2, {}, {"n_gpu_layers": 0})
    assert len(found["gpus"]) == 2
    assert set(found["reserved"]) == {"CPU", "RPC0", "RPC1"}
    assert found["reserved"]["RPC1"]["KV"] > 0
    same(found, on_cpu)
    same(here, on_cpu)


def test_rows_of_any_slots_share_a_pass_on_the_cpu_alone(run):
    """A device ignores the streams that rows of a ragged attention name, and would compute something else."""
    on_two, only_the_pass, alone = run(2, {}, {"n_gpu_layers": 0}, {"devices": "none"})
    assert on_two["ragged"] == only_the_pass["ragged"] == [False]
    assert alone["ragged"] == [True]


def test_the_device_of_the_output_finds_the_likeliest_tokens(run):
    found, off, here = run(2, {}, {"device_sampling": "off"}, {"n_gpu_layers": 0})
    assert min(found["top"], found["whole"]) > 0  # "top" rows without logprobs, "whole" rows with them
    assert "returns 65 tokens of a row" in found["reasons"]["device_sampling"]
    assert off["top"] == here["top"] == 0
    assert found["bare_texts"] == off["bare_texts"]


@pytest.mark.parametrize("sampling", ["off", "on"])
def test_with_the_row_ladder_more_steps_compute_the_last_graph_again(run, sampling):
    """Eight requests of unequal lengths in eight slots. Without the ladder, each end of a request changes the shape of
    the steps; with it, a dummy row takes the place of the request."""
    lengths = [8 + 5 * number for number in range(8)]
    base = {"lengths": lengths, "device_sampling": sampling}
    off, on = run(2, {**base, "row_ladder": "off"}, {**base, "row_ladder": "on"}, reuse=True)
    assert off["dummy_rows"] == 0 < on["dummy_rows"]
    assert on["steps"] == off["steps"] == on["passes"]
    assert off["reused"] <= off["steps"] - len(lengths)
    assert on["reused"] >= on["steps"] - 3
    assert on["token_ids"] == off["token_ids"]
    assert on["logprobs"] == off["logprobs"]


@pytest.mark.devices
@pytest.mark.parametrize(("number", "options"), EVERYWHERE)
def test_texts_are_those_of_the_cpu(run, on_cpu, number, options):
    [found] = run(number, options)
    same(found, on_cpu)


ONE_ALONE = [
    ({"split_mode": "none", "main_gpu": 1}, {"RPC1"}),
    ({"split_mode": "none"}, {"RPC0"}),
    ({"devices": ["RPC1"]}, {"RPC1"}),
    ({"devices": "RPC1,RPC0", "tensor_split": [1, 0]}, {"RPC1"}),
    ({"devices": "RPC1,RPC0", "split_mode": "none", "main_gpu": 1}, {"RPC0"}),
    ({"devices": "none"}, set()),
    ({"offload_kqv": False, "op_offload": False}, {"RPC0", "RPC1"}),
]


def test_one_of_two_devices(run, on_cpu):
    settings = [options for options, _ in ONE_ALONE]
    for found, (options, holders) in zip(run(2, *settings), ONE_ALONE, strict=True):
        same(found, on_cpu)
        assert {name for name in found["reserved"] if name.startswith("RPC")} == holders, options
        in_cpu = found["reserved"]["CPU"].get("KV", 0) > 0
        assert in_cpu == (options.get("offload_kqv") is False or options.get("devices") == "none"), options


REFUSED = [
    ({"split_mode": "none", "main_gpu": 2}, "main_gpu is 2; allowed are 0 to 1 (RPC0, RPC1)"),
    ({"main_gpu": 1}, "main_gpu is 1; it is for split_mode='none'"),
    ({"devices": "CUDA0"}, "devices names 'CUDA0', which is no GPU of this machine; here are RPC0, RPC1"),
    ({"tensor_split": [1, 1, 1]}, "tensor_split has 3 shares; it may have 1 to 2"),
    ({"split_mode": "row"}, "split_mode is 'row', which RPC0 (RPC) does not support"),
    ({"devices": "RPC0", "override_tensor": "output=RPC1"}, "override_tensor puts tensors on 'RPC1'"),
    ({"strategy": "multi-instance", "tensor_split": [1, 1]}, "multi-instance puts each engine on one GPU"),
    ({"strategy": "multi-instance", "override_tensor": "output=RPC1"}, "one GPU of its own"),
]


def test_what_the_devices_cannot_do_is_refused(run):
    settings = [options for options, _ in REFUSED]
    for found, (options, message) in zip(run(2, *settings), REFUSED, strict=True):
        assert found.get("type") == "ConfigError", (options, found)
        assert message in found["error"], options


@pytest.mark.devices
def test_multi_instance_has_a_device_each(run, on_cpu):
    options = {"strategy": "multi-instance", "instances": 3, "n_slots": 4}
    apart, alone = run(2, options, {**options, "devices": "RPC1"})
    for found in (apart, alone):
        same(found, on_cpu)
        assert len(found["pids"]) == 3
        [need] = found["memory"]["gpus"]
        assert need["weights"] > 0  # bytes of the whole model, on one device
