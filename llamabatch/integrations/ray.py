"""Ray: `generate` computes columns of a Ray Data dataset, and `serve_app` (in ray_serve.py) serves a model with Ray
Serve.

`generate` runs actors with one engine each. A node of the cluster makes the model's plan, which sets the resources of
an actor.
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

_MOST_ROWS = 1_000_000  # maximum number of rows in a batch
_BATCHES_AT_ONCE = 2  # batches in an actor at once: the second fills the slots that the first no longer needs
_SLOTS_IN_A_BATCH = 8  # default number of rows in a batch for each slot of the engine


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
    """Returns the dataset with the columns that columns.Generate adds. A pool of actors computes the columns when the
    dataset is consumed.

    ::

        dataset = ray.data.read_parquet("reviews.parquet")
        dataset = generate(dataset, "model.gguf", {"max_tokens": 8}, prompt="Classify: {{ review }}", id="id")
        dataset.write_parquet("labels")

    Each actor has one engine and runs two batches at once, so that the engine's slots stay full when one batch ends.
    One node of the cluster makes the plan of the model for all actors. The plan gives the slots and the context of each
    engine, and the num_cpus (number of threads) and memory of each actor. Each actor gets one GPU if the cluster has
    GPUs. On each node, one CPU stays free for tasks that read and write. The rows are in Ray's order. The seed of a row
    follows from the row's id, so the tokens depend neither on the actor nor on the batch. A failed row has the reason
    in the column "error".

    Args:
        dataset: a dataset of Ray Data.
        model: as for LLM; a path must be readable on each node of the cluster.
        params, prompt, output, schema, id, image, audio, system, chat, chat_template_kwargs, adapter_scales: as for
            columns.Generate.
        concurrency: the number of actors, or (minimum, maximum) for a pool that Ray scales. None: one actor for each
            GPU of the cluster, or for each node if there is no GPU.
        batch_size: the number of rows in a batch, 1 to 1,000,000. None: eight times n_slots.
        ray_remote_args: Ray's arguments of an actor, such as num_cpus, num_gpus, memory (bytes), resources,
            label_selector and runtime_env. They override the values of the plan.
        **options: as for columns.Generate. If n_slots, n_ctx or the threads are "auto", the plan sets them.

    Raises:
        ConfigError, SamplingError: an argument is invalid.
        ModelFileError: the node that makes the plan does not have the model's file, or the file is damaged.
        MemoryPlanError: the model does not fit on that node, or Ray has no node with enough memory for an actor.
        SetupError: no node has a CPU, or no node makes the plan within 300 s.
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
    Generate(model, params, **form, **given)  # checks the arguments before the cluster is used
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
    # Each block is one batch, because an actor runs the batches of one block one after another. Blocks may be small:
    # ray.data.from_items makes a block of each row. With strict=True, Ray merges small blocks.
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
    """Imports serve_app on first use, because this import also loads the server."""
    if name == "serve_app":
        from llamabatch.integrations.ray_serve import serve_app

        return serve_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Actor:
    """A callable that Ray runs in each actor: once for each batch, from several threads at once."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        return self._generate(batch)

    def __del__(self) -> None:
        """Closes the engine when Ray ends the actor. An open engine would restart a child process that Ray kills."""
        self._generate.close()
