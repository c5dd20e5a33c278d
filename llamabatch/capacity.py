"""Memory arithmetic before a load, and the choices that follow from it. Knows no library: figures in, figures out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError, MemoryPlanError
from llamabatch.machine import Machine
from llamabatch.model_facts import MOST_CTX, ModelFacts
from llamabatch.policies import POLICIES
from llamabatch.profile import Profile

# Bytes an element, from ggml's block layouts (ggml-common.h): bytes of a block / elements in it.
_TYPE_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32, "q4_1": 20 / 32, "iq4_nl": 18 / 32,
    "q5_0": 22 / 32, "q5_1": 24 / 32,
}  # fmt: skip
_CELL_PADDING = 256  # llama.cpp rounds the cells of a slot up to this
_MOST_SLOTS = 32
_UBATCH = 512  # llama.cpp's own default
_FEW_SLOTS = 4  # with fewer slots of n_ctx each, sharing the cells serves more requests at once
_MOST_ENGINES = 4  # in one process: each holds Python's lock for about a tenth of its time
_MEMORY_SHARE = 0.5  # of what is free: the rest is for the user's own work
_MIB = 2**20
_SMALL_MODEL = 64 * _MIB


@dataclass(frozen=True)
class Memory:
    """Bytes of one engine; `layout` says of what the KV cache consists, `draft` is all that a draft model takes."""

    weights: int
    kv_cache: int
    compute: int
    layout: str = ""
    draft: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.compute + self.draft

    def describe(self) -> str:
        """The sum, for messages."""
        return (
            f"{_mib(self.weights)} weights + {_mib(self.kv_cache)} KV cache ({self.layout}) + "
            f"{_mib(self.compute)} buffers{f' + {_mib(self.draft)} draft model' if self.draft else ''} = "
            f"{_mib(self.total)}"
        )


@dataclass(frozen=True)
class Plan:
    """An EngineConfig without "auto", the memory that it takes, and why each open option got its value."""

    config: EngineConfig
    memory: Memory
    reasons: Mapping[str, str]

    def part(self) -> EngineConfig:
        """The options of one of several engines in one process: the slots are dealt out. Otherwise the config."""
        config = self.config
        n = config.number("instances")
        if n == 1 or config.strategy == "multi-instance":
            return config
        return replace(config, instances=1, n_slots=-(-config.number("n_slots") // n))

    def describe(self) -> str:
        """What was chosen, one option a line."""
        lines = [f"{name} = {getattr(self.config, name)}: {why}" for name, why in self.reasons.items()]
        return "\n".join([*lines, f"memory of one engine: {self.memory.describe()}"])


def memory(facts: ModelFacts, config: EngineConfig, n_ctx: int, n_slots: int) -> Memory:
    """What one engine takes: weights, KV cells rounded to 256 (a slot, or in all if kv is "unified"), recurrent states
    (a slot, f32), logits and attention scores of one pass."""
    unified = config.kv == "unified"
    cells = _padded(config.number("kv_cells") if unified else n_ctx)  # what one pass can attend to
    per_cell = facts.k_values * _TYPE_BYTES[config.type_k] + facts.v_values * _TYPE_BYTES[config.type_v]
    logits = config.output_rows(n_slots, facts.n_vocab) * facts.n_vocab * 4
    n_ubatch = _ubatch(config)
    activations = n_ubatch * facts.n_embd * 4 * 16
    draft = 0
    if facts.draft is not None:
        draft = memory(facts.draft, config.for_draft_model(), min(n_ctx, facts.draft.n_ctx_train), n_slots).total
    scores = 0 if config.flash_attn == "on" else n_ubatch * cells * facts.n_head * 4
    layout = f"{cells:,} cells shared by {n_slots}" if unified else f"{n_slots} x {cells:,} cells"
    if facts.state_values:
        layout = f"{layout} and states" if per_cell else f"{n_slots} states"
    return Memory(
        facts.file_bytes,
        int((1 if unified else n_slots) * cells * per_cell) + n_slots * facts.state_values * 4,
        logits + activations + scores + 16 * _MIB,
        layout,
        draft,
    )


def _padded(n_cells: int) -> int:
    return -(-n_cells // _CELL_PADDING) * _CELL_PADDING


def resolve(config: EngineConfig, facts: ModelFacts, machine: Machine, profile: Profile | None = None) -> Plan:
    """Fills in what is "auto": from the profile where there is one, else by rule.

    Raises:
        ConfigError: n_ctx is above what the model was trained for.
        MemoryPlanError: it does not fit in the memory that is free; the message shows the sum.
    """
    reasons: dict[str, str] = {}
    on_gpu = machine.n_gpus > 0 and config.n_gpu_layers != 0
    small = facts.file_bytes < _SMALL_MODEL
    config = replace(config, instances=_instances(config, machine, small and not on_gpu, reasons))
    n_instances = config.number("instances")
    if profile is not None:
        config, measured = profile.fill(config)
        reasons |= measured
    config = replace(config, n_ubatch=_ubatch(config))
    if config.prefill_budget == "auto":
        config = replace(config, prefill_budget=config.n_ubatch)
    n_ctx = facts.n_ctx_train if config.n_ctx == "auto" else config.n_ctx
    if config.n_ctx == "auto":
        n_ctx = max(32, min(facts.n_ctx_train, MOST_CTX))
        reasons["n_ctx"] = f"the smaller of {facts.n_ctx_train} (trained) and {MOST_CTX}"
    elif n_ctx > facts.n_ctx_train:
        raise ConfigError(f"n_ctx is {n_ctx}; {facts.name} was trained for 32 to {facts.n_ctx_train}")
    config = replace(config, n_ctx=n_ctx, flash_attn=_flash_attn(config, on_gpu, small, machine, reasons))
    config = _kv_cache(facts, config, machine, reasons, profile if n_instances == 1 else None)
    config = replace(config, strategy=_strategy(config, reasons))
    config = _threads(config, machine.cores // n_instances, small, reasons)
    need = memory(facts, config, n_ctx, config.number("n_slots"))
    if not on_gpu and need.total * n_instances > machine.available_bytes:
        times = f"{n_instances} engines of " if n_instances > 1 else ""
        raise MemoryPlanError(
            f"{times}{need.describe()} need {_mib(need.total * n_instances)}, but {_mib(machine.available_bytes)} "
            "are free; lower n_ctx, n_slots, kv_cells or instances"
        )
    return Plan(config, need, reasons)


def _ubatch(config: EngineConfig) -> int:
    return min(_UBATCH, config.n_batch) if config.n_ubatch == "auto" else config.n_ubatch


def _threads(config: EngineConfig, cores: int, small: bool, reasons: dict[str, str]) -> EngineConfig:
    """A row of a small model takes half a millisecond: between two such steps a second thread falls asleep, and waking
    it takes longer than it helps (measured on the bundled model: 22 ms for a request of 32 tokens, 67 ms with two)."""
    cores = max(1, cores)
    if config.n_threads_batch == "auto":
        given = config.n_threads if config.n_threads != "auto" else cores
        config = replace(config, n_threads_batch=given)
        reasons["n_threads_batch"] = "as n_threads" if given is config.n_threads else f"{cores} cores for each engine"
    if config.n_threads == "auto":
        config = replace(config, n_threads=1 if small else cores)
        reasons["n_threads"] = "one row of a small model" if small else f"{cores} cores for each engine"
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
    measured = max((stair.rows for stair in profile.stairs), default=_MOST_SLOTS) if profile else _MOST_SLOTS
    most = min(measured, config.n_batch)
    budget = int(machine.available_bytes * _MEMORY_SHARE / instances)
    share = f"{_mib(budget)}{f' for each of {instances} engines' if instances > 1 else ''} (half of what is free)"
    split = replace(config, kv="split", kv_cells="auto")
    fitting = max((n for n in range(1, most + 1) if memory(facts, split, n_ctx, n).total <= budget), default=0)
    if _wants_unified(facts, config, fitting, machine, reasons):
        n_slots = most if config.n_slots == "auto" else config.n_slots
        config = replace(config, kv="unified", n_slots=n_slots)
        if config.kv_cells == "auto":
            config = replace(config, kv_cells=_cells_that_fit(facts, config, budget))
            reasons["kv_cells"] = f"what fits in {share}, at least n_ctx, at most n_slots x n_ctx"
        elif config.kv_cells < n_ctx:
            raise ConfigError(f"kv_cells is {config.kv_cells}; it must be at least n_ctx, {n_ctx}")
        return config
    if config.n_slots == "auto":
        best = profile.best_rows(lambda rows: rows <= fitting) if profile else None
        split = replace(split, n_slots=best or max(1, fitting))
        reasons["n_slots"] = f"what fits in {share}, at most {most}"
        if profile and best:
            reasons["n_slots"] = f"{profile.source}: the most tokens/s of what fits in {share}"
    return split


def _wants_unified(
    facts: ModelFacts, config: EngineConfig, fitting: int, machine: Machine, reasons: dict[str, str]
) -> bool:
    if config.kv != "auto" or config.kv_cells != "auto":
        return config.kv != "split"
    if config.strategy in POLICIES and POLICIES[config.strategy].one_slot:
        return False
    if config.n_slots == "auto":
        if 0 < fitting < _FEW_SLOTS:
            reasons["kv"] = f"only {fitting} slots of {config.n_ctx} tokens would fit"
        return 0 < fitting < _FEW_SLOTS
    split = memory(facts, replace(config, kv="split"), config.number("n_ctx"), config.n_slots)
    too_large = split.total * config.number("instances") > machine.available_bytes
    if too_large and config.n_slots > 1:
        reasons["kv"] = f"{config.n_slots} slots of {config.n_ctx} tokens each would not fit"
    return too_large and config.n_slots > 1


def _cells_that_fit(facts: ModelFacts, config: EngineConfig, budget: int) -> int:
    n_ctx, n_slots = config.number("n_ctx"), config.number("n_slots")
    least, most = _padded(n_ctx) // _CELL_PADDING, _padded(n_ctx) * n_slots // _CELL_PADDING

    def total(pages: int) -> int:
        return memory(facts, replace(config, kv_cells=pages * _CELL_PADDING), n_ctx, n_slots).total

    return (least + max(0, bisect_right(range(least, most + 1), budget, key=total) - 1)) * _CELL_PADDING


def _strategy(config: EngineConfig, reasons: dict[str, str]) -> str:
    """The decision tree behind "auto". With one request in flight the batched policy computes what the sequential one
    does, step for step, so that it costs nothing where requests come singly."""
    if config.strategy != "auto":
        return config.strategy
    if config.n_slots == 1:
        reasons["strategy"] = "there is room for one slot only"
        return "sequential"
    reasons["strategy"] = (
        "one pass over the weights serves all slots, and a single request runs as it would sequentially"
    )
    return "batched"


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:,.0f} MiB"
