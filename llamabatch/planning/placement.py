"""Computes where a model's weights lie: in main memory, in the mapped file, or on GPUs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from llamabatch.config import ResolvedConfig
from llamabatch.gguf.reader import TensorInfo
from llamabatch.planning.model_facts import ModelFacts
from llamabatch.planning.weights import EMBEDDING, OUTPUT, Files, Weights, copy_bytes, in_files, weights

Places: TypeAlias = "tuple[tuple[str, int | None], ...]"


class InMainMemory(NamedTuple):
    """The bytes of the weights in main memory. memory.Memory describes the fields."""

    weights: int
    copies: int
    reclaimable: int
    loading: int
    locked: int


@dataclass(frozen=True)
class Placement:
    """The place of each weight.

    Attributes:
        devices: the GPU of each layer, then of the output; None: the CPU.
        named: (name, GPU) of each tensor placed by override_tensor; None: main memory.
        sizes: all tensors by name; empty if `named` is empty.
        sorted: the weights of all other tensors, by layer.
    """

    facts: ModelFacts
    devices: tuple[int | None, ...]
    named: Places
    sizes: Mapping[str, TensorInfo]
    sorted: Weights

    @classmethod
    def of(cls, facts: ModelFacts, config: ResolvedConfig, gpu_shares: Sequence[float]) -> Placement:
        """Returns the placement for these options. `gpu_shares`: as in `memory`."""
        named = facts.placed if gpu_shares else ()  # without GPUs all tensors are in main memory
        sizes = {tensor.name: tensor for tensor in facts.tensors} if named else {}
        devices = _devices(config, max(1, len(facts.layers)), gpu_shares)
        return cls(facts, devices, named, sizes, _sorted(facts, frozenset(name for name, _ in named)))

    def computes_here(self, config: ResolvedConfig) -> bool:
        """Returns True if the CPU computes a part of a pass."""
        return None in self.devices or any(gpu is None for _, gpu in self.named) or not config.offload_kqv

    def layers_of(self, number: int) -> list[int]:
        """Returns the layers of a GPU."""
        return [layer for layer, device in enumerate(self.devices[:-1]) if device == number]

    def named_bytes(self, number: int) -> int:
        """Returns the bytes of the tensors put on a GPU by override_tensor."""
        return sum(self.sizes[name].n_bytes for name, gpu in self.named if gpu == number)

    def layer_bytes(self, number: int) -> int:
        """Returns the bytes of the layers of a GPU."""
        return sum(n for n, device in zip(self.sorted.layers, self.devices, strict=False) if device == number)

    def tied_bytes(self, number: int) -> int:
        """Returns the bytes of a GPU's copy of the tied token embedding. Only the GPU of the output has such a copy."""
        if self.devices[-1] != number or any(name == EMBEDDING for name, _ in self.named):
            return 0
        found = {tensor.name: tensor.n_bytes for tensor in self.facts.tensors}
        return 0 if OUTPUT in found else found.get(EMBEDDING, 0)

    def in_main_memory(self, config: ResolvedConfig, n_gpus: int) -> InMainMemory:
        """Returns the bytes of the weights in main memory, with repacked copies and pages of the file."""
        facts = self.facts
        copies = sum(n for n, device in zip(self.sorted.copies, self.devices, strict=False) if device is None)
        copies += sum(copy_bytes(self.sizes[name], facts.features) for name, gpu in self.named if gpu is None)
        moved = sum(self.layer_bytes(number) + self.named_bytes(number) for number in range(n_gpus))
        on_cpu = tuple(device is None for device in self.devices)
        files = _in_files(facts, on_cpu, facts.file_bytes - moved, self.named)
        drops = facts.drops_copied_pages and not config.use_mlock
        here = files.mapped if config.use_mmap and not drops else files.used
        here += files.not_dropped if config.use_mmap and drops else 0
        given_back = facts.file_bytes - here if config.use_mmap else 0
        if drops and given_back:  # A copy is made before the pages of its tensor are given back.
            given_back = max(0, given_back - copies) + files.largest_copied
        reclaimable = here - files.used + files.embedding if config.use_mmap and not config.use_mlock else 0
        return InMainMemory(here, copies, reclaimable, given_back, _locked(facts, files, config))


@lru_cache(maxsize=16)
def _sorted_tensors(facts: ModelFacts, named: frozenset[str]) -> Weights:
    return weights(facts.tensors, facts.n_layer, facts.features, named)


@lru_cache(maxsize=16)
def _in_files(facts: ModelFacts, on_cpu: tuple[bool, ...], file_bytes: int, named: Places) -> Files:
    """Returns the Files of a model. If the model's tensors are not known, all `file_bytes` count as used in place."""
    if not facts.tensors:
        return Files(file_bytes, file_bytes, 0)
    here = {name: gpu is None for name, gpu in named}
    return in_files(facts.tensors, facts.parts, facts.n_layer, facts.features, on_cpu, here)


def _sorted(facts: ModelFacts, named: frozenset[str]) -> Weights:
    """Returns the weights by layer, or all weights as one layer if the tensors are not known."""
    return _sorted_tensors(facts, named) if facts.tensors else Weights((facts.file_bytes,), (0,))


def _locked(facts: ModelFacts, files: Files, config: ResolvedConfig) -> int:
    """Returns the bytes locked by use_mlock. llama.cpp does not lock repacked copies, since their buffers are not host
    buffers."""
    if not config.use_mlock:
        return 0
    if not config.use_mmap:
        return files.used
    before = facts.file_bytes - sum(tensor.n_bytes for tensor in facts.tensors)  # bytes of the headers
    return min(facts.file_bytes, before + files.ends) if files.ends else 0


def _devices(config: ResolvedConfig, n_layer: int, shares: Sequence[float]) -> tuple[int | None, ...]:
    """Returns the GPU of each layer, then of the output; None: the CPU. Follows llama-model.cpp, load_tensors."""
    on_gpus = config.n_gpu_layers if config.n_gpu_layers >= 0 else n_layer + 1
    first = max(n_layer + 1 - on_gpus, 0)
    count = min(on_gpus, n_layer + 1)
    if not shares or count == 0:
        return (None,) * (n_layer + 1)
    limits, total = [], 0.0
    for share in shares:
        total += share
        limits.append(total)
    limits = [limit / total if total else 1.0 for limit in limits]
    last = len(limits) - 1
    return tuple(
        None if layer < first else min(last, bisect_right(limits, (layer - first) / count))
        for layer in range(n_layer + 1)
    )
