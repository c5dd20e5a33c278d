"""A Ray cluster: the resources of its nodes, a model's plan on a node, and the size of a pool of engines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamabatch.config import EngineConfig
from llamabatch.engine.resolve_config import plan
from llamabatch.errors import ConfigError, MemoryPlanError, SetupError
from llamabatch.gguf.resolve import resolve
from llamabatch.integrations import needs
from llamabatch.jobs.settings import Settings
from llamabatch.utils.checks import counted, integer, show

with needs("ray", "ray"):
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

PYTHON_BYTES = 512 * 2**20
"""Bytes that the Python processes of one engine (the actor and its child) need in addition to the plan's memory."""

_PLAN_S = 300.0
_MOST_ACTORS = 100_000
_LOOK_S = 0.5  # seconds between two searches for a node


@dataclass(frozen=True)
class Node:
    """The resources of a node as Ray counts them: CPUs, GPUs, and bytes of memory."""

    cpus: float
    gpus: float
    memory: float

    @classmethod
    def wait(cls, seconds: float = _PLAN_S) -> list[Node]:
        """Waits until a node can run tasks, because nodes may still be starting. Returns all nodes that can run tasks.
        Raises SetupError after `seconds`."""
        until = time.monotonic() + seconds
        while True:
            try:
                return cls.all()
            except SetupError:
                if time.monotonic() > until:
                    raise
            time.sleep(_LOOK_S)

    @classmethod
    def all(cls) -> list[Node]:
        """Returns the nodes that can run tasks and actors. Raises SetupError if there is none."""
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        nodes = [cls(has.get("CPU", 0), has.get("GPU", 0), has.get("memory", 0)) for has in alive]
        found = [node for node in nodes if node.cpus > 0]
        if not found:
            raise SetupError(
                f"none of {counted(len(nodes), 'node')} of the cluster has a CPU for Ray; add a node with num_cpus > 0"
            )
        return found


def ask_plan(model: str, options: Mapping[str, Any], gpus: int) -> dict[str, int]:
    """Makes the model's plan in a task on a node of the cluster. Returns the plan's n_slots, n_ctx, n_threads,
    n_threads_batch, instances, and bytes of memory.

    Args:
        gpus: number of GPUs of the task: 0 or 1.

    Raises:
        SetupError: no node makes the plan within 300 s. Also raises the errors of a plan.
    """
    # The task runs on a node with CPUs if possible. Engines need CPUs, and some head nodes have none.
    ids = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    where = NodeAffinitySchedulingStrategy(ids[0], soft=True) if ids and not gpus else "DEFAULT"
    task = ray.remote(_plan).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=where)
    task = task.remote(model, dict(options))
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
    """Makes the plan for ask_plan. Runs in a task."""
    made = plan(EngineConfig.from_options(model, options), resolve(model))
    config = made.config
    names = ("n_slots", "n_ctx", "n_threads", "n_threads_batch", "instances")
    return {**{name: getattr(config, name) for name in names}, "bytes": made.total_bytes}


@dataclass(frozen=True)
class Size:
    """The size of a pool, and of its actors.

    Attributes:
        n_slots: number of slots of each actor's engine.
        options: the engine's options that the plan has chosen in place of "auto".
        resources: Ray's resources of an actor.
    """

    n_actors: int
    n_slots: int
    options: Mapping[str, Any]
    resources: Mapping[str, float]

    @classmethod
    def of(cls, nodes: Sequence[Node], model: str, options: Mapping[str, Any], n_actors_given: int | None) -> Size:
        """Makes the model's plan, and returns the size. If no number of actors is given, each GPU gets an actor;
        without GPUs, each node gets one.

        Raises:
            MemoryPlanError: an actor needs more memory than Ray counts on any node.
            SetupError and the errors of a plan: as for ask_plan.
        """
        config = EngineConfig.from_options(model, options)
        n_gpus = 0 if config.n_gpu_layers == 0 else int(sum(node.gpus for node in nodes))
        planned = ask_plan(model, options, gpus=min(1, n_gpus))
        n_actors = n_actors_given or n_gpus or len(nodes)
        in_node = -(-n_actors // len(nodes))
        n_cpus = min(node.cpus for node in nodes)
        share = max(1, int(n_cpus) // in_node // planned["instances"])
        threads = {name: min(planned[name], share) for name in ("n_threads", "n_threads_batch")}
        left = (n_cpus - 1) / in_node  # the next line rounds down, because Ray accepts fractions of a CPU only below 1
        free = int(left) if left >= 1 else int(max(0.0, left) * 100) / 100
        memory = planned["bytes"] + PYTHON_BYTES
        _check_room("an actor", memory, nodes, planned)
        resources = {"num_cpus": min(max(threads.values()) * planned["instances"], free), "memory": memory}
        if n_gpus:
            resources["num_gpus"] = 1
        chosen = {name: planned[name] for name in ("n_slots", "n_ctx")} | threads
        return cls(n_actors, planned["n_slots"], _open(config, chosen), resources)


@dataclass(frozen=True)
class ShardSize:
    """The part of a node that a shard of a job uses.

    Attributes:
        engine: the options that the plan has chosen in place of "auto".
        resources: Ray's resources of the shard's task.
    """

    engine: Mapping[str, int]
    resources: Mapping[str, float]

    @classmethod
    def of(cls, settings: Settings) -> ShardSize:
        """Makes the model's plan, and returns the size. Raises the errors of ask_plan, and MemoryPlanError if no node
        has enough memory."""
        nodes = Node.all()
        config = settings.config
        n_gpus = 0 if config.n_gpu_layers == 0 else int(sum(node.gpus for node in nodes))
        options = {name: value for name, value in settings.engine.items() if name != "model"}
        planned = ask_plan(str(settings.model), {**options, "isolate": True}, gpus=min(1, n_gpus))
        smallest = min(node.cpus for node in nodes)
        share = max(1, int(smallest) // planned["instances"])
        threads = {name: min(planned[name], share) for name in ("n_threads", "n_threads_batch")}
        cpus = min(max(threads.values()) * planned["instances"], smallest if smallest < 1 else int(smallest))
        resources = {"num_cpus": cpus, "memory": planned["bytes"] + PYTHON_BYTES}
        _check_room("a shard", resources["memory"], nodes, planned)
        if n_gpus:
            resources["num_gpus"] = 1
        return cls(_open(config, {**threads, "n_slots": planned["n_slots"]}), resources)

    def __str__(self) -> str:
        n_gpus = int(self.resources.get("num_gpus", 0))
        gpus = f", {counted(n_gpus, 'GPU')}" if n_gpus else ""
        return f"{self.resources['num_cpus']:g} CPUs, {self.resources['memory'] / 2**20:,.0f} MiB{gpus}"


def _check_room(what: str, memory: float, nodes: Sequence[Node], planned: Mapping[str, int]) -> None:
    """Raises MemoryPlanError if no node has enough memory for `what`, an actor or a shard."""
    most = max(node.memory for node in nodes)
    if memory > most:
        raise MemoryPlanError(
            f"{what} takes {memory / 2**20:,.0f} MiB, and no node has more than {most / 2**20:,.0f} MiB for Ray; "
            f"give a smaller n_slots or n_ctx than {planned['n_slots']} and {planned['n_ctx']:,}, or start Ray with "
            "more memory"
        )


def _open(config: EngineConfig, chosen: Mapping[str, int]) -> dict[str, int]:
    """Returns the part of `chosen` that the configuration leaves open with "auto" or "fit"."""
    kept = {name: value for name, value in chosen.items() if getattr(config, name) in ("auto", "fit")}
    if "n_threads" not in kept:
        kept.pop("n_threads_batch", None)  # left to the engine, which derives it from the caller's n_threads
    return kept


def pool_size(given: object, name: str = "concurrency", of: str = "actors") -> tuple[int | None, int | None]:
    """Returns the minimum and maximum number of actors that an option allows; (None, None): the cluster decides. Raises
    ConfigError.

    Args:
        name, of: words for error messages: the option's name, and the word for actors.
    """
    if given is None:
        return None, None
    if isinstance(given, tuple):
        if len(given) != 2:
            raise ConfigError(f"{name} is {show(given)}; give a number of {of}, or (fewest, most)")
        fewest, most = given
        most = integer(ConfigError, f"the most {of} of {name}", most, 1, _MOST_ACTORS)
        return integer(ConfigError, f"the fewest {of} of {name}", fewest, 1, most), most
    number = integer(ConfigError, name, given, 1, _MOST_ACTORS)
    return number, number
