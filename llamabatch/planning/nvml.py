"""Reads the memory of NVIDIA GPUs from their driver (NVML), through the optional package nvidia-ml-py.

Untested on a real GPU: the tests replace NVML. llama/devices.py asks ggml for the memory of all other GPUs.
"""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpu:
    """The name and the memory of one GPU. `free_bytes` counts unused memory."""

    name: str
    free_bytes: int
    total_bytes: int


def gpus() -> tuple[Gpu, ...]:
    """Returns the GPUs that CUDA shows to this process, in CUDA's order; empty without NVML or its Python package."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # the package or the driver is missing
        logger.debug("the memory of GPUs is not known: %s", error)
        return ()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        return tuple(_gpu(nvml, handle) for handle in visible(nvml, handles))
    except Exception as error:
        logger.debug("NVML failed: %s", error)
        return ()
    finally:
        nvml.nvmlShutdown()


def visible(nvml: Any, handles: list[Any]) -> list[Any]:
    """Returns the devices listed by number or UUID in CUDA_VISIBLE_DEVICES, up to the first unknown one, as CUDA does.
    Returns all devices if the variable is not set."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return handles
    found = []
    for name in filter(None, (part.strip() for part in chosen.split(","))):
        match = [h for number, h in enumerate(handles) if str(number) == name or _uuid(nvml, h).startswith(name)]
        if not match:
            break
        found.append(match[0])
    return found


def _uuid(nvml: Any, handle: Any) -> str:
    return text(nvml.nvmlDeviceGetUUID(handle))


def _gpu(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(text(nvml.nvmlDeviceGetName(handle)), int(memory.free), int(memory.total))


def text(value: str | bytes) -> str:
    """Decodes a name from NVML, which is bytes in older releases."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
