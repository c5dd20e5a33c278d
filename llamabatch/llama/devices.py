"""The devices of ggml: all of them, the GPUs that llama.cpp gives layers to, and the ones that a config chooses.

Names and kinds cost nothing. Memory does: CUDA, HIP, MUSA and SYCL make a context on a device that is asked for it,
some hundred MiB that stay with the process.
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
from llamabatch.planning import nvml
from llamabatch.planning.binding_choice import for_children
from llamabatch.planning.nvml import Gpu
from llamabatch.utils.checks import show
from llamabatch.utils.subprogram import run_program

logger = logging.getLogger(__name__)

NONE = ("none",)
"""EngineConfig.devices for the CPU alone, as llama.cpp's --device has it."""
PROGRAM = "llamabatch.llama.device_memory"
_PROGRAM_TIMEOUT_S = 60.0
_CUDA, _RPC = "CUDA", "RPC"
_WITH_CONTEXT = (_CUDA, "ROCm", "MUSA", "SYCL")  # names of backends
_KINDS = {0: "cpu", 1: "gpu", 2: "integrated gpu", 3: "accelerator"}  # enum ggml_backend_dev_type
_GPU, INTEGRATED = "gpu", "integrated gpu"


@dataclass(frozen=True)
class Device:
    """A device that ggml can compute on.

    Attributes:
        kind: "cpu", "gpu", "integrated gpu", "accelerator" or "other".
        backend: name of its ggml backend, as CUDA.
        address: of the ggml_backend_device.
    """

    name: str
    description: str
    kind: str
    backend: str
    address: int

    @property
    def is_gpu(self) -> bool:
        """True if layers can be offloaded to it."""
        return self.kind in (_GPU, INTEGRATED)

    @property
    def shown(self) -> str:
        """The name for people; that of RPC devices is their number, their description the server."""
        return self.description or self.name


@dataclass(frozen=True)
class BufferType:
    """A place for tensors: `address` of the ggml_backend_buffer_type; `device`: name of its device, None: a CPU's."""

    address: int
    device: str | None


class _Properties(ctypes.Structure):
    """ggml_backend_dev_props; its capabilities, some booleans, are not read."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("description", ctypes.c_char_p), ("free", ctypes.c_size_t),
        ("total", ctypes.c_size_t), ("kind", ctypes.c_int), ("device_id", ctypes.c_char_p),
        ("rest", ctypes.c_bool * 64),
    )  # fmt: skip


def devices(module: ModuleType) -> tuple[Device, ...]:
    """The devices of ggml, in its order. Its functions are called through libllama, which links to them; empty where
    that fails."""
    library, pointer = module.llama_cpp._lib, ctypes.c_void_p
    try:
        count = ctypes.CFUNCTYPE(ctypes.c_size_t)(("ggml_backend_dev_count", library))
        get = ctypes.CFUNCTYPE(pointer, ctypes.c_size_t)(("ggml_backend_dev_get", library))
        text = ctypes.CFUNCTYPE(ctypes.c_char_p, pointer)
        name, description = text(("ggml_backend_dev_name", library)), text(("ggml_backend_dev_description", library))
        kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer)(("ggml_backend_dev_type", library))
        backend = ctypes.CFUNCTYPE(pointer, pointer)(("ggml_backend_dev_backend_reg", library))
        backend_name = text(("ggml_backend_reg_name", library))
    except (AttributeError, ValueError):
        return ()
    return tuple(
        Device(
            _text(name(device)),
            _text(description(device)),
            _KINDS.get(kind(device), "other"),
            _text(backend_name(registered)) if (registered := backend(device)) else "",
            device,
        )
        for device in map(get, range(count()))
    )


def gpus(module: ModuleType) -> tuple[Device, ...]:
    """The devices that layers are offloaded to unless a config names others, in the order of llama.cpp's
    llama_prepare_model_devices: RPC servers, then GPUs, each once; integrated ones only where there is no other GPU."""
    found = devices(module)
    remote = [device for device in found if device.kind == _GPU and device.backend == _RPC]
    own = [device for device in found if device.kind == _GPU and device.backend != _RPC]
    if len({device.backend for device in own}) > 1:  # two backends may drive one GPU
        own = _each_once(module, own)
    integrated = [device for device in found if device.kind == INTEGRATED]
    integrated = [device for device in integrated if device.backend == integrated[0].backend]
    return (*remote, *(own or integrated))


def _each_once(module: ModuleType, found: Iterable[Device]) -> list[Device]:
    """Without those whose hardware an earlier one has, too."""
    shape = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(_Properties))
    properties = shape(("ggml_backend_dev_get_props", module.llama_cpp._lib))
    kept, known = [], set()
    for device in found:
        read = _Properties()
        properties(device.address, ctypes.byref(read))
        if read.device_id is None or read.device_id not in known:
            kept.append(device)
            known.add(read.device_id)
    return kept


def used(config: EngineConfig, module: ModuleType) -> tuple[Device, ...]:
    """The devices that a config uses, in the order in which layers are dealt out to them; empty: the CPU alone.

    Raises:
        ConfigError: devices, main_gpu, tensor_split or split_mode asks for what is not here.
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
                raise ConfigError(f"split_mode is 'row', which {which} cannot; allowed are 'layer' and 'none'")
    return found


def _offers(module: ModuleType, device: Device, name: bytes) -> bool:
    """True if the backend of a device has this function."""
    library, pointer = module.llama_cpp._lib, ctypes.c_void_p
    backend = ctypes.CFUNCTYPE(pointer, pointer)(("ggml_backend_dev_backend_reg", library))(device.address)
    find = ctypes.CFUNCTYPE(pointer, pointer, ctypes.c_char_p)(("ggml_backend_reg_get_proc_address", library))
    return bool(find(backend, name))


def pointers(chosen: Iterable[Device]) -> Any:
    """Array for llama_model_params.devices, ended by a null pointer. The load reads it."""
    addresses = [device.address for device in chosen]
    return (ctypes.c_void_p * (len(addresses) + 1))(*addresses)


def buffer_types(module: ModuleType) -> dict[str, BufferType]:
    """The places for tensors by the names of the buffer types of all devices, as "CPU", and of the devices."""
    library, pointer = module.llama_cpp._lib, ctypes.c_void_p
    found: dict[str, BufferType] = {}
    try:
        type_of = ctypes.CFUNCTYPE(pointer, pointer)(("ggml_backend_dev_buffer_type", library))
        name = ctypes.CFUNCTYPE(ctypes.c_char_p, pointer)(("ggml_backend_buft_name", library))
    except (AttributeError, ValueError):
        return found
    for device in devices(module):
        address = type_of(device.address)
        if address:
            for each in (_text(name(address)), device.name):
                found.setdefault(each, BufferType(address, device.name if device.is_gpu else None))
    return found


def memory(module: ModuleType, chosen: tuple[Device, ...], *, computes_here: bool = True) -> tuple[Gpu, ...]:
    """Free and total memory of devices: NVML's where it knows them, else ggml's.

    Args:
        computes_here: this process will compute on them; False: no context is made on any, a child process asks.
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
    """Free and total bytes of a device, as ggml tells them; for a CPU those of the machine. 0: it does not tell."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    size_p = ctypes.POINTER(ctypes.c_size_t)
    shape = ctypes.CFUNCTYPE(None, ctypes.c_void_p, size_p, size_p)
    shape(("ggml_backend_dev_memory", module.llama_cpp._lib))(device.address, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def _memory_from_child() -> dict[str, tuple[int, int]]:
    """Free and total bytes of the GPUs by name; empty where the child fails."""
    try:
        child = run_program(PROGRAM, timeout_s=_PROGRAM_TIMEOUT_S, environment=for_children())
        memory = json.loads(child.stdout.splitlines()[-1])
        return {str(name): (int(free), int(total)) for name, (free, total) in memory.items()}
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError, AttributeError, IndexError) as error:
        logger.debug("the memory of GPUs is not known: %s", error)
        return {}


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")
