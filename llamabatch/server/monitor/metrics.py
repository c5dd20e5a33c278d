"""The text of /metrics in Prometheus' text format. The metrics have our own names, vLLM's names, and llama-server's."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from llamabatch.engine.engine_state import EngineState
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import EngineClosedError
from llamabatch.monitor import prometheus
from llamabatch.monitor.host import MachineSample
from llamabatch.server.http.counts import HttpCounts
from llamabatch.server.http.errors import ApiError
from llamabatch.server.http.keys import KeyCounts, KeyRing
from llamabatch.server.monitor.live import live_of
from llamabatch.server.serving.serving import serving_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

VLLM = "vllm:"
LLAMA_SERVER = "llamacpp:"

_LLAMA_COUNTERS = {
    "prompt_tokens": "Tokens of prompts of ended requests that were computed.",
    "prompt_tokens_cached": "Tokens of prompts that were copied instead of computed.",
    "prompt_seconds": "Seconds from slot to first token, of successful requests.",
    "tokens_predicted": "Tokens sampled.",
    "tokens_predicted_seconds": "Seconds from first to last token, of successful requests.",
    "n_decode": "Calls of llama_decode.",
    "spec_decode_num_draft_tokens": "Drafted tokens that were checked.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
    "spec_decode_num_drafts": "Decode calls that checked drafts.",
}
_LLAMA_GAUGES = {
    "prompt_tokens_seconds": "Tokens of prompts a second, while prompts are computed; mean since the start.",
    "predicted_tokens_seconds": "Tokens a second of one continuation; mean since the start.",
    "requests_processing": "Continuations that have a slot.",
    "requests_deferred": "Continuations that wait for a slot.",
    "n_busy_slots_per_decode": "Mean rows of a decode call.",
}
_HTTP_LIMITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 480.0)
_LONGEST = "Tokens of prompt and output of the longest continuation."
_KEYS = {
    "requests": "Admitted POST requests of a key.",
    "refused": "POST requests of a key above its limits.",
    "tokens": "Tokens of prompts and outputs of a key.",
}
_SERVER = {
    "num_open_requests": "Running HTTP calls.",
    "ready": "1 while an engine takes requests, else 0.",
}
_POOL = {
    "model_loaded": "1 while a model is loaded, else 0.",
    "model_users": "Calls of HTTP that use a model.",
}


class PooledFigures(NamedTuple):
    """Figures of one of several models.

    Attributes:
        name: the model's first name.
        loaded: 1 or 0.
        users: number of running HTTP calls.
        loads: number of loads since the server started.
    """

    name: str
    loaded: int
    users: int
    loads: int


class Metrics:
    """Writes /metrics.

    Args:
        model: value of the label model_name.

    Raises:
        ImportError: prometheus_client is missing.
    """

    def __init__(self, model: str) -> None:
        self._client: Any = importlib.import_module("prometheus_client")
        self._core: Any = importlib.import_module("prometheus_client.core")
        self._model = model

    def text(
        self,
        stats: EngineStats,
        *,
        machine: MachineSample | None = None,
        states: Sequence[EngineState] = (),
        n_open: int = 0,
        ready: bool = True,
        http: HttpCounts | None = None,
        keys: Mapping[str, KeyCounts] | None = None,
    ) -> bytes:
        """Returns all figures in version 0.0.4 of the text format.

        Args:
            stats: figures of all engines together.
            states: the state of each engine, for the adapters in use.
            n_open: running HTTP calls.
            http: counts of the requests that have ended.
            keys: counts by key.
        """
        registry = self._client.CollectorRegistry()
        registry.register(_Families(lambda: self._families(stats, machine, states, n_open, ready, http, keys)))
        text: bytes = self._client.generate_latest(registry)
        return text + _longest(stats)

    def text_of_pool(
        self, models: Sequence[PooledFigures], http: HttpCounts, keys: Mapping[str, KeyCounts] | None
    ) -> bytes:
        """Returns the figures of a server with several models. The figures of engines are not included."""
        registry = self._client.CollectorRegistry()
        registry.register(_Families(lambda: self._pool(models, http, keys)))
        text: bytes = self._client.generate_latest(registry)
        return text

    def _pool(
        self, models: Sequence[PooledFigures], http: HttpCounts, keys: Mapping[str, KeyCounts] | None
    ) -> Iterator[Any]:
        loads = self._core.CounterMetricFamily(
            prometheus.PREFIX + "model_loads", "Loads of a model.", labels=["model_name"]
        )
        gauges = [
            self._core.GaugeMetricFamily(prometheus.PREFIX + name, text, labels=["model_name"])
            for name, text in _POOL.items()
        ]
        for each in models:
            loads.add_metric([each.name], each.loads)
            for gauge, value in zip(gauges, (each.loaded, each.users), strict=True):
                gauge.add_metric([each.name], value)
        yield from (loads, *gauges)
        yield from self._http(http)
        if keys:
            yield from self._keys(keys)

    def _families(
        self,
        stats: EngineStats,
        machine: MachineSample | None,
        states: Sequence[EngineState],
        n_open: int,
        ready: bool,
        http: HttpCounts | None,
        keys: Mapping[str, KeyCounts] | None,
    ) -> Iterator[Any]:
        own = prometheus.Families(self._core, {"model_name": self._model})
        yield from own.of_engine(prometheus.PREFIX, stats)
        if machine is not None:
            yield from own.of_machine(prometheus.PREFIX, machine)
        yield from own.gauges(prometheus.PREFIX, _SERVER, {"num_open_requests": n_open, "ready": int(ready)})
        if http is not None:
            yield from self._http(http)
        if keys:
            yield from self._keys(keys)
        vllm = prometheus.Families(self._core, {"model_name": self._model, "engine": "0"})
        yield from vllm.of_engine(VLLM, stats)
        name = VLLM + "time_per_output_token_seconds"  # the former name of inter_token_latency_seconds
        yield vllm.histogram(name, "From token to token.", prometheus.BETWEEN, stats.inter_token_s)
        yield self._lora_info(states)
        llama = prometheus.Families(self._core, {})
        yield from llama.counters(LLAMA_SERVER, _LLAMA_COUNTERS, _llama_counters(stats))
        yield from llama.gauges(LLAMA_SERVER, _LLAMA_GAUGES, _llama_gauges(stats))

    def _http(self, counts: HttpCounts) -> Iterator[Any]:
        """Yields the HTTP figures under the names of prometheus-fastapi-instrumentator, which vLLM's server uses."""
        total = self._core.CounterMetricFamily(
            "http_requests", "Requests that have ended, by route and status.", labels=["handler", "method", "status"]
        )
        for (handler, method, status), count in sorted(counts.responses().items()):
            total.add_metric([handler, method, str(status)], count)
        yield total
        durations = self._core.HistogramMetricFamily(
            "http_request_duration_seconds", "From head to last byte, by route.", labels=["handler", "method"]
        )
        for labels, histogram in sorted(counts.durations().items()):
            below = zip(_HTTP_LIMITS, histogram.at_most(_HTTP_LIMITS), strict=True)
            buckets = [*((str(limit), float(n)) for limit, n in below), ("+Inf", float(histogram.count))]
            durations.add_metric(labels, buckets, histogram.sum_s)
        yield durations

    def _keys(self, counts: Mapping[str, KeyCounts]) -> Iterator[Any]:
        for name, description in _KEYS.items():
            family = self._core.CounterMetricFamily(f"{prometheus.PREFIX}key_{name}", description, labels=["key"])
            for key, each in sorted(counts.items()):
                family.add_metric([key], getattr(each, name))
            yield family

    def _lora_info(self, states: Sequence[EngineState]) -> Any:
        """Returns vLLM's gauge of adapters. A label has the names of the adapters of running requests, and the value is
        the time."""
        running = sorted({name for state in states for slot in state.slots for name in slot.adapters})
        family = self._core.GaugeMetricFamily(
            VLLM + "lora_requests_info",
            "Adapters of running requests; the value is the time.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        family.add_metric(["0", ",".join(running), ""], time.time())
        return family


class _Families:
    """A collector for one call of prometheus_client's generate_latest."""

    def __init__(self, collect: Any) -> None:
        self.collect = collect

    def describe(self) -> list[Any]:
        return []


def _llama_counters(stats: EngineStats) -> dict[str, float | None]:
    return {
        "prompt_tokens": stats.computed_tokens + stats.embed_tokens,
        "prompt_tokens_cached": stats.prefix_tokens + stats.shared_tokens,
        "prompt_seconds": stats.prefill_s.sum_s,
        "tokens_predicted": stats.generated_tokens,
        "tokens_predicted_seconds": stats.decode_s.sum_s,
        "n_decode": stats.decode_calls + stats.prefill_calls + stats.embed_passes,
        "spec_decode_num_draft_tokens": stats.drafted_tokens,
        "spec_decode_num_accepted_tokens": stats.accepted_tokens,
        "spec_decode_num_drafts": stats.verify_calls,
    }


def _llama_gauges(stats: EngineStats) -> dict[str, float | None]:
    """Returns the values of _LLAMA_GAUGES. The output speed does not count the first token of each output, because
    the prefill already yields this token."""
    prefill_s, decode_s = stats.prefill_s.sum_s, stats.decode_s.sum_s
    n_later = max(0.0, stats.output_lengths.sum_s - stats.decode_s.count)
    return {
        "prompt_tokens_seconds": stats.computed_tokens / prefill_s if prefill_s else 0.0,
        "predicted_tokens_seconds": n_later / decode_s if decode_s else 0.0,
        "requests_processing": stats.running,
        "requests_deferred": stats.waiting,
        "n_busy_slots_per_decode": stats.rows_per_step,
    }


def _longest(stats: EngineStats) -> bytes:
    """Returns llama-server's n_tokens_max, a counter without the `_total` that prometheus_client always appends."""
    name = LLAMA_SERVER + "n_tokens_max"
    return f"# HELP {name} {_LONGEST}\n# TYPE {name} counter\n{name} {float(stats.longest)}\n".encode()


async def metrics(request: HttpRequest) -> Any:
    """Returns the metrics as text. While no engine runs, the figures are those of the last engine, or zero."""
    serving = serving_of(request)
    live = live_of(serving)
    try:
        stats, states = await live.look()
    except (ApiError, EngineClosedError):  # the model is loading, or the engine has ended
        stats, states = live.last
    name, n_open, ready = serving.names[0], serving.n_open, serving.state == "ready"
    http: HttpCounts = request.app.state.http_counts
    ring: KeyRing | None = request.app.state.keys
    keys = None if ring is None else ring.counts()

    def text() -> bytes:
        return Metrics(name).text(
            stats, machine=live.machine(), states=states, n_open=n_open, ready=ready, http=http, keys=keys
        )

    found = await asyncio.to_thread(text)
    headers = {"Content-Type": CONTENT_TYPE, "Process-Start-Time-Unix": str(serving.created)}
    return Response(found, headers=headers)


routes = [Route("/metrics", metrics, methods=["GET"])]
