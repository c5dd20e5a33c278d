"""A Ray cluster: the resources of its nodes, and the plan of a model on one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamabatch.config import EngineConfig
from llamabatch.engine.resolve_config import plan
from llamabatch.errors import SetupError
from llamabatch.gguf.resolve import resolve
from llamabatch.integrations import needs
from llamabatch.utils.checks import counted

with needs("ray", "ray"):
    import ray

PYTHON_BYTES = 512 * 2**20
"""Bytes of the Python processes of one engine, its child among them, without those of its plan."""

_PLAN_S = 300.0


@dataclass(frozen=True)
class Node:
    """The resources of a node, as Ray counts them: CPUs, GPUs, and bytes of memory."""

    cpus: float
    gpus: float
    memory: float

    @classmethod
    def all(cls) -> list[Node]:
        """Those that can run tasks and actors. Raises SetupError: there is none."""
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        nodes = [cls(has.get("CPU", 0), has.get("GPU", 0), has.get("memory", 0)) for has in alive]
        found = [node for node in nodes if node.cpus > 0]
        if not found:
            raise SetupError(
                f"none of {counted(len(nodes), 'node')} of the cluster has a CPU for Ray; add a node with num_cpus > 0"
            )
        return found


def ask_plan(model: str, options: Mapping[str, Any], gpus: int) -> dict[str, int]:
    """The figures of the model's plan, made in a task on a node of the cluster: n_slots, n_ctx, n_threads,
    n_threads_batch, instances, and bytes of memory.

    Args:
        gpus: of that task: 0 or 1.

    Raises:
        SetupError: no node makes it within 300 s. And what a plan raises.
    """
    task = ray.remote(_plan).options(num_cpus=0, num_gpus=gpus).remote(model, dict(options))
    try:
        found: dict[str, int] = ray.get(task, timeout=_PLAN_S)
    except ray.exceptions.GetTimeoutError as error:
        ray.cancel(task, force=True)
        raise SetupError(
            f"no node of the cluster has made the plan of {model} within {_PLAN_S:.0f} s; wait for free nodes, or look "
            "at `ray status`"
        ) from error
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from error
    return found


def _plan(model: str, options: Mapping[str, Any]) -> dict[str, int]:
    """Runs in a task."""
    made = plan(EngineConfig.from_options(model, options), resolve(model))
    config = made.config
    names = ("n_slots", "n_ctx", "n_threads", "n_threads_batch", "instances")
    return {**{name: getattr(config, name) for name in names}, "bytes": made.total_bytes}
