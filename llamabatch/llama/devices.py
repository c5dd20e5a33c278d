"""The devices of ggml: all devices, the GPUs that llama.cpp gives layers to, and the devices that a config chooses.

Reading names and kinds costs nothing. Reading the memory of a device makes CUDA, HIP, MUSA and SYCL create a context on
the device. This context takes some hundred MiB for the life of the process.
"""

from __future__ import annotations

import ctypes
import json
import logging
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError
from llamabatch.llama import ggml
from llamabatch.planning import nvml
from llamabatch.planning.binding_choice import for_children
from llamabatch.planning.nvml import Gpu
from llamabatch.utils.checks import show
from llamabatch.utils.subprogram import run_program

logger = logging.getLogger(__name__)

NONE = ("none",)
"""The value of EngineConfig.devices for the CPU alone, as in llama.cpp's --device."""
PROGRAM = "llamabatch.llama.device_memory"
_PROGRAM_TIMEOUT_S = 60.0
_CUDA, _RPC = "CUDA", "RPC"
_WITH_CONTEXT = (_CUDA, "ROCm", "MUSA", "SYCL")  # backends that make a context when asked for a device's memory
_KINDS = {0: "cpu", 1: "gpu", 2: "integrated gpu", 3: "accelerator"}  # enum ggml_backend_dev_type
_GPU, INTEGRATED = "gpu", "integrated gpu"


@dataclass(frozen=True)
class Device:
    """A compute device of ggml.

    Attributes:
        kind: "cpu", "gpu", "integrated gpu", "accelerator" or "other".
        backend: name of its ggml backend, for example CUDA.
        address: address of the ggml_backend_device.
    """

    name: str
    description: str
    kind: str
    backend: str
    address: int

    @property
    def is_gpu(self) -> bool:
        """True if layers can be offloaded to this device."""
        return self.kind in (_GPU, INTEGRATED)

    @property
    def shown(self) -> str:
        """The name that users see. For RPC devices this is the description (the server), because their ggml name is a
        number."""
        return self.description or self.name


@dataclass(frozen=True)
class BufferType:
    """A place for tensors: the address of its ggml_backend_buffer_type, and the name of its GPU (None: no GPU)."""

    address: int
    device: str | None


class _Properties(ctypes.Structure):
    """ggml_backend_dev_props. `rest` has the capabilities, which are not read."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("description", ctypes.c_char_p), ("free", ctypes.c_size_t),
        ("total", ctypes.c_size_t), ("kind", ctypes.c_int), ("device_id", ctypes.c_char_p),
        ("rest", ctypes.c_bool * 64),
    )  # fmt: skip


def devices(module: ModuleType) -> tuple[Device, ...]:
    """Returns the devices in ggml's order, or an empty tuple if ggml's functions are missing. libllama links to ggml's
    functions, so they are called through libllama."""
    library, pointer, chars = module.llama_cpp._lib, ggml.POINTER, ctypes.c_char_p
    try:
        count = ggml.bind(library, "ggml_backend_dev_count", ctypes.c_size_t)
        get = ggml.bind(library, "ggml_backend_dev_get", pointer, ctypes.c_size_t)
        name = ggml.bind(library, "ggml_backend_dev_name", chars, pointer)
        description = ggml.bind(library, "ggml_backend_dev_description", chars, pointer)
        kind = ggml.bind(library, "ggml_backend_dev_type", ctypes.c_int, pointer)
        backend = ggml.bind(library, "ggml_backend_dev_backend_reg", pointer, pointer)
        backend_name = ggml.bind(library, "ggml_backend_reg_name", chars, pointer)
    except ggml.MISSING:
        return ()
    return tuple(
        Device(
            ggml.text(name(device)),
            ggml.text(description(device)),
            _KINDS.get(kind(device), "other"),
            ggml.text(backend_name(registered)) if (registered := backend(device)) else "",
            device,
        )
        for device in map(get, range(count()))
    )


def gpus(module: ModuleType) -> tuple[Device, ...]:
    """Returns the devices that layers are offloaded to by default. The order is that of llama.cpp's
    llama_prepare_model_devices: RPC servers, then GPUs, each GPU once. Integrated GPUs count only if this machine has
    no other GPU."""
    found = devices(module)
    remote = [device for device in found if device.kind == _GPU and device.backend == _RPC]
    own = [device for device in found if device.kind == _GPU and device.backend != _RPC]
    if len({device.backend for device in own}) > 1:  # two backends may drive one GPU
        own = _each_once(module, own)
    integrated = [device for device in found if device.kind == INTEGRATED]
    integrated = [device for device in integrated if device.backend == integrated[0].backend]
    return (*remote, *(own or integrated))


def _each_once(module: ModuleType, found: Iterable[Device]) -> list[Device]:
    """Returns `found` without the devices that drive the same hardware as an earlier device."""
    library, properties_p = module.llama_cpp._lib, ctypes.POINTER(_Properties)
    properties = ggml.bind(library, "ggml_backend_dev_get_props", None, ggml.POINTER, properties_p)
    kept, known = [], set()
    for device in found:
        read = _Properties()
        properties(device.address, ctypes.byref(read))
        if read.device_id is None or read.device_id not in known:
            kept.append(device)
            known.add(read.device_id)
    return kept


def used(config: EngineConfig, module: ModuleType) -> tuple[Device, ...]:
    """Returns the devices of a config, in the order in which they get layers. Empty means the CPU alone.

    Raises:
        ConfigError: devices, main_gpu, tensor_split or split_mode does not fit the devices of this machine.
    """
    found = () if config.devices == NONE else gpus(module)
    if config.devices not in (None, NONE):
        known = {device.name: device for device in devices(module) if device.is_gpu}
        here = f"here are {', '.join(known)}" if known else "llama.cpp has none here"
        for name in config.devices or ():
            if name not in known:
                raise ConfigError(f"devices names {show(name)}, which is no GPU of this machine; {here}")
        found = tuple(known[name] for name in config.devices or ())
    names = ", ".join(device.name for device in found)
    if config.main_gpu >= max(1, len(found)):
        allowed = f"allowed are 0 to {len(found) - 1} ({names})" if found else "llama.cpp has no GPU here"
        raise ConfigError(f"main_gpu is {config.main_gpu}; {allowed}")
    if config.split_mode == "none":
        return found[config.main_gpu : config.main_gpu + 1]
    if config.tensor_split is not None and found:
        shares = config.tensor_split
        if len(shares) > len(found):
            raise ConfigError(
                f"tensor_split has {len(shares)} shares; it may have 1 to {len(found)}, one for each of {names}"
            )
    if config.split_mode == "row":
        for device in found:
            if not _offers(module, device, b"ggml_backend_split_buffer_type"):
                which = f"{device.name} ({device.backend})"
                raise ConfigError(f"split_mode is 'row', which {which} does not support; give 'layer' or 'none'")
    return found


def _offers(module: ModuleType, device: Device, name: bytes) -> bool:
    return bool(ggml.backend_function(module.llama_cpp._lib, device.address, name))


def pointers(chosen: Iterable[Device]) -> Any:
    """Returns a null-terminated array for llama_model_params.devices. The array must live until the load is done."""
    addresses = [device.address for device in chosen]
    return (ctypes.c_void_p * (len(addresses) + 1))(*addresses)


def buffer_types(module: ModuleType) -> dict[str, BufferType]:
    """Returns the places for tensors. The keys are the names of buffer types (such as "CPU") and of devices."""
    library, found = module.llama_cpp._lib, dict[str, BufferType]()
    try:
        type_of = ggml.bind(library, "ggml_backend_dev_buffer_type", ggml.POINTER, ggml.POINTER)
        name = ggml.bind(library, "ggml_backend_buft_name", ctypes.c_char_p, ggml.POINTER)
    except ggml.MISSING:
        return found
    for device in devices(module):
        address = type_of(device.address)
        if address:
            for each in (ggml.text(name(address)), device.name):
                found.setdefault(each, BufferType(address, device.name if device.is_gpu else None))
    return found


def memory(module: ModuleType, chosen: tuple[Device, ...], *, computes_here: bool = True) -> tuple[Gpu, ...]:
    """Returns the free and total memory of devices: from NVML for the devices that NVML knows, else from ggml.

    Args:
        computes_here: False if this process will not compute on the devices. A child process then asks for the memory.
    """
    cuda = [device.name for device in devices(module) if device.backend == _CUDA] if chosen else []
    listed = nvml.gpus() if cuda else ()
    known = dict(zip(cuda, listed, strict=True)) if len(listed) == len(cuda) else {}
    open_ones = [device for device in chosen if device.name not in known]
    if computes_here or all(device.backend not in _WITH_CONTEXT for device in open_ones):
        memory = {device.name: memory_here(module, device) for device in open_ones}
    else:
        memory = _memory_from_child()
    empty = (0, 0)
    return tuple(
        known[device.name] if device.name in known else Gpu(device.shown, *memory.get(device.name, empty))
        for device in chosen
    )


def memory_here(module: ModuleType, device: Device) -> tuple[int, int]:
    """Returns a device's free and total bytes as ggml reports them. For a CPU, this is the memory of the machine. 0
    means unknown."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    size_p = ctypes.POINTER(ctypes.c_size_t)
    read = ggml.bind(module.llama_cpp._lib, "ggml_backend_dev_memory", None, ggml.POINTER, size_p, size_p)
    read(device.address, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def _memory_from_child() -> dict[str, tuple[int, int]]:
    """Returns the free and total bytes of the GPUs by name, or an empty dict if the child process fails."""
    try:
        child = run_program(PROGRAM, timeout_s=_PROGRAM_TIMEOUT_S, environment=for_children())
        memory = json.loads(child.stdout.splitlines()[-1])
        return {str(name): (int(free), int(total)) for name, (free, total) in memory.items()}
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError, AttributeError, IndexError) as error:
        logger.debug("the memory of GPUs is not known: %s", error)
        return {}
