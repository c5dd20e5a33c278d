"""MetricsFile: a file for Prometheus in the text format, with vLLM's metric names under our prefix."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llamabatch.engine.stats import EngineStats
from llamabatch.errors import ConfigError, SetupError
from llamabatch.monitor.host import MachineSample
from llamabatch.monitor.snapshot import Snapshot
from llamabatch.utils.histogram import Histogram
from llamabatch.utils.paths import absolute, shown

PREFIX = "llamabatch:"

# Bucket limits in seconds, added to vLLM's limits, because small models are faster than vLLM's usual models.
_FINE = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
_FIRST: tuple[float, ...] = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_FIRST += (20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
BETWEEN: tuple[float, ...] = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
BETWEEN += (20.0, 40.0, 80.0)
_WHOLE: tuple[float, ...] = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)
_WHOLE += (240.0, 480.0, 960.0, 1920.0, 7680.0)

_GAUGES = {
    "num_requests_running": "Continuations that have a slot.",
    "num_requests_waiting": "Continuations and texts that wait for a slot.",
    "kv_cache_usage_perc": "Share of the KV cache that running continuations use, 0 to 1.",
    "slot_usage_perc": "Share of the slots in use, 0 to 1.",
    "slot_demand": "Continuations and texts that run or wait, divided by the slots; above 1 some wait.",
    "rows_per_step": "Mean rows of a decode call since the start.",
    "cache_ram_bytes": "Main memory that prefixes beyond the slots take.",
    "cache_disk_bytes": "Bytes of the files of prefixes that outlive the process.",
    "passes_per_step": "Mean passes over the weights of a decode call since the start.",
}
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts that have had a slot.",
    "generation_tokens": "Tokens sampled.",
    "num_preemptions": "Continuations that lost their slot and came back.",
    "prefix_cache_queries": "Tokens of prompts that were looked up.",
    "prefix_cache_hits": "Tokens of prompts that were copied instead of computed.",
    "external_prefix_cache_hits": "Tokens of prompts that were loaded from main memory, among the copied ones.",
    "requests_submitted": "Requests accepted.",
    "requests_rejected": "Requests that max_queue refused.",
    "engine_restarts": "Engine processes started in place of a crashed one.",
    "spec_decode_num_draft_tokens": "Drafted tokens that were checked.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _FIRST),
    "inter_token_latency_seconds": ("From token to token.", BETWEEN),
    "request_queue_time_seconds": ("From arrival to the slot.", _WHOLE),
    "e2e_request_latency_seconds": ("From arrival to the end, of successful requests.", _WHOLE),
    "request_prefill_time_seconds": ("From the slot to the first token, of successful requests.", _WHOLE),
    "request_decode_time_seconds": ("From the first token to the last, of successful requests.", _WHOLE),
}
_LENGTHS = {
    "request_prompt_tokens": "Tokens of the prompts of successful requests.",
    "request_generation_tokens": "Tokens of the outputs of successful requests.",
}
_LENGTH_LIMITS = (*tuple(float(step * 10**power) for power in range(4) for step in (1, 2, 5)), 10000.0)
_MACHINE = {
    "process_cpu_usage_cores": "Cores that this process and the engine's children keep busy.",
    "process_memory_bytes": "Resident memory of this process and the engine's children.",
    "cpu_power_watts": "Power of CPUs and their memory, from RAPL.",
    "gpu_usage_perc": "Share of the time in which the GPU computed, 0 to 1.",
    "gpu_memory_used_bytes": "Memory of the GPU in use, of all processes.",
    "gpu_power_watts": "Power of the GPU.",
}


class MetricsFile:
    """A file with one engine's figures, for node_exporter's textfile collector or other readers of the text format.

    Each write makes a temporary file in the same folder and renames it. Readers therefore always find a complete file.
    The file stays when the program ends.

    Args:
        path: path of the file; node_exporter reads names that end in .prom.
        model: the value of the label model_name; "": the title of the monitor.

    Raises:
        SetupError: prometheus_client is missing.
        ConfigError: the folder is missing or not writable, or the path is a folder.
    """

    def __init__(self, path: str | os.PathLike[str], model: str = "") -> None:
        try:
            self._client: Any = importlib.import_module("prometheus_client")
            self._core: Any = importlib.import_module("prometheus_client.core")
        except ImportError as error:
            raise SetupError("a metrics file needs prometheus_client: pip install 'llamabatch[metrics]'") from error
        self.path = Path(absolute(path))
        folder, given = self.path.parent, shown(self.path)
        if not folder.is_dir():
            raise ConfigError(f"metrics_file is {given!r}; there is no folder {shown(folder)!r}")
        if self.path.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            why = "that is a folder" if self.path.is_dir() else f"the folder {shown(folder)!r} cannot be written to"
            raise ConfigError(f"metrics_file is {given!r}; {why}")
        self.model = model
        self._snapshot: Snapshot | None = None
        self._registry = self._client.CollectorRegistry()
        self._registry.register(self)

    def write(self, snapshot: Snapshot) -> None:
        """Rewrites the file from a snapshot. Raises OSError."""
        self._snapshot = snapshot
        self._client.write_to_textfile(str(self.path), self._registry)

    def collect(self) -> Iterator[Any]:
        """Yields the families of metrics, for prometheus_client."""
        if self._snapshot is not None:
            families = Families(self._core, {"model_name": self.model})
            yield from families.of_engine(PREFIX, self._snapshot.stats)
            yield from families.of_machine(PREFIX, self._snapshot.machine)


class Families:
    """Makes families of metrics for prometheus_client.

    Args:
        core: the module prometheus_client.core.
        labels: names and values of the labels of each sample.
    """

    def __init__(self, core: Any, labels: Mapping[str, str]) -> None:
        self._core = core
        self._names, self._values = list(labels), list(labels.values())

    def of_engine(self, prefix: str, stats: EngineStats) -> Iterator[Any]:
        """Yields the metrics of an engine. If vLLM has the same metric, the name is the prefix plus vLLM's name."""
        yield from self.gauges(prefix, _GAUGES, gauges(stats))
        yield from self.counters(prefix, _COUNTERS, counters(stats))
        how = {"stop": stats.finished_stop, "length": stats.finished_length, "abort": stats.aborted}
        ended = self._core.CounterMetricFamily(
            prefix + "request_success", "Requests by how they ended.", labels=[*self._names, "finished_reason"]
        )
        for reason, count in {**how, "error": stats.errors}.items():
            ended.add_metric([*self._values, reason], count)
        yield ended
        for name, limits, histogram in histograms(stats):
            yield self.histogram(prefix + name, _HISTOGRAMS[name][0], limits, histogram)
        lengths = (stats.prompt_lengths, stats.output_lengths)
        for (name, text), histogram in zip(_LENGTHS.items(), lengths, strict=True):
            yield self.histogram(prefix + name, text, _LENGTH_LIMITS, histogram)

    def of_machine(self, prefix: str, machine: MachineSample) -> Iterator[Any]:
        """Yields the figures that the machine reports."""
        own = {
            "process_cpu_usage_cores": None if machine.cpu_percent is None else machine.cpu_percent / 100,
            "process_memory_bytes": machine.memory_bytes,
            "cpu_power_watts": machine.cpu_power_w,
        }
        yield from self.gauges(prefix, _MACHINE, own)
        for name in ("gpu_usage_perc", "gpu_memory_used_bytes", "gpu_power_watts"):
            family = self._core.GaugeMetricFamily(prefix + name, _MACHINE[name], labels=[*self._names, "gpu"])
            for gpu in machine.gpus:
                use = None if gpu.use_percent is None else gpu.use_percent / 100
                value = {"gpu_usage_perc": use, "gpu_memory_used_bytes": gpu.memory_used}.get(name, gpu.power_w)
                if value is not None:
                    family.add_metric([*self._values, str(gpu.index)], value)
            if family.samples:
                yield family

    def gauges(self, prefix: str, texts: Mapping[str, str], values: Mapping[str, float | None]) -> Iterator[Any]:
        """Yields a gauge for each value that is not None. `texts` has the descriptions by name."""
        yield from self._plain("GaugeMetricFamily", prefix, texts, values)

    def counters(self, prefix: str, texts: Mapping[str, str], values: Mapping[str, float | None]) -> Iterator[Any]:
        """Yields a counter for each value that is not None. prometheus_client appends `_total` to the names."""
        yield from self._plain("CounterMetricFamily", prefix, texts, values)

    def _plain(
        self, kind: str, prefix: str, texts: Mapping[str, str], values: Mapping[str, float | None]
    ) -> Iterator[Any]:
        for name, value in values.items():
            if value is not None:
                family = getattr(self._core, kind)(prefix + name, texts[name], labels=self._names)
                family.add_metric(self._values, value)
                yield family

    def histogram(self, name: str, text: str, limits: Sequence[float], histogram: Histogram) -> Any:
        """Returns a histogram. `limits`: the bucket limits, a sorted selection of utils.histogram.LIMITS_S."""
        below = histogram.at_most(limits)
        buckets = [(str(limit), float(n)) for limit, n in zip(limits, below, strict=True)]
        family = self._core.HistogramMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, [*buckets, ("+Inf", float(histogram.count))], histogram.sum_s)
        return family


def gauges(stats: EngineStats) -> dict[str, float | None]:
    """Returns {name: value} for the names in _GAUGES."""
    return {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": stats.kv_use,
        "slot_usage_perc": stats.slot_use,
        "slot_demand": stats.slot_demand,
        "rows_per_step": stats.rows_per_step,
        "cache_ram_bytes": stats.cache_ram_bytes,
        "cache_disk_bytes": stats.cache_disk_bytes,
        "passes_per_step": stats.passes_per_step,
    }


def counters(stats: EngineStats) -> dict[str, float | None]:
    """Returns {name: value} for the names in _COUNTERS."""
    return {
        "prompt_tokens": stats.prompt_tokens + stats.embed_tokens,
        "generation_tokens": stats.generated_tokens,
        "num_preemptions": stats.preemptions,
        "prefix_cache_queries": stats.prompt_tokens,
        "prefix_cache_hits": stats.prefix_tokens + stats.shared_tokens,
        "external_prefix_cache_hits": stats.restored_tokens,
        "requests_submitted": stats.submitted,
        "requests_rejected": stats.rejected,
        "engine_restarts": stats.restarts,
        "spec_decode_num_draft_tokens": stats.drafted_tokens,
        "spec_decode_num_accepted_tokens": stats.accepted_tokens,
    }


def histograms(stats: EngineStats) -> Iterator[tuple[str, list[float], Histogram]]:
    """Yields the names, limits and values of _HISTOGRAMS."""
    times = (stats.ttft_s, stats.inter_token_s, stats.queue_s, stats.e2e_s, stats.prefill_s, stats.decode_s)
    for (name, (_, limits)), histogram in zip(_HISTOGRAMS.items(), times, strict=True):
        yield name, sorted({*_FINE, *limits}), histogram
