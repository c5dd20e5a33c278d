"""OpenVINO GenAI, a library with its own continuous batching. It reads some GGUF files."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import grid
from benchmarks.peers.base import SAMPLING, Result, Setup, measure
from benchmarks.peers.child import PROGRAMS, ChildSession
from benchmarks.peers.servers import bench_python
from benchmarks.workloads import N_SLOTS, Workload
from llamabatch.native_build.tools import make_folder
from llamabatch.planning.cpu import cpu_name
from llamabatch.utils.paths import cache_dir

_SCHEDULER = ("max_num_batched_tokens", "enable_prefix_caching")  # all other settings are properties of the device
AXES = {
    "max_num_batched_tokens": (256, 512, 2048),
    "enable_prefix_caching": (0, 1),
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": (0, 32, 64),
    "INFERENCE_PRECISION_HINT": ("f32", "bf16"),
    "KV_CACHE_PRECISION": ("u8", "f16"),
}
USUAL = ("max_num_batched_tokens=2048", "enable_prefix_caching=1")


def _stage(axis: str, best: grid.Flags) -> list[grid.Flags]:
    return [best, *((*best, f"{axis}={value}") for value in AXES[axis])]


def remembered(setup: Setup) -> grid.Remembered:
    """Returns the record of the best settings by workload, for this CPU and these threads.

    A search tries the axes in turn, from the defaults on.
    """
    stages = [partial(_stage, axis) for axis in AXES]
    key = f"{cpu_name()}, {setup.threads} threads"
    return grid.Remembered(make_folder(cache_dir() / "bench") / "openvino-settings.json", key, USUAL, stages)


@dataclass(frozen=True)
class OpenVino:
    """ContinuousBatchingPipeline on the CPU with at most 32 sequences at once, and its defaults or `settings`.

    It gets no min_p, which is 0 in SAMPLING. The child adds all requests at the start, so workloads with requests that
    arrive later do not apply.
    """

    name: str
    best: grid.Remembered | None = None
    settings: grid.Flags = ()

    def applies(self, workload: Workload) -> bool:
        return not any(shape.arrival_s or shape.endless for shape in workload.shapes)

    def open(self, setup: Setup, workload: Workload) -> ChildSession:
        scheduler: dict[str, Any] = {"max_num_seqs": N_SLOTS}
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": setup.threads}
        for each in self.settings if self.best is None else self.best.flags(workload.name):
            name, _, value = each.partition("=")
            (scheduler if name in _SCHEDULER else properties)[name] = int(value) if value.isdigit() else value
        if "enable_prefix_caching" in scheduler:
            scheduler["enable_prefix_caching"] = bool(scheduler["enable_prefix_caching"])
        sampling = {name: value for name, value in SAMPLING.items() if name != "min_p"}
        start = {"model": str(setup.models[workload.model].path), "scheduler": scheduler, "properties": properties}
        log_name = self.name.replace(",", "")
        return ChildSession(
            log_name, PROGRAMS / "start_openvino.py", {**start, "sampling": sampling}, setup,
            python=bench_python(setup),
        )  # fmt: skip

    def measure(self, setup: Setup, workload: Workload, rng: random.Random) -> Result:
        return measure(self, setup, workload, rng)


def search_settings(
    setup: Setup, workloads: Sequence[Workload], best: grid.Remembered, say: Callable[[str], None]
) -> None:
    """Searches the best settings for the workloads without a record, each cut to about a fifth."""

    def one(settings: grid.Flags, cut: Workload, timeout_s: float) -> Result:
        peer = OpenVino("OpenVINO GenAI, grid", settings=settings)
        return measure(peer, setup, cut, random.Random(repr(settings)), runs=grid.RUNS)

    for workload in workloads:
        if workload.name not in best.found:
            best.search(workload, one, say)
