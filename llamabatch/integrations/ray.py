"""Ray: generate adds the columns of columns.Generate to a dataset of Ray Data, over actors with an engine each.

The resources of an actor follow from the plan of the model on one of the cluster's nodes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamabatch.columns import Generate
from llamabatch.columns.prompts import PromptFunction
from llamabatch.config import EngineConfig, with_paths
from llamabatch.entrypoints.input_processor import OneAdapters, OneParams
from llamabatch.errors import ConfigError, MemoryPlanError
from llamabatch.integrations import needs
from llamabatch.integrations.ray_cluster import PYTHON_BYTES, Node, ask_plan
from llamabatch.utils.checks import integer, show

with needs("ray", "ray"):
    import ray
    from ray.data import ActorPoolStrategy, Dataset

if TYPE_CHECKING:
    import pyarrow
    from typing_extensions import Unpack

    from llamabatch.config import EngineOptions

_MOST_ACTORS = 100_000
_MOST_ROWS = 1_000_000  # of a batch
_BATCHES_AT_ONCE = 2  # in an actor: one fills the slots that the other leaves at its end
_SLOTS_IN_A_BATCH = 8  # times n_slots are a batch


def generate(
    dataset: Dataset,
    model: str | os.PathLike[str],
    params: OneParams | None = None,
    *,
    prompt: str | PromptFunction,
    output: str | Mapping[str, str] | None = None,
    schema: object = None,
    id: str | None = None,
    system: str | None = None,
    chat: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    adapter_scales: OneAdapters = None,
    concurrency: int | tuple[int, int] | None = None,
    batch_size: int | None = None,
    ray_remote_args: Mapping[str, Any] | None = None,
    **options: Unpack[EngineOptions],
) -> Dataset:
    """The dataset with the columns that columns.Generate adds, computed by a pool of actors when it is consumed.

    ::

        dataset = ray.data.read_parquet("reviews.parquet")
        dataset = generate(dataset, "model.gguf", {"max_tokens": 8}, prompt="Classify: {{ review }}", id="id")
        dataset.write_parquet("labels")

    Each actor has an engine, which two batches use at once, so that slots are not empty where a batch ends. The plan
    of the model is made once, on a node of the cluster, and holds for all actors: its slots and context, its threads
    as num_cpus, its bytes as memory, and one GPU for each actor where the cluster has GPUs. One CPU of a node is left
    to tasks that read and write. Rows are in Ray's order. The seed of a row follows from its id, so that its draws
    depend neither on the actor nor on the batch. A row that fails has its "error".

    Args:
        dataset: of Ray Data.
        model: as of LLM; a path that each node of the cluster can read.
        params, prompt, output, schema, id, system, chat, chat_template_kwargs, adapter_scales: as of columns.Generate.
        concurrency: number of actors, or (fewest, most) of a pool that Ray sizes. None: one for each GPU of the
            cluster, or without GPUs one for each node.
        batch_size: rows of a batch, 1 to 1,000,000. None: eight times n_slots.
        ray_remote_args: arguments of an actor for Ray, in place of those of the plan: num_cpus, num_gpus, memory
            (bytes), resources, label_selector, runtime_env and others.
        **options: as of columns.Generate. n_slots, n_ctx and threads that are "auto" are those of the plan.

    Raises:
        ConfigError, SamplingError: an argument is wrong.
        ModelFileError: the model is no file of the node that makes the plan, or damaged.
        MemoryPlanError: it does not fit there, or an actor is larger than any node is for Ray.
        SetupError: no node with a CPU, or none makes the plan within 300 s.
    """
    if not isinstance(dataset, Dataset):
        raise ConfigError(f"dataset is {show(dataset)}; give a dataset of Ray Data")
    fewest, most = _pool(concurrency)
    if batch_size is not None:
        integer(ConfigError, "batch_size", batch_size, 1, _MOST_ROWS)
    given: dict[str, Any] = {"isolate": True, **options}
    asked: dict[str, Any] = {
        **{"prompt": prompt, "output": output, "schema": schema, "id": id, "system": system, "chat": chat},
        **{"chat_template_kwargs": chat_template_kwargs, "adapter_scales": adapter_scales},
    }
    Generate(model, params, **asked, **given)  # its errors come before any of the cluster
    if not ray.is_initialized():
        ray.init()
    paths = with_paths({**given, "model": model})
    actor = _Size.of(Node.all(), paths.pop("model"), paths, most)
    size = actor.n_actors if most is None else most
    pool = ActorPoolStrategy(
        min_size=size if fewest is None else fewest,
        max_size=size,
        max_concurrent_calls_per_actor=_BATCHES_AT_ONCE,
        max_tasks_in_flight_per_actor=2 * _BATCHES_AT_ONCE,
        enable_true_multi_threading=True,
    )
    # A block is a batch: the batches of one block run one after another, and in one actor. Strict, since else Ray
    # leaves small blocks as they are, and ray.data.from_items makes one of each row.
    n_rows = batch_size or _SLOTS_IN_A_BATCH * actor.n_slots
    blocks = dataset.repartition(target_num_rows_per_block=n_rows, strict=True)
    worker = Generate(model, params, **asked, **{**given, **actor.options})
    return blocks.map_batches(
        _Actor,
        fn_constructor_args=(worker,),
        compute=pool,
        batch_size=None,
        batch_format="pyarrow",
        udf_modifying_row_count=False,
        **{**actor.resources, **(ray_remote_args or {})},
    )


class _Actor:
    """The callable of an actor: one call a batch, from several threads at once."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        return self._generate(batch)

    def __del__(self) -> None:
        """Ray ends an actor so; it would kill the engine's process first, which would be started again."""
        self._generate.close()


@dataclass(frozen=True)
class _Size:
    """The size of a pool, and of its actors.

    Attributes:
        options: of an engine, as the plan has chosen them.
        resources: of an actor, for Ray.
    """

    n_actors: int
    n_slots: int
    options: Mapping[str, Any]
    resources: Mapping[str, float]

    @classmethod
    def of(cls, nodes: Sequence[Node], model: str, options: Mapping[str, Any], asked: int | None) -> _Size:
        """For `asked` actors, or else one for each GPU or node; the plan is made in a task.

        Raises:
            MemoryPlanError: Ray counts less memory on every node than an actor takes.
            SetupError, and what a plan raises: it cannot be made.
        """
        config = EngineConfig.from_options(model, options)
        n_gpus = 0 if config.n_gpu_layers == 0 else int(sum(node.gpus for node in nodes))
        planned = ask_plan(model, options, gpus=min(1, n_gpus))
        n_actors = asked or n_gpus or len(nodes)
        in_node = -(-n_actors // len(nodes))
        n_cpus = min(node.cpus for node in nodes)
        share = max(1, int(n_cpus) // in_node // planned["instances"])
        threads = {name: min(planned[name], share) for name in ("n_threads", "n_threads_batch")}
        left = (n_cpus - 1) / in_node  # Ray takes fractions below 1 only
        free = int(left) if left >= 1 else int(max(0.0, left) * 100) / 100
        memory = planned["bytes"] + PYTHON_BYTES
        most = max(node.memory for node in nodes)
        if memory > most:
            raise MemoryPlanError(
                f"an actor takes {memory / 2**20:,.0f} MiB, and no node has more than {most / 2**20:,.0f} MiB for Ray; "
                f"give a smaller n_slots or n_ctx than {planned['n_slots']} and {planned['n_ctx']:,}, or start Ray "
                "with more memory"
            )
        resources = {"num_cpus": min(max(threads.values()) * planned["instances"], free), "memory": memory}
        if n_gpus:
            resources["num_gpus"] = 1
        chosen = {name: planned[name] for name in ("n_slots", "n_ctx")} | threads
        kept = {name: value for name, value in chosen.items() if getattr(config, name) == "auto"}
        if "n_threads" not in kept:
            kept.pop("n_threads_batch", None)  # which follows n_threads
        return cls(n_actors, planned["n_slots"], kept, resources)


def _pool(concurrency: object) -> tuple[int | None, int | None]:
    """The fewest and the most actors; None: as the cluster is. Raises ConfigError."""
    if concurrency is None:
        return None, None
    if isinstance(concurrency, tuple):
        if len(concurrency) != 2:
            raise ConfigError(f"concurrency is {show(concurrency)}; give a number of actors, or (fewest, most)")
        fewest, most = concurrency
        most = integer(ConfigError, "the most actors of concurrency", most, 1, _MOST_ACTORS)
        return integer(ConfigError, "the fewest actors of concurrency", fewest, 1, most), most
    number = integer(ConfigError, "concurrency", concurrency, 1, _MOST_ACTORS)
    return number, number
