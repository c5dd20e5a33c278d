"""What this process may use of the machine: cores and memory, with affinity, cgroups and limits counted in."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import psutil

from llamabatch import limits
from llamabatch.gpu_memory import Gpu, gpus


@dataclass(frozen=True)
class Machine:
    """What this process may use.

    Attributes:
        cores: from affinity, cgroup quota and physical cores.
        available_bytes: free memory, swap not counted, cgroups included.
        n_gpus: devices that llama.cpp would offload to.
        fast_attention: the llama.cpp in use has our flash attention for CPUs (native_patches/0003).
        lazy_cells: cells of a KV cache take memory, and time, when they are used and not before (native_patches/0009).
        features: what the llama.cpp in use repacks weights for; see weights.weights.
        address_space, data_bytes: what RLIMIT_AS and RLIMIT_DATA leave; None where they are not set.
        gpus: memory of the GPUs, where NVML tells of as many as llama.cpp uses; else empty.
        unified_memory: GPUs use the machine's own memory: Metal.
    """

    cores: int
    available_bytes: int
    n_gpus: int = 0
    fast_attention: bool = False
    features: frozenset[str] = frozenset()
    address_space: int | None = None
    data_bytes: int | None = None
    gpus: tuple[Gpu, ...] = ()
    unified_memory: bool = False
    lazy_cells: bool = False

    @classmethod
    def here(
        cls,
        n_gpus: int = 0,
        fast_attention: bool = False,
        features: frozenset[str] = frozenset(),
        lazy_cells: bool = False,
    ) -> Machine:
        known = gpus() if n_gpus else ()
        return cls(
            _cores(),
            _available_bytes(),
            n_gpus,
            fast_attention,
            features,
            limits.address_space(),
            limits.data_bytes(),
            known if len(known) == n_gpus else (),
            sys.platform == "darwin",
            lazy_cells,
        )

    def gpu_shares(self, tensor_split: tuple[float, ...] | None) -> tuple[float, ...]:
        """How llama.cpp deals the layers out: as asked for, else by free memory; one figure a GPU.

        Empty without GPUs, and where they use the machine's own memory.
        """
        if self.unified_memory:
            return ()
        if tensor_split is not None:
            return (*tensor_split, *[0.0] * self.n_gpus)[: self.n_gpus]
        return tuple(float(gpu.free_bytes) for gpu in self.gpus) or (1.0,) * self.n_gpus


def _cores() -> int:
    allowed = limits.affinity()
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical, limits.cgroup_cores() or allowed))


def _available_bytes() -> int:
    free = int(psutil.virtual_memory().available)
    left = limits.cgroup_bytes()
    return max(0, free if left is None else min(free, left))
