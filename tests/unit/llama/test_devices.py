"""GPUs as llama.cpp lists them, the GPUs that a config uses, and their memory without a context in the parent."""

from dataclasses import dataclass

import pytest

from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError
from llamabatch.llama import devices
from llamabatch.llama.devices import Device
from llamabatch.planning.nvml import Gpu

CPU = Device("CPU", "a CPU", "cpu", "CPU", 1)
INSIDE = Device("Vulkan1", "in the CPU", "integrated gpu", "Vulkan", 2)
CARD = Device("Vulkan0", "a card", "gpu", "Vulkan", 3)
SAME = Device("CUDA0", "the card", "gpu", "CUDA", 4)
OTHER = Device("CUDA1", "another", "gpu", "CUDA", 5)
FAR = Device("RPC0", "host:1", "gpu", "RPC", 6)


@dataclass
class Machine:
    found: tuple[Device, ...]
    asked: list[str]


@pytest.fixture
def machine(monkeypatch):
    """A machine whose devices are `machine.found`. `machine.asked` lists the devices whose memory was asked for."""
    machine = Machine((CPU,), [])

    def memory_here(module, device):
        machine.asked.append(device.name)
        return 100 * device.address, 1000

    monkeypatch.setattr(devices, "devices", lambda module: machine.found)
    monkeypatch.setattr(devices, "memory_here", memory_here)
    monkeypatch.setattr(devices, "_each_once", lambda module, found: [gpu for gpu in found if gpu is not CARD])
    monkeypatch.setattr(devices, "_offers", lambda module, device, name: device.backend == "CUDA")
    monkeypatch.setattr(devices.nvml, "gpus", lambda: ())
    return machine


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ((CPU,), ()),
        ((INSIDE, CPU), (INSIDE,)),
        ((INSIDE, CARD, CPU), (CARD,)),
        ((INSIDE, FAR), (FAR, INSIDE)),
        ((CARD, FAR), (FAR, CARD)),
        ((SAME, OTHER, CARD), (SAME, OTHER)),  # one card under two backends
    ],
)
def test_the_list_is_that_of_llama_cpp(machine, found, wanted):
    machine.found = found
    assert devices.gpus(None) == wanted
    assert machine.asked == []


def used(**options):
    return devices.used(EngineConfig("m", **options), None)


def test_a_config_chooses(machine):
    machine.found = (SAME, OTHER, INSIDE, CPU)
    assert used() == (SAME, OTHER)
    assert used(split_mode="none", main_gpu=1) == (OTHER,)
    assert used(devices="CUDA1,CUDA0", split_mode="none", main_gpu=1) == (SAME,)
    assert used(devices=["Vulkan1"]) == (INSIDE,)  # chosen by name, even beside others
    assert used(devices="none") == ()
    assert used(split_mode="row", tensor_split=(1, 1)) == (SAME, OTHER)
    assert machine.asked == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": "CUDA2"}, r"devices names 'CUDA2', .* here are CUDA0, CUDA1, Vulkan1"),
        ({"devices": "CPU"}, "devices names 'CPU'"),
        ({"split_mode": "none", "main_gpu": 2}, r"main_gpu is 2; allowed are 0 to 1 \(CUDA0, CUDA1\)"),
        ({"tensor_split": (1, 1, 1)}, "tensor_split has 3 shares; it may have 1 to 2"),
        ({"devices": "Vulkan1", "split_mode": "row"}, r"'row', which Vulkan1 \(Vulkan\) does not"),
    ],
)
def test_what_is_not_here_is_refused(machine, options, message):
    machine.found = (SAME, OTHER, INSIDE, CPU)
    with pytest.raises(ConfigError, match=message):
        used(**options)


def test_without_gpus(machine):
    assert used(tensor_split=(1, 1)) == ()  # as in llama.cpp, so one script works on both machines
    with pytest.raises(ConfigError, match=r"main_gpu is 1; llama\.cpp has no GPU here"):
        used(split_mode="none", main_gpu=1)
    with pytest.raises(ConfigError, match=r"llama\.cpp has none here"):
        used(devices="CUDA0")


def test_memory_is_ggmls_where_nvml_does_not_know(machine, monkeypatch):
    machine.found = (SAME, OTHER, FAR, CPU)
    assert devices.memory(None, (OTHER, FAR)) == (Gpu("another", 500, 1000), Gpu("host:1", 600, 1000))
    machine.asked.clear()
    cards = (Gpu("A", 1, 10), Gpu("B", 2, 10))
    monkeypatch.setattr(devices.nvml, "gpus", lambda: cards)
    assert devices.memory(None, (OTHER, FAR)) == (cards[1], Gpu("host:1", 600, 1000))
    assert machine.asked == ["RPC0"]
    monkeypatch.setattr(devices.nvml, "gpus", lambda: cards[:1])  # NVML finds fewer GPUs than CUDA
    assert devices.memory(None, (OTHER,)) == (Gpu("another", 500, 1000),)


def test_a_parent_makes_no_context(machine, monkeypatch):
    machine.found = (SAME, CARD, CPU)
    told = {"CUDA0": (7, 70)}
    monkeypatch.setattr(devices, "_memory_from_child", lambda: told)
    assert devices.memory(None, (SAME,), computes_here=False) == (Gpu("the card", 7, 70),)
    assert machine.asked == []
    told.clear()  # the child failed
    assert devices.memory(None, (SAME,), computes_here=False) == (Gpu("the card", 0, 0),)
    assert devices.memory(None, (CARD,), computes_here=False) == (Gpu("a card", 300, 1000),)  # Vulkan makes no context
    assert devices.memory(None, (), computes_here=False) == ()


def test_the_child_tells_what_ggml_tells():
    assert devices._memory_from_child() == {}  # a build for CPUs has no GPU
