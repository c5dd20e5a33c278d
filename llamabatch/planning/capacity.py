"""Memory arithmetic before a load, and the choices that follow from it. Knows no library: figures in, figures out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError, MemoryPlanError
from llamabatch.planning.machine import Machine
from llamabatch.planning.memory import CELL_PADDING, MIB, Memory, memory, mib, padded, ubatch
from llamabatch.planning.model_facts import MOST_CTX, ModelFacts
from llamabatch.planning.profile import Profile
from llamabatch.scheduler.policies import POLICIES
from llamabatch.utils.checks import counted

__all__ = ["MEMORY_SHARE", "Memory", "Plan", "check_fits", "fits", "memory", "planned", "resolve"]

_MOST_SLOTS = 32
_FEW_SLOTS = 4  # with fewer slots of n_ctx each, sharing the cells serves more requests at once
_MOST_ENGINES = 4  # in one process: each holds Python's lock for about a tenth of its time
MEMORY_SHARE = 0.5  # of what is free: the rest is for the user's own work
_SMALL_MODEL = 64 * MIB
# Zeroed in a tenth of a second at most: 0.6 s for 1.5 GiB once its pages are there, 0.4 s where they are new.
_CHEAP_CELLS = 256 * MIB


@dataclass(frozen=True)
class Plan:
    """An EngineConfig without "auto", the memory that it takes, and why each open option got its value."""

    config: EngineConfig
    memory: Memory
    reasons: Mapping[str, str]

    @property
    def in_children(self) -> bool:
        """Do its engines run in processes of their own?"""
        return self.config.strategy == "multi-instance" or self.config.isolate

    @property
    def address_space(self) -> int:
        """Virtual memory of one process with engines in it."""
        engines = 1 if self.in_children else self.config.number("instances")
        return self.memory.address_space(engines, self.config.number("n_threads_batch"))

    @property
    def data_bytes(self) -> int:
        """Of one process, what no file backs: what RLIMIT_DATA limits."""
        engines = 1 if self.in_children else self.config.number("instances")
        return self.memory.data + (engines - 1) * self.memory.own

    @property
    def total_bytes(self) -> int:
        """Of all its engines, in the machine's own memory; what this process takes without them is not counted."""
        return self.memory.together(
            self.config.number("instances"), children=self.in_children, mapped=self.config.use_mmap
        )

    @property
    def peak_bytes(self) -> int:
        """As total_bytes, and while the model is loaded. The system takes back what is mapped then, so that no engine
        is refused for it."""
        engines = 1 if self.in_children else self.config.number("instances")
        return self.total_bytes + max(0, self.memory.loading - engines * self.memory.own)

    def part(self) -> EngineConfig:
        """The options of one of several engines in one process: the slots are dealt out. Otherwise the config."""
        config = self.config
        n = config.number("instances")
        if n == 1 or config.strategy == "multi-instance":
            return config
        start = config.start_slots if config.start_slots == "auto" else -(-config.start_slots // n)
        return replace(config, instances=1, n_slots=-(-config.number("n_slots") // n), start_slots=start)

    def describe(self) -> str:
        """What was chosen, one option a line."""
        lines = [f"{name} = {getattr(self.config, name)}: {why}" for name, why in self.reasons.items()]
        return "\n".join([*lines, f"memory of one engine: {self.memory.describe()}"])


def resolve(config: EngineConfig, facts: ModelFacts, machine: Machine, profile: Profile | None = None) -> Plan:
    """Fills in what is "auto": from the profile where there is one, else by rule.

    Raises:
        ConfigError: n_ctx is above what the model was trained for.
        MemoryPlanError: it does not fit in the memory that is free; the message shows the sum.
    """
    reasons: dict[str, str] = {}
    on_gpu = machine.n_gpus > 0 and config.n_gpu_layers != 0
    named = config.n_slots != "auto"
    facts = replace(facts, features=machine.features if config.extra_bufts != "off" else frozenset())
    small = facts.file_bytes < _SMALL_MODEL
    config = replace(config, instances=_instances(config, machine, small and not on_gpu, reasons))
    n_instances = config.number("instances")
    if profile is not None:
        config, measured = profile.fill(config)
        reasons |= measured
    config = replace(config, n_ubatch=ubatch(config))
    if config.prefill_budget == "auto":
        config = replace(config, prefill_budget=config.n_ubatch)
    n_ctx = facts.n_ctx_train if config.n_ctx == "auto" else config.n_ctx
    if config.n_ctx == "auto":
        n_ctx = max(32, min(facts.n_ctx_train, MOST_CTX))
        reasons["n_ctx"] = f"the smaller of {facts.n_ctx_train} (trained) and {MOST_CTX}"
    elif n_ctx > facts.n_ctx_train:
        raise ConfigError(f"n_ctx is {n_ctx}; {facts.name} was trained for 32 to {facts.n_ctx_train}")
    config = replace(config, n_ctx=n_ctx, flash_attn=_flash_attn(config, on_gpu, small, machine, reasons))
    config = _threads(config, machine.cores // n_instances, small, reasons)
    config = _kv_cache(facts, config, machine, reasons, profile if n_instances == 1 else None)
    config = replace(config, strategy=_strategy(config, reasons))
    config = replace(config, start_slots=_start_slots(facts, config, named, machine, reasons))
    plan = replace(planned(facts, config, machine), reasons=reasons)
    check_fits(plan, machine)
    return plan


def planned(facts: ModelFacts, config: EngineConfig, machine: Machine) -> Plan:
    """The memory of one of its engines. The config has numbers for n_ctx, n_slots, instances and n_threads_batch."""
    part = Plan(config, Memory(0, 0, 0), {}).part()
    n_slots = 1 if config.strategy in POLICIES and POLICIES[config.strategy].one_slot else part.number("n_slots")
    shares = machine.gpu_shares(config.tensor_split) if config.n_gpu_layers else ()
    return Plan(config, memory(facts, part, config.number("n_ctx"), n_slots, shares), {})


def check_fits(plan: Plan, machine: Machine, share: float = 1.0) -> None:
    """Refuses what does not fit in this share of what is free. Raises MemoryPlanError with the sum."""
    need, config = plan.memory, plan.config
    n = config.number("instances")
    sums = f"{f'{n} engines of ' if n > 1 else ''}{need.describe()}"
    cure = "lower n_ctx, n_slots, kv_cells or instances, or quantise the KV cache (type_k, type_v)"
    if plan.total_bytes - (need.reclaimable if share == 1 else 0) > machine.available_bytes * share:
        raise MemoryPlanError(
            f"{mib(plan.total_bytes)} are needed, but {mib(machine.available_bytes)} are free: {sums}; {cure}"
        )
    if machine.address_space is not None and plan.address_space > machine.address_space:
        raise MemoryPlanError(
            f"{mib(plan.address_space)} of address space are needed, but RLIMIT_AS leaves "
            f"{mib(machine.address_space)}: {sums}, and what the stacks and heaps of threads reserve; "
            f"raise the limit (ulimit -v), or {cure}"
        )
    if machine.data_bytes is not None and plan.data_bytes > machine.data_bytes:
        raise MemoryPlanError(
            f"{mib(plan.data_bytes)} that no file backs are needed, but RLIMIT_DATA leaves {mib(machine.data_bytes)}: "
            f"part of {sums}; raise the limit (ulimit -d), or {cure}"
        )
    for gpu, there in zip(need.gpus, machine.gpus, strict=False):
        if gpu.total > there.free_bytes * share:
            raise MemoryPlanError(
                f"on {there.name}: {mib(gpu.weights)} weights + {mib(gpu.kv_cache)} KV cache + {mib(gpu.compute)} "
                f"buffers = {mib(gpu.total)}, but {mib(there.free_bytes)} are free there; lower n_gpu_layers, n_ctx or "
                "n_slots"
            )


def fits(facts: ModelFacts, config: EngineConfig, machine: Machine, share: float = 1.0) -> bool:
    """As check_fits. The config has numbers for n_ctx, n_slots, instances and n_threads_batch."""
    try:
        check_fits(planned(facts, config, machine), machine, share)
    except MemoryPlanError:
        return False
    return True


def _threads(config: EngineConfig, cores: int, small: bool, reasons: dict[str, str]) -> EngineConfig:
    """A row of a small model takes half a millisecond: between two such steps a second thread falls asleep, and waking
    it takes longer than it helps (measured on the bundled model: 22 ms for a request of 32 tokens, 67 ms with two)."""
    cores = max(1, cores)
    if config.n_threads_batch == "auto":
        given = config.n_threads if config.n_threads != "auto" else cores
        config = replace(config, n_threads_batch=given)
        reasons["n_threads_batch"] = (
            "as n_threads" if given is config.n_threads else f"{counted(cores, 'core')} for each engine"
        )
    if config.n_threads == "auto":
        config = replace(config, n_threads=1 if small else cores)
        reasons["n_threads"] = "one row of a small model" if small else f"{counted(cores, 'core')} for each engine"
    return config


def _flash_attn(config: EngineConfig, on_gpu: bool, small: bool, machine: Machine, reasons: dict[str, str]) -> str:
    """llama.cpp turns flash attention on. On CPUs its own kernel reads each key once for every query head, which costs
    more than it saves unless the keys are few: measured on a 0.5B shape (off is 1.1 to 2 times as fast) and the bundled
    model (prompts 1.6 to 2 times as fast with it, decoding alike). Our kernel reads each key once."""
    if config.flash_attn != "auto":
        return config.flash_attn
    if config.type_v not in ("f32", "f16", "bf16"):
        reasons["flash_attn"] = "a quantised V cache needs it"
        return "on"
    if on_gpu:
        return "auto"
    if machine.fast_attention:
        reasons["flash_attn"] = "this build's kernel for CPUs reads each key once"
        return "on"
    if small:
        reasons["flash_attn"] = "in a small model prompts are up to twice as fast with it"
        return "on"
    reasons["flash_attn"] = "on CPUs llama.cpp's own kernel makes batched decode up to twice as slow"
    return "off"


def _instances(config: EngineConfig, machine: Machine, small_on_cpu: bool, reasons: dict[str, str]) -> int:
    if config.instances != "auto":
        return config.instances
    if config.strategy != "multi-instance":
        return _engines_here(config, machine, reasons) if small_on_cpu and config.strategy == "auto" else 1
    if machine.n_gpus > 1 and config.n_gpu_layers != 0:
        reasons["instances"] = f"one for each of {machine.n_gpus} GPUs"
        return machine.n_gpus
    instances = max(2, machine.cores // 4)
    reasons["instances"] = f"{machine.cores} cores, 4 for each, at least 2 engines"
    return instances


def _engines_here(config: EngineConfig, machine: Machine, reasons: dict[str, str]) -> int:
    """A step of a small model is a hundred operations of microseconds, whose threads mostly wait for each other. On the
    bundled model and 2 cores, 2 engines make 1.3 times the tokens/s of one: benchmarks/results/strategies-tiny.json."""
    if config.n_threads != "auto" or config.n_threads_batch != "auto" or config.speculate == "draft":
        return 1
    slots = _MOST_SLOTS if config.n_slots == "auto" else config.n_slots
    engines = max(1, min(machine.cores, _MOST_ENGINES, slots // 2))
    if engines > 1:
        reasons["instances"] = "engines that share the weights: in a small model the threads of one wait for each other"
    return engines


def _kv_cache(
    facts: ModelFacts, config: EngineConfig, machine: Machine, reasons: dict[str, str], profile: Profile | None
) -> EngineConfig:
    """Fills in kv, n_slots and kv_cells.

    Split is the faster one (a sequence's attention reads its own cells only); unified is for what does not fit so: the
    cells then go to whoever needs them.
    """
    n_ctx, instances = config.number("n_ctx"), config.number("instances")
    measured = profile.most_rows if profile and profile.stairs else _MOST_SLOTS
    most = min(measured, config.n_batch)
    budget = int(machine.available_bytes * MEMORY_SHARE)
    share = f"{mib(budget)} (half of what is free{f', for {instances} engines' if instances > 1 else ''})"
    split = replace(config, kv="split", kv_cells="auto")
    fitting = most_slots(facts, split, machine, most)
    if _wants_unified(facts, config, fitting, most, machine, reasons):
        n_slots = most if config.n_slots == "auto" else config.n_slots
        config = replace(config, kv="unified", n_slots=n_slots)
        if config.kv_cells == "auto":
            config = replace(config, kv_cells=_cells_that_fit(facts, config, machine))
            reasons["kv_cells"] = f"what fits in {share}, at least n_ctx, at most n_slots x n_ctx"
        elif config.kv_cells < n_ctx:
            raise ConfigError(f"kv_cells is {config.kv_cells}; it must be at least n_ctx, {n_ctx}")
        return config
    if config.n_slots == "auto":
        best = profile.best_rows(lambda rows: rows <= fitting) if profile else None
        split = replace(split, n_slots=best or max(1, fitting))
        reasons["n_slots"] = f"what fits in {share}, at most {most}"
        if profile and best:
            reasons["n_slots"] = f"{profile.why_rows}, of what fits in {share}"
    return split


def most_slots(facts: ModelFacts, config: EngineConfig, machine: Machine, most: int) -> int:
    """How many slots fit in half of what is free, 0 to `most`."""
    return bisect_right(
        range(1, most + 1), 0, key=lambda n: not fits(facts, replace(config, n_slots=n), machine, MEMORY_SHARE)
    )


def _start_slots(
    facts: ModelFacts, config: EngineConfig, named: bool, machine: Machine, reasons: dict[str, str]
) -> int:
    """How many slots the context starts with. llama.cpp zeroes all cells of a new context, so that many take seconds
    and memory before the first token; a build of ours leaves that to the system, which gives zeros when they are used.

    Only cells that can be copied to another context may begin with fewer: no states, no cells of a sliding window.
    """
    n_slots = config.number("n_slots")
    if config.start_slots != "auto":
        return min(config.start_slots, n_slots)
    if named:
        reasons["start_slots"] = "n_slots is given"
        return n_slots
    has_window = facts.widths is not None and facts.widths.masks > 1
    if machine.lazy_cells or facts.draft is not None or facts.state_values or has_window:
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


def _wants_unified(
    facts: ModelFacts, config: EngineConfig, fitting: int, most: int, machine: Machine, reasons: dict[str, str]
) -> bool:
    if config.kv != "auto" or config.kv_cells != "auto":
        return config.kv != "split"
    if config.strategy in POLICIES and POLICIES[config.strategy].one_slot:
        return False
    if config.n_slots == "auto":
        few = 0 < fitting < min(_FEW_SLOTS, most)  # more than `most` are not wanted
        if few:
            reasons["kv"] = f"only {counted(fitting, 'slot')} of {config.n_ctx} tokens would fit"
        return few
    too_large = not fits(facts, replace(config, kv="split"), machine)
    if too_large and config.n_slots > 1:
        reasons["kv"] = f"{config.n_slots} slots of {config.n_ctx} tokens each would not fit"
    return too_large and config.n_slots > 1


def _cells_that_fit(facts: ModelFacts, config: EngineConfig, machine: Machine) -> int:
    n_ctx, n_slots = config.number("n_ctx"), config.number("n_slots")
    least, most = padded(n_ctx) // CELL_PADDING, padded(n_ctx) * n_slots // CELL_PADDING

    def too_large(pages: int) -> bool:
        return not fits(facts, replace(config, kv_cells=pages * CELL_PADDING), machine, MEMORY_SHARE)

    return (least + max(0, bisect_right(range(least, most + 1), 0, key=too_large) - 1)) * CELL_PADDING


def _strategy(config: EngineConfig, reasons: dict[str, str]) -> str:
    """The decision tree behind "auto". With one request in flight the batched policy computes what the sequential one
    does, step for step, so that it costs nothing where requests come singly."""
    if config.strategy != "auto":
        return config.strategy
    if config.n_slots == 1:
        reasons["strategy"] = "there is one slot"
        return "sequential"
    reasons["strategy"] = (
        "one pass over the weights serves all slots, and a single request runs as it would sequentially"
    )
    return "batched"
