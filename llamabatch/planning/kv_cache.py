"""Computes the slots and cells of a plan, as many as fit in the memory, and the sizes of cache_ram and n_draft."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from llamabatch.config import EngineConfig, ResolvedConfig
from llamabatch.errors import ConfigError
from llamabatch.gguf.pooling import RANK
from llamabatch.gguf.windows import UNCOPIED
from llamabatch.planning.machine import Machine
from llamabatch.planning.memory import MIB, memory, mib
from llamabatch.planning.model_facts import ModelFacts
from llamabatch.planning.passes import CELL_PADDING, padded
from llamabatch.planning.plan import MEMORY_SHARE, fits, planned
from llamabatch.planning.profile import Profile
from llamabatch.scheduler.policies import has_one_slot
from llamabatch.utils.checks import counted

MOST_SLOTS = 32
MOST_SLOTS_ON_GPU = 128  # applies if the cells are in GPUs' own memory; there a row costs 1/250 of a pass
_FEW_SLOTS = 4  # if fewer slots than this fit, a unified cache is used, because it serves more requests at once
# Zeroing this many bytes takes at most 0.1 s. Zeroing 1.5 GiB takes 0.6 s, or 0.4 s in new pages.
_CHEAP_CELLS = 256 * MIB
_MOST_CACHE_RAM = 8192  # MiB for each engine: the default of llama-server's --cache-ram
_CACHE_RAM_PART = 4  # cache_ram is at most a quarter of the remaining memory
_CACHED_SLOTS = 64  # cache_ram has room for at most this many full slots, so that a small model needs little memory
_SLOTS_OF_SNAPSHOTS = 8  # number of slots assumed by n_draft_of if n_slots is "auto"
_SNAPSHOTS_SHARE = 0.125  # states and snapshots of all slots may take this share of the free memory


def slots_and_cells(
    facts: ModelFacts,
    requested: EngineConfig,
    one_slot: ResolvedConfig,
    machine: Machine,
    reasons: dict[str, str],
    profile: Profile | None,
) -> ResolvedConfig:
    """Returns the config `one_slot` with the chosen values of kv, n_slots and kv_cells.

    A split cache is faster, because the attention of a sequence reads only the cells of this sequence. In a unified
    cache any sequence may use any cell. "auto" chooses a unified cache if too few slots of a split cache fit in the
    memory.
    """
    n_ctx, instances = one_slot.n_ctx, one_slot.instances
    most = MOST_SLOTS_ON_GPU if is_on_gpus(facts, one_slot, machine) else MOST_SLOTS
    most = min(profile.most_rows if profile and profile.stairs else most, requested.n_batch)
    budget = int(machine.available_bytes * MEMORY_SHARE)
    share = f"{mib(budget)} (half of what is free{f', for {instances} engines' if instances > 1 else ''})"
    if one_slot.n_gpu_layers != 0 and machine.gpus and not machine.unified_memory:
        share += f" and half of the {' and '.join(mib(gpu.free_bytes) for gpu in machine.gpus)} of GPUs"
    fitting = _most_slots(facts, one_slot, machine, most)
    if _wants_unified(facts, requested, one_slot, fitting, most, machine, reasons):
        n_slots = most if requested.n_slots == "auto" else requested.n_slots
        if requested.kv_cells == "auto":
            reasons["kv_cells"] = f"what fits in {share}, at least n_ctx, at most n_slots x n_ctx"
            return _largest_unified(facts, replace(one_slot, n_slots=n_slots), machine)
        if requested.kv_cells < n_ctx:
            raise ConfigError(f"kv_cells is {requested.kv_cells}; it must be at least n_ctx, {n_ctx}")
        return replace(one_slot, kv="unified", n_slots=n_slots, kv_cells=requested.kv_cells)
    if requested.n_slots != "auto":
        return replace(one_slot, n_slots=requested.n_slots)
    best = profile.best_rows(lambda rows: rows <= fitting) if profile else None
    reasons["n_slots"] = f"what fits in {share}, at most {most}"
    if profile and best:
        reasons["n_slots"] = f"{profile.why_rows}, of what fits in {share}"
    return replace(one_slot, n_slots=best or max(1, fitting))


def _wants_unified(
    facts: ModelFacts,
    requested: EngineConfig,
    one_slot: ResolvedConfig,
    fitting: int,
    most: int,
    machine: Machine,
    reasons: dict[str, str],
) -> bool:
    if requested.kv != "auto" or requested.kv_cells != "auto":
        return requested.kv != "split"
    if has_one_slot(requested.strategy):
        return False
    if requested.n_slots == "auto":
        few = 0 < fitting < min(_FEW_SLOTS, most)
        if few:
            reasons["kv"] = f"only {counted(fitting, 'slot')} of {one_slot.n_ctx} tokens would fit"
        return few
    too_large = not fits(facts, replace(one_slot, n_slots=requested.n_slots), machine)
    if too_large and requested.n_slots > 1:
        reasons["kv"] = f"{requested.n_slots} slots of {one_slot.n_ctx} tokens each would not fit"
    return too_large and requested.n_slots > 1


def _largest_unified(facts: ModelFacts, config: ResolvedConfig, machine: Machine) -> ResolvedConfig:
    """Returns `config` with as many shared cells as fit in half of the free memory. There are at least n_ctx cells, and
    at most n_slots x n_ctx."""
    least, most = padded(config.n_ctx) // CELL_PADDING, padded(config.n_ctx) * config.n_slots // CELL_PADDING

    def shared(pages: int) -> ResolvedConfig:
        return replace(config, kv="unified", kv_cells=pages * CELL_PADDING)

    def too_large(pages: int) -> bool:
        return not fits_in_share(facts, shared(pages), machine)

    return shared(least + max(0, bisect_right(range(least, most + 1), 0, key=too_large) - 1))


def _most_slots(facts: ModelFacts, config: ResolvedConfig, machine: Machine, most: int) -> int:
    """Returns the number of slots that fit in half of the free memory, 0 to `most`."""
    return bisect_right(
        range(1, most + 1), 0, key=lambda n: not fits_in_share(facts, replace(config, n_slots=n), machine)
    )


def fits_in_share(facts: ModelFacts, config: ResolvedConfig, machine: Machine) -> bool:
    """Returns True if a config without its `cache_ram` fits in half of the free memory."""
    return fits(facts, replace(config, cache_ram=0), machine, MEMORY_SHARE)


def is_on_gpus(facts: ModelFacts, config: ResolvedConfig, machine: Machine) -> bool:
    """Returns True if all layers, the cells and the output are on GPUs with memory of their own."""
    layers = config.n_gpu_layers
    whole = (layers < 0 or layers > facts.n_layer) and config.offload_kqv
    return whole and not facts.placed and bool(machine.gpus) and not machine.unified_memory


def start_slots_of(
    facts: ModelFacts, requested: EngineConfig, config: ResolvedConfig, machine: Machine, reasons: dict[str, str]
) -> int:
    """Returns the number of slots of the first context.

    llama.cpp zeroes all cells of a new context. For many cells, this takes seconds and memory before the first token.
    Our build gets zeroed pages from the system when a cell is first used.

    The first context may have fewer slots than n_slots if its cells can be copied into a larger context. States, and
    cells of a sliding window, cannot be copied.
    """
    n_slots = config.n_slots
    if requested.start_slots != "auto":
        return min(requested.start_slots, n_slots)
    if requested.n_slots != "auto":
        reasons["start_slots"] = "n_slots is given"
        return n_slots
    if machine.lazy_cells or facts.draft is not None or facts.state_values or facts.has_window:
        reasons["start_slots"] = "all: " + (
            "cells take memory when they are used" if machine.lazy_cells else "growing would cost more"
        )
        return n_slots

    def is_dear(slots: int) -> bool:
        return planned(facts, replace(config, n_slots=slots), machine).memory.kv_cache > _CHEAP_CELLS

    start = max(1, bisect_right(range(1, n_slots + 1), 0, key=is_dear))
    reasons["start_slots"] = f"{mib(_CHEAP_CELLS)} of cells are zeroed at once, the others when more requests come"
    if start == n_slots:
        reasons["start_slots"] = "all: their cells are few"
    return start


def cache_ram_of(facts: ModelFacts, config: ResolvedConfig, machine: Machine, reasons: dict[str, str]) -> int:
    """Returns the MiB of main memory for prefixes that have lost their slots. With more chats than slots, a chat may
    lose its slot to another chat. Its next turn needs the prefix again.
    """
    can_copy = facts.arch not in UNCOPIED and not (facts.has_window and config.kv == "unified")
    if not can_copy or not config.cache_prefix or facts.is_encoder or config.pooling == RANK:
        return 0
    plan = planned(facts, config, machine)
    left = machine.available_bytes - plan.peak_bytes
    for limit, used in ((machine.address_space, plan.address_space), (machine.data_bytes, plan.data_bytes)):
        if limit is not None:
            left = min(left, limit - used)
    most = max(0, min(_MOST_CACHE_RAM, left // (_CACHE_RAM_PART * MIB)))
    most = most // config.instances if plan.in_children else most
    why = f"MiB for prefixes beyond the slots: a quarter of what is left, at most {_MOST_CACHE_RAM:,}"
    if not facts.has_state and not facts.has_window:
        one = memory(facts, replace(config, n_slots=1, start_slots=1, kv="split", kv_cells=0))
        most = min(most, _CACHED_SLOTS * one.kv_cache // MIB)
        why += f", and the cells of {_CACHED_SLOTS} full slots"
    reasons["cache_ram"] = why
    return most


def n_draft_of(
    config: EngineConfig, facts: ModelFacts, one_slot: ResolvedConfig, machine: Machine, reasons: dict[str, str]
) -> int:
    """Returns n_draft. It is lowered for a recurrent model, because each slot stores one more state for each guess."""
    states = 1 + facts.n_snapshots(one_slot)
    if states == 1:
        return config.n_draft
    n_slots = config.n_slots if config.n_slots != "auto" else _SLOTS_OF_SNAPSHOTS
    free = machine.available_bytes
    if is_on_gpus(facts, one_slot, machine):
        free = sum(gpu.free_bytes for gpu in machine.gpus)
    most = int(free * _SNAPSHOTS_SHARE / (n_slots * 4 * facts.state_values))
    each = mib(4 * facts.state_values)
    reasons["n_draft"] = f"the state of a sequence, {each}, is kept once more for each guess that may be wrong"
    return max(1, min(states - 1, most - 1))
