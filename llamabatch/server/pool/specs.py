"""The plan of each model of a pool, made from the headers of the model's files before any model is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llamabatch.config import EngineConfig
from llamabatch.engine.resolve_config import machine_here, plan, read_facts
from llamabatch.errors import MemoryPlanError
from llamabatch.gguf.resolve import resolve
from llamabatch.planning.plan import bytes_by_place
from llamabatch.server.options import ServerOptions
from llamabatch.server.pool.options import ModelSpec

# A plan chooses values for these options, depending on free memory. Later loads must use the same values, so spec_of
# fixes them.
_CHOSEN = ("n_ctx", "n_slots", "kv", "kv_cells", "cache_ram")


def spec_of(config: EngineConfig, options: ServerOptions, share: float, **more: Any) -> ModelSpec:
    """Returns the ModelSpec of a model. The plan uses `share` of the free memory, or all free memory if the share is
    too small. `more` contains further fields of the ModelSpec.

    Raises:
        ModelFileError: the header of a file is damaged.
        ConfigError, MemoryPlanError: as in capacity.resolve.
    """
    path = resolve(config.model)
    try:
        found = plan(config, path, computes_here=False, share=share)
    except MemoryPlanError:
        found = plan(config, path, computes_here=False)
    chosen: dict[str, Any] = {name: getattr(found.config, name) for name in _CHOSEN}
    if found.config.kv != "unified":
        del chosen["kv_cells"]
    fixed = {name: value for name, value in chosen.items() if getattr(config, name) in ("auto", "fit")}
    is_encoder = read_facts(config, path).is_encoder
    needs = bytes_by_place(found, len(machine_here(config, computes_here=False).gpus))
    return ModelSpec(replace(config, **fixed), options, found, needs, is_encoder, **more)


def free_bytes(config: EngineConfig) -> tuple[int, ...]:
    """Returns the free bytes of main memory, then of each GPU that `config` chooses."""
    machine = machine_here(config, computes_here=False)
    return (machine.available_bytes, *(gpu.free_bytes for gpu in machine.gpus))
