"""`llamabatch plan --kubernetes`: writes a plan as a kustomize patch, with the resources and options of a container."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llamabatch.gguf.resolve import resolve
from llamabatch.planning.memory import MIB, PROCESS_BYTES
from llamabatch.tools.plan.report import Report
from llamabatch.utils.paths import TINY

SERVER_BYTES = 96 * MIB  # memory of `serve` or `run`: 74 MiB, or 83 MiB with 1,000 connections, plus room for results
# Memory of request bodies: 4 x --max-bodies-bytes. The highest use measured is 200 MiB (benchmarks/results/bodies.json)
BODIES_BYTES = 256 * MIB
MARGIN = 0.05  # the largest difference between predicted and measured peaks (docs/plan.md)
NVIDIA = "nvidia.com/gpu"
MODELS = "/models"  # the folder of model files in a pod
_CONTAINER = "/spec/template/spec/containers/0"
_PINNED = ("strategy", "instances", "n_slots", "n_ctx", "kv", "n_threads", "n_threads_batch", "cache_ram")


def model_in_pod(model: str) -> str:
    """Returns the path of this model file in a container, below MODELS. The patch sets --model to this path, because
    the memory limit fits only this model."""
    return model if model == TINY else f"{MODELS}/{resolve(model).name}"


def patch(report: Report, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a JSON patch (RFC 6902) for the first container of a Deployment or a Job.

    The container must have a list `env`. The patch sets memory in MiB, a CPU for each thread, and the GPUs of the plan.
    The resource requests equal the limits, so that a pod's quality of service is "Guaranteed". Within these limits
    "auto" would take only half of the memory. So the patch also sets the options of the plan, as environment variables
    that `llamabatch serve` and `run` read.

    Args:
        report: the report of a plan that fits.
        given: engine options of the user.
    """
    resources = {"cpu": str(_cpus(report)), "memory": f"{-(-_bytes(report) // MIB)}Mi"}
    if gpus := _gpus(report):
        resources[NVIDIA] = str(gpus)
    found: list[dict[str, Any]] = [
        {
            "op": "add",
            "path": f"{_CONTAINER}/resources",
            "value": {"requests": resources, "limits": dict(resources)},
        }
    ]
    for name, value in variables(report, given).items():
        found.append({"op": "add", "path": f"{_CONTAINER}/env/-", "value": {"name": name, "value": value}})
    return found


def variables(report: Report, given: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options of the user and of the plan as environment variables."""
    config = report.requested.config
    chosen = {**given, **{name: getattr(config, name) for name in _PINNED}}
    if config.kv == "unified":
        chosen["kv_cells"] = config.kv_cells
    return {f"LLAMABATCH_{name.upper()}": _text(value) for name, value in chosen.items()}


def yaml(operations: list[dict[str, Any]], report: Report) -> str:
    """Formats the patch as YAML with comments. Texts are quoted as in JSON, which is valid YAML."""
    config = report.requested.config
    lines = [
        f"# {_quoted(report.model)[1:-1]}: {config.n_slots} slots, {config.n_ctx} tokens each,",
        f"# {config.instances} engine{'s' * (config.instances > 1)}, strategy {config.strategy}",
    ]
    if config.cache_ram:
        whole = "each engine's memory" if report.requested.in_children else "the memory"
        lines.append(f"# --cache-ram: {config.cache_ram} MiB of {whole}, for prefixes beyond the slots")
    for operation in operations:
        lines += [
            f"- op: {operation['op']}",
            f"  path: {operation['path']}",
            "  value:",
            *_block(operation["value"], 4),
        ]
    return "\n".join(lines) + "\n"


def _block(value: Mapping[str, Any], indent: int) -> list[str]:
    lines = []
    for name, each in value.items():
        if isinstance(each, Mapping):
            lines += [f"{' ' * indent}{name}:", *_block(each, indent + 2)]
        else:
            lines.append(f"{' ' * indent}{name}: {_quoted(each)}")
    return lines


def _quoted(text: str) -> str:
    """Quotes a text for YAML as in JSON. Also escapes the three characters that end a line only in YAML."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(f"\\u{ord(each):04x}" if each in "\x85\u2028\u2029" else each for each in quoted)


def _bytes(report: Report) -> int:
    """Returns the main memory for a pod: the peak of the engines, the server, and request bodies."""
    requested = report.requested
    own = requested.memory
    engines = requested.peak_bytes + (0 if requested.in_children else PROCESS_BYTES)
    if own.kv_cache:  # without a KV cache, peak_bytes includes the context for embeddings already
        engines += own.embeddings * requested.config.instances
    return int(engines * (1 + MARGIN)) + SERVER_BYTES + BODIES_BYTES


def _cpus(report: Report) -> int:
    config = report.requested.config
    return config.instances * max(config.n_threads, config.n_threads_batch)


def _gpus(report: Report) -> int:
    """Returns the number of GPUs for a pod: the GPUs with layers. With "multi-instance" each engine has its own GPUs,
    as long as the machine has enough."""
    used = sum(gpu.total > 0 for gpu in report.memory.gpus)
    children = report.requested.config.strategy == "multi-instance"
    return min(len(report.machine.gpus), used * report.requested.config.instances) if children else used


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
