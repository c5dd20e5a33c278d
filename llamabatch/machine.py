"""What this process may use of the machine: cores and memory, with affinity, cgroups and limits counted in."""

from __future__ import annotations

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
        features: what the llama.cpp in use repacks weights for; see weights.weights.
        address_space, data_bytes: what RLIMIT_AS and RLIMIT_DATA leave; None where they are not set.
        gpus: memory of the GPUs, as far as NVML tells; empty where it does not.
    """

    cores: int
    available_bytes: int
    n_gpus: int = 0
    fast_attention: bool = False
    features: frozenset[str] = frozenset()
    address_space: int | None = None
    data_bytes: int | None = None
    gpus: tuple[Gpu, ...] = ()

    @classmethod
    def here(cls, n_gpus: int = 0, fast_attention: bool = False, features: frozenset[str] = frozenset()) -> Machine:
        return cls(
            _cores(),
            _available_bytes(),
            n_gpus,
            fast_attention,
            features,
            limits.address_space(),
            limits.data_bytes(),
            gpus() if n_gpus else (),
        )

    def gpu_shares(self, tensor_split: tuple[float, ...] | None) -> tuple[float, ...]:
        """How llama.cpp deals the layers out: as asked for, else by free memory; one figure a GPU.

        Empty where NVML does not tell of as many GPUs as llama.cpp uses: then nothing is known of their memory.
        """
        if not self.gpus or len(self.gpus) != self.n_gpus:
            return ()
        if tensor_split is not None:
            return (*tensor_split, *[0.0] * len(self.gpus))[: len(self.gpus)]
        return tuple(float(gpu.free_bytes) for gpu in self.gpus)


def _cores() -> int:
    allowed = limits.affinity()
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical, limits.cgroup_cores() or allowed))


def _available_bytes() -> int:
    free = int(psutil.virtual_memory().available)
    left = limits.cgroup_bytes()
    return max(0, free if left is None else min(free, left))
