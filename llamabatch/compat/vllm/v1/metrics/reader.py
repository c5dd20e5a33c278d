"""The metrics of an engine as LLM.get_metrics returns them."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamabatch.engine.stats import EngineStats
from llamabatch.utils.late_import import late_import

PREFIX = "vllm:"


@dataclass
class Metric:
    """A metric with its name, such as "vllm:num_requests_running"."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class Counter(Metric):
    """A metric that only rises."""

    value: int = 0


@dataclass
class Gauge(Metric):
    """A metric of the current state."""

    value: float = 0.0


@dataclass
class Vector(Metric):
    """A metric that is a list of counts. It exists for vLLM's sake: no engine metric is a Vector."""

    values: list[int] = field(default_factory=list)


@dataclass
class Histogram(Metric):
    """A metric of durations: their count, their sum in seconds, and the number of durations up to each limit."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


def metrics_of(stats: EngineStats, model: str) -> list[Metric]:
    """Returns all metrics under vLLM's names."""
    with late_import("the code of the monitor"):
        from llamabatch.monitor import prometheus  # imported late, since it imports psutil

    labels = {"model_name": model, "engine": "0"}
    found: list[Metric] = [
        Gauge(PREFIX + name, dict(labels), float(value))
        for name, value in prometheus.gauges(stats).items()
        if value is not None
    ]
    found += [
        Counter(PREFIX + name, dict(labels), int(value))
        for name, value in prometheus.counters(stats).items()
        if value is not None
    ]
    for name, limits, histogram in prometheus.histograms(stats):
        below = zip(limits, histogram.at_most(limits), strict=True)
        buckets = {str(limit): n for limit, n in below} | {"+Inf": histogram.count}
        found.append(Histogram(PREFIX + name, dict(labels), histogram.count, histogram.sum_s, buckets))
    return found
