"""Ray: generate adds the columns of columns.Generate to a dataset of Ray Data, over actors with an engine each, and
serve_app serves a model with Ray Serve (ray_serve.py).

The resources of an actor follow from the plan of the model on one of the cluster's nodes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llamabatch.columns import Generate
from llamabatch.columns.prompts import PromptFunction
from llamabatch.config import with_paths
from llamabatch.entrypoints.input_processor import OneAdapters, OneParams
from llamabatch.errors import ConfigError
from llamabatch.integrations import needs
from llamabatch.integrations.ray_cluster import Node, Size, pool_size
from llamabatch.utils.checks import integer, show

with needs("ray", "ray"):
    import ray
    from ray.data import ActorPoolStrategy, Dataset

if TYPE_CHECKING:
    import pyarrow
    from typing_extensions import Unpack

    from llamabatch.config import EngineOptions
    from llamabatch.integrations.ray_serve import serve_app as serve_app

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
    image: str | Sequence[str] | None = None,
    audio: str | Sequence[str] | None = None,
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
        params, prompt, output, schema, id, image, audio, system, chat, chat_template_kwargs, adapter_scales: as of
            columns.Generate.
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
    fewest, most = pool_size(concurrency)
    if batch_size is not None:
        integer(ConfigError, "batch_size", batch_size, 1, _MOST_ROWS)
    given: dict[str, Any] = {"isolate": True, **options}
    form: dict[str, Any] = {
        **{"prompt": prompt, "output": output, "schema": schema, "id": id, "image": image, "audio": audio},
        **{"system": system, "chat": chat},
        **{"chat_template_kwargs": chat_template_kwargs, "adapter_scales": adapter_scales},
    }
    Generate(model, params, **form, **given)  # its errors come before any of the cluster
    if not ray.is_initialized():
        ray.init()
    paths = with_paths({**given, "model": model})
    actor = Size.of(Node.all(), paths.pop("model"), paths, most)
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
    worker = Generate(model, params, **form, **{**given, **actor.options})
    return blocks.map_batches(
        _Actor,
        fn_constructor_args=(worker,),
        compute=pool,
        batch_size=None,
        batch_format="pyarrow",
        udf_modifying_row_count=False,
        **{**actor.resources, **(ray_remote_args or {})},
    )


def __getattr__(name: str) -> Any:
    """serve_app, which imports the server when it is asked for."""
    if name == "serve_app":
        from llamabatch.integrations.ray_serve import serve_app

        return serve_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Actor:
    """The callable of an actor: one call a batch, from several threads at once."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        return self._generate(batch)

    def __del__(self) -> None:
        """Ray ends an actor so; it would kill the engine's process first, which would be started again."""
        self._generate.close()
