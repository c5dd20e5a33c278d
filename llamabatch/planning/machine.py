"""Finds the cores and the memory left to this process by affinity, cgroups (versions 1 and 2) and rlimits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from llamabatch.planning.nvml import Gpu
from llamabatch.utils import system

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_CAP_IPC_LOCK = 14  # a process with this capability has no limit of locked memory (capabilities(7))
KV_PAIRS = frozenset({"f16-f16", "bf16-bf16", "q8_0-q8_0", "q4_0-q4_0"})  # the default of GGML_CUDA_FA_QUANTS
_NO_LIMIT = 2**60  # cgroups of version 1 have no value for "no limit": they write a number of about this size


@dataclass(frozen=True)
class Machine:
    """The cores, memory and GPUs available to this process, and the features of llama.cpp here.

    Attributes:
        cores: the smallest of affinity, cgroup quota and number of physical cores.
        available_bytes: free memory without swap, within the cgroups.
        n_gpus: devices to which llama.cpp will offload.
        fast_attention: the llama.cpp in use has our flash attention for CPUs (native_patches/0003).
        lazy_cells: cells of a KV cache take memory and time only at their first use (native_patches/0009).
        features: features for which the llama.cpp in use repacks weights; see weights.weights.
        address_space, data_bytes: bytes left of RLIMIT_AS and RLIMIT_DATA; None where they are not set.
        lockable_bytes: bytes left of RLIMIT_MEMLOCK; None: this process has no limit.
        gpus: memory of the devices; empty if a device does not report its memory.
        unified_memory: the devices use the machine's main memory: Metal, integrated GPUs.
        equal_rows: the llama.cpp in use has the same kernels for one row and for several (native_patches/0010).
        drops_copied_pages: the llama.cpp in use frees pages of a mapped file once their weights were copied
            (native_patches/0014).
        tiled: from eight rows on, the llama.cpp in use has another kernel for K-quants that are not repacked.
        backends: names of the devices' ggml backends, such as CUDA.
        kv_pairs: pairs of K and V types that CUDA reads directly, such as q8_0-q8_0. It converts other pairs to f16 in
            each pass.
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
    lockable_bytes: int | None = None
    equal_rows: bool = False
    tiled: bool = True
    drops_copied_pages: bool = False
    backends: frozenset[str] = frozenset()
    kv_pairs: frozenset[str] = KV_PAIRS

    @classmethod
    def here(
        cls,
        n_gpus: int = 0,
        fast_attention: bool = False,
        features: frozenset[str] = frozenset(),
        lazy_cells: bool = False,
        gpus: tuple[Gpu, ...] = (),
        unified_memory: bool = False,
        backends: frozenset[str] = frozenset(),
        kv_pairs: frozenset[str] | None = None,
    ) -> Machine:
        """Returns this machine as the operating system shows it now. The arguments come from llama.cpp's library."""
        return cls(
            usable_cores(),
            _available_bytes(),
            n_gpus,
            fast_attention,
            features,
            address_space_left(),
            data_bytes_left(),
            gpus if len(gpus) == n_gpus and all(gpu.total_bytes for gpu in gpus) else (),
            unified_memory or sys.platform == "darwin",
            lazy_cells,
            lockable_bytes(),
            backends=backends,
            kv_pairs=KV_PAIRS if kv_pairs is None else kv_pairs,
        )

    def gpu_shares(self, tensor_split: tuple[float, ...] | None) -> tuple[float, ...]:
        """Returns the share of the layers on each GPU, as llama.cpp distributes them: by tensor_split or free memory.

        The result is empty without GPUs, and if the GPUs use main memory.
        """
        if self.unified_memory:
            return ()
        if tensor_split is not None and any(tensor_split):
            return (*tensor_split, *[0.0] * self.n_gpus)[: self.n_gpus]
        return tuple(float(gpu.free_bytes) for gpu in self.gpus) or (1.0,) * self.n_gpus


def usable_cores() -> int:
    allowed = system.affinity()
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical, cgroup_cores() or allowed))


def _available_bytes() -> int:
    free = int(psutil.virtual_memory().available)
    left = cgroup_bytes()
    return max(0, free if left is None else min(free, left))


def cgroup_bytes(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Returns the bytes left in the cgroups of this process: the lowest number among its cgroup and all parents.

    None without a limit. Swap is not counted. Page cache that the kernel can drop counts as free.
    """
    left = [_left(*names) for names in _groups(root, membership)]
    return min((n for n in left if n is not None), default=None)


def cgroup_cores(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Returns the lowest CPU quota in whole cores, at least 1; None without a quota. Only for cgroups of version 2."""
    found = []
    for folder, *_ in _groups(root, membership):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                found.append(max(1, int(quota) // int(period)))
        except (OSError, ValueError):
            pass
    return min(found, default=None)


def _groups(root: Path, membership: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yields the folders of this process's cgroups, innermost first, each with three names. The names are the file of
    the memory limit, the file of the memory in use, and the entry of memory.stat for page cache that the kernel can
    drop."""
    version_2, version_1 = ("memory.max", "memory.current", "inactive_file"), (
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
    )  # fmt: skip
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if not controllers:
            base, files = root, version_2
        elif "memory" in controllers.split(","):
            base, files = root / "memory", version_1
        else:
            continue
        folder = base / name.lstrip("/")
        if not folder.is_dir():  # a container sees the host's name of the folder, but mounts only its own
            folder = base
        for each in (folder, *folder.parents):
            if each == base.parent:
                break
            yield (each, *files)


def _left(folder: Path, limit_name: str, used_name: str, cache_name: str) -> int | None:
    try:
        text = (folder / limit_name).read_text().strip()
        if text == "max" or int(text) >= _NO_LIMIT:
            return None
        cache = 0
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == cache_name:
                cache = int(value)
        return int(text) - int((folder / used_name).read_text()) + cache
    except (OSError, ValueError):
        return None


def address_space_left() -> int | None:
    """Returns the bytes left of RLIMIT_AS; None without such a limit."""
    return _rlimit("RLIMIT_AS", "vms")


def data_bytes_left() -> int | None:
    """Returns the bytes left of RLIMIT_DATA; None without such a limit."""
    return _rlimit("RLIMIT_DATA", "data")


def lockable_bytes() -> int | None:
    """Returns the bytes left of RLIMIT_MEMLOCK; None without such a limit, or if this process may exceed it."""
    try:
        lines = dict(line.split(":", 1) for line in system.kernel_lines("/proc/self/status"))
        if int(lines["CapEff"], 16) >> _CAP_IPC_LOCK & 1:
            return None
        locked = int(lines["VmLck"].split()[0]) * 1024
    except (ValueError, KeyError, IndexError):  # Only Linux has these lines.
        locked = 0
    limit, _ = system.limits("RLIMIT_MEMLOCK")
    return None if limit is None else max(0, limit - locked)


def _rlimit(name: str, used: str) -> int | None:
    limit, _ = system.limits(name)
    if limit is None:
        return None
    return max(0, limit - int(getattr(psutil.Process().memory_info(), used, 0)))
