"""Engines on devices that are not the CPU: the same texts, wherever the layers lie."""

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
]


def same(found, wanted):
    """Texts are equal; one of 24 may part where the model was undecided (docs/compare.md)."""
    assert found["errors"] == []
    assert sum(one != other for one, other in zip(found["texts"], wanted, strict=True)) <= 1


def test_layers_on_two_devices(run, on_cpu):
    found, here = run(2, {}, {"n_gpu_layers": 0})
    assert len(found["gpus"]) == 2
    assert set(found["reserved"]) == {"CPU", "RPC0", "RPC1"}
    assert found["reserved"]["RPC1"]["KV"] > 0
    same(found, on_cpu)
    same(here, on_cpu)


@pytest.mark.devices
@pytest.mark.parametrize(("number", "options"), EVERYWHERE)
def test_texts_are_those_of_the_cpu(run, on_cpu, number, options):
    [found] = run(number, options)
    same(found, on_cpu)
