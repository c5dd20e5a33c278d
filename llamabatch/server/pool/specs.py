"""Plans each model of a pool from the headers of its files, before anything is loaded."""

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

# The options that a plan chooses by the free memory. A later load must choose the same values, so they are fixed.
_CHOSEN = ("n_ctx", "n_slots", "kv", "kv_cells", "cache_ram")


def spec_of(config: EngineConfig, options: ServerOptions, share: float, **more: Any) -> ModelSpec:
    """Returns the ModelSpec of a model, with `more` of its fields. The plan uses the model's share of the free memory,
    or all free memory if the share is too small.

    Raises:
        ModelFileError: the header of a file is damaged. ConfigError, MemoryPlanError: as in capacity.resolve.
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
