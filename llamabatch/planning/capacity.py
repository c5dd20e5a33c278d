"""Chooses the values of "auto" from the memory that a model needs and a machine has. Pure Python, without I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

from llamabatch.chat.conversation import without_template
from llamabatch.chat.formats import reasoning_of
from llamabatch.chat.named_templates import IN_PYTHON
from llamabatch.chat.tool_formats import GENERIC, ToolFormat
from llamabatch.config import DEVICE_TOP, MAX_CTX, MAX_SLOTS, MIN_CTX, EngineConfig, ResolvedConfig
from llamabatch.errors import ConfigError, MemoryPlanError
from llamabatch.gguf.pooling import NO_DENSE_LAYER, POOLINGS, RANK
from llamabatch.gguf.windows import UNCOPIED
from llamabatch.planning.equal_bits import dependence
from llamabatch.planning.machine import Machine
from llamabatch.planning.memory import MIB, GpuNeed, Memory, memory, mib
from llamabatch.planning.model_facts import MOST_CTX, ModelFacts
from llamabatch.planning.passes import CELL_PADDING, padded
from llamabatch.planning.profile import Profile
from llamabatch.scheduler.policies import has_one_slot
from llamabatch.utils.checks import counted
from llamabatch.utils.paths import shown as shown_path

__all__ = ["MEMORY_SHARE", "Memory", "Plan", "check_fits", "fits", "memory", "planned", "resolve"]

_MOST_SLOTS = 32
_MOST_SLOTS_ON_GPU = 128  # a row costs 1/250 of a pass there; needs all cells in the GPUs' own memory
_FITTED_CTX = 32_768  # the most that n_ctx="fit" chooses: an agent's first request has 10,000 to 20,000 tokens
_FITTED_SHARE = 8  # n_ctx="fit" divides the usual most slots by this
_FEW_SLOTS = 4  # with fewer slots of n_ctx each, a unified cache serves more requests at once
_MOST_ENGINES = 4  # in one process: each holds the GIL for about a tenth of its time
MEMORY_SHARE = 0.5  # the share of the free memory that "auto" may use; the rest is left to other programs
_SMALL_MODEL = 64 * MIB
_FLOATS = ("f32", "f16", "bf16")
_CUDA = frozenset({"CUDA", "ROCm", "MUSA"})  # backends that are compiled from ggml's CUDA source
_NOT_ON_CUDA = ("iq4_nl",)
_CUDA_HEADS = frozenset({40, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512, 576})
_MOST_CACHE_RAM = 8192  # MiB for each engine: the default of llama-server's --cache-ram
_CACHE_RAM_PART = 4  # cache_ram takes one part in so many of the remaining memory
_CACHED_SLOTS = 64  # cache_ram keeps the cells of at most so many full slots, so that a small model needs little memory
_SLOTS_OF_SNAPSHOTS = 8  # the number of slots that _n_draft assumes where n_slots is open
_SNAPSHOTS_SHARE = 0.125  # the share of the free memory that the states and snapshots of all slots may take
_UBATCH = 512  # llama.cpp's own default
# These cells are zeroed within 0.1 s: 1.5 GiB take 0.6 s, or 0.4 s in new pages.
_CHEAP_CELLS = 256 * MIB


@dataclass(frozen=True)
class Plan:
    """The resolved options of an engine, the memory that it takes, and the reason for each choice.

    Attributes:
        reasoning: the family of models whose marks separate thinking from the answer in chats; "custom" with
            reasoning_tags; None: thinking is not separated.
        tools: the family of models whose notation of tool calls is parsed and forced; "generic": no known family.
        lacks_template: True where the model generates text, and its file has no chat template.
    """

    config: ResolvedConfig
    memory: Memory
    reasons: Mapping[str, str]
    reasoning: str | None = None
    tools: str = GENERIC.name
    lacks_template: bool = False

    def __repr__(self) -> str:
        config = self.config
        shown = {
            name: getattr(config, name) for name in ("strategy", "instances", "n_slots", "n_ctx", "kv", "n_threads")
        }
        options = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"Plan({shown_path(config.model)!r}, {options}, memory={mib(self.total_bytes)!r})"

    @property
    def in_children(self) -> bool:
        """True if the engines run in child processes."""
        return self.config.strategy == "multi-instance" or self.config.isolate

    @property
    def _engines_here(self) -> int:
        return 1 if self.in_children else self.config.instances

    @property
    def address_space(self) -> int:
        """The virtual memory of one process with engines, in bytes."""
        return self.memory.address_space(self._engines_here, self.config.n_threads_batch)

    @property
    def data_bytes(self) -> int:
        """The memory of one process without a file behind it, in bytes. RLIMIT_DATA limits this memory."""
        return self.memory.data + (self._engines_here - 1) * self.memory.own

    @property
    def total_bytes(self) -> int:
        """The main memory of all engines, without the rest of this process."""
        return self.memory.together(self.config.instances, children=self.in_children, mapped=self.config.use_mmap)

    @property
    def peak_bytes(self) -> int:
        """The most main memory that all engines take, also during the load. No engine is refused for memory of the
        load: it is mapped pages, which the system can take back."""
        return self.total_bytes + max(0, self.memory.loading - self._engines_here * self.memory.own)

    def describe(self) -> str:
        """Returns each choice with its reason, one per line, then the memory."""
        lines = [f"{name} = {getattr(self.config, name)}: {why}" for name, why in self.reasons.items()]
        if self.reasoning is not None:
            lines.append(f"reasoning = {self.reasoning}: {self._why_reasoning}")
        if self.tools != GENERIC.name:
            lines.append(f"tools = {self.tools}: by the model's chat template")
        if self.lacks_template:
            lines.append(f"chat_template = None: {without_template(IN_PYTHON)}")
        return "\n".join([*lines, f"memory of one engine: {self.memory.describe()}"])

    @property
    def _why_reasoning(self) -> str:
        return "reasoning_tags are given" if self.config.reasoning_tags else "by the model's chat template"


def resolve(config: EngineConfig, facts: ModelFacts, machine: Machine, profile: Profile | None = None) -> Plan:
    """Turns "auto" into values: from the profile where there is one, else by rule.

    Raises:
        ConfigError: n_ctx is above the context that the model was trained for, and above the reach of its scaled
            rotary embedding; pooling is "rank" without a classification head; tensor_split is given, but
            "multi-instance" has a GPU for each engine; flash attention on CUDA has no kernel for these options;
            device_sampling is "on" with a small vocabulary; kv_cells is below n_ctx; batch_invariant is True, but
            logits depend on the other rows of a pass.
        MemoryPlanError: the engines do not fit in the free memory; the message shows the sum.
    """
    config = config.requested()
    reasons: dict[str, str] = {}
    on_gpu = machine.n_gpus > 0 and config.n_gpu_layers != 0
    small = facts.file_bytes < _SMALL_MODEL
    n_instances = _instances(config, machine, small and not on_gpu, reasons)
    config = replace(config, instances=n_instances)
    if config.batch_invariant:
        config = _batch_invariant(config, machine, reasons)
    if profile is not None:
        config, measured = profile.fill(config)
        reasons |= measured
    facts = facts.on(machine, config.extra_bufts)
    n_ubatch = min(_UBATCH, config.n_batch) if config.n_ubatch == "auto" else config.n_ubatch
    n_ctx = _n_ctx(config, facts, reasons)
    flash_attn = _flash_attn(config, facts, on_gpu, small, machine, reasons)
    n_threads, n_threads_batch = _threads(config, machine.cores // n_instances, small, reasons)
    one_slot = ResolvedConfig(
        **{
            **vars(config),
            "strategy": "batched" if config.strategy == "auto" else config.strategy,
            "n_slots": 1,
            "start_slots": MAX_SLOTS if config.start_slots == "auto" else config.start_slots,
            "n_ctx": n_ctx,
            "n_ubatch": n_ubatch,
            "prefill_budget": n_ubatch if config.prefill_budget == "auto" else config.prefill_budget,
            "flash_attn": flash_attn,
            "device_sampling": _device_sampling(config, facts, machine, reasons),
            "n_threads": n_threads,
            "n_threads_batch": n_threads_batch,
            "kv": "split",
            "kv_cells": 0,
            "cache_ram": 0 if config.cache_ram == "auto" else config.cache_ram,
            "pooling": _pooling(config, facts, reasons),
        }
    )
    one_slot = replace(one_slot, n_draft=_n_draft(config, facts, one_slot, machine, reasons))
    if config.n_ctx == "fit":
        one_slot = replace(one_slot, n_ctx=_fitted(config, facts, one_slot, machine, reasons))
    found = _kv_cache(facts, config, one_slot, machine, reasons, profile if n_instances == 1 else None)
    found = replace(found, strategy=_strategy(config, found.n_slots, reasons))
    found = replace(found, start_slots=_start_slots(facts, config, found, machine, reasons))
    if config.cache_ram == "auto":
        found = replace(found, cache_ram=_cache_ram(facts, found, machine, reasons))
    tags = reasoning_of(facts.chat_template, config.reasoning_tags, config.reasoning_format)
    family = None if tags is None else tags.family
    tools = ToolFormat.of(facts.chat_template).name
    _placement(config, facts, planned(facts, found, machine).memory, machine, reasons)
    reasons["batch_invariant"] = _equal_bits(facts, found, machine)
    plan = replace(
        planned(facts, found, machine),
        reasons=reasons,
        reasoning=family,
        tools=tools,
        lacks_template=facts.chat_template is None and not facts.is_encoder and not facts.names_pooling,
    )
    check_fits(plan, machine)
    return plan


def planned(facts: ModelFacts, config: ResolvedConfig, machine: Machine) -> Plan:
    """Returns the plan of these options on this machine, without reasons. Does not check that the plan fits."""
    one = config.for_one_engine()
    if has_one_slot(config.strategy):
        one = replace(one, n_slots=1)
    shares = machine.gpu_shares(config.tensor_split) if config.n_gpu_layers else ()
    if _has_gpu_each(config, len(shares)):
        shares = (1.0,)
    return Plan(config, memory(facts, one, shares), {})


def _has_gpu_each(config: ResolvedConfig, n_gpus: int) -> bool:
    """Returns True if each engine lies as a whole on one of several GPUs."""
    return config.strategy == "multi-instance" and n_gpus > 1 and config.n_gpu_layers != 0


def check_fits(plan: Plan, machine: Machine, share: float = 1.0) -> None:
    """Raises MemoryPlanError, whose message shows the sum, if a plan needs more than this share of the free memory."""
    need, n = plan.memory, plan.config.instances
    sums = f"{f'{n} engines of ' if n > 1 else ''}{need.describe()}"
    guesses = "" if plan.config.speculate == "off" else "n_draft, "
    cure = f"lower n_ctx, n_slots, {guesses}kv_cells or instances, or quantise the KV cache (type_k, type_v)"
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
            f"{mib(plan.data_bytes)} of memory beside files are needed; RLIMIT_DATA leaves {mib(machine.data_bytes)}: "
            f"part of {sums}; raise the limit (ulimit -d), or {cure}"
        )
    if machine.lockable_bytes is not None and need.locked > machine.lockable_bytes:
        raise MemoryPlanError(
            f"use_mlock is True and {mib(need.locked)} of weights are to be locked, but RLIMIT_MEMLOCK leaves "
            f"{mib(machine.lockable_bytes)}; raise the limit (ulimit -l), or leave use_mlock out"
        )
    for (gpu, engines), there in zip(_on_gpus(plan, len(machine.gpus)), machine.gpus, strict=False):
        total = engines * gpu.total if plan.in_children else gpu.weights + engines * (gpu.kv_cache + gpu.compute)
        if total > there.free_bytes * share:
            each = f"{engines} engines of " if engines > 1 else ""
            raise MemoryPlanError(
                f"on {there.name}: {each}{mib(gpu.weights)} weights + {mib(gpu.kv_cache)} KV cache + "
                f"{mib(gpu.compute)} buffers = {mib(total)}, but {mib(there.free_bytes)} are free there; lower "
                f"n_gpu_layers, n_ctx{', n_slots or instances' if engines > 1 else ' or n_slots'}"
            )


def bytes_by_place(plan: Plan, n_gpus: int) -> tuple[int, ...]:
    """Returns the bytes of all engines of a plan: in main memory, then on each of the machine's GPUs."""
    on_gpus = [n * gpu.total for gpu, n in _on_gpus(plan, n_gpus)]
    return (plan.total_bytes, *(on_gpus + [0] * n_gpus)[:n_gpus])


def _on_gpus(plan: Plan, n_gpus: int) -> list[tuple[GpuNeed, int]]:
    """Returns for each GPU the need of one engine there, and the number of engines there."""
    need, n = plan.memory.gpus, plan.config.instances
    if need and _has_gpu_each(plan.config, n_gpus):
        return [(need[0], -(-(n - number) // n_gpus)) for number in range(n_gpus)]
    return [(gpu, n) for gpu in need]


def fits(facts: ModelFacts, config: ResolvedConfig, machine: Machine, share: float = 1.0) -> bool:
    """Returns True if check_fits accepts these options."""
    try:
        check_fits(planned(facts, config, machine), machine, share)
    except MemoryPlanError:
        return False
    return True


def _n_ctx(config: EngineConfig, facts: ModelFacts, reasons: dict[str, str]) -> int:
    is_open = not isinstance(config.n_ctx, int)
    if is_open and any(key == f"{facts.arch}.context_length" for key, _ in config.kv_overrides):
        reasons["n_ctx"] = "kv_overrides names it"
        return max(MIN_CTX, facts.n_ctx_most)
    if not isinstance(config.n_ctx, int):
        n_ctx, source = _usual_ctx(config, facts)
        reasons["n_ctx"] = f"the smaller of {n_ctx} ({source}) and {MOST_CTX}"
        return max(MIN_CTX, min(n_ctx, MOST_CTX))
    if config.n_ctx > facts.n_ctx_most:
        scaled = f", and its scaled rotary embedding reaches {facts.n_ctx_scaled}" if facts.n_ctx_scaled else ""
        most = f"{facts.n_ctx_train}, as many as it was trained for{scaled}"
        refusal = f"n_ctx is {config.n_ctx}; {facts.name} takes 32 to {most}"
        if facts.has_positions:
            raise ConfigError(f"{refusal}; its table of positions has no more")
        scale = f"{(facts.n_ctx_orig or facts.n_ctx_train) / config.n_ctx:.4g}"
        raise ConfigError(
            f"{refusal}; rope_scaling='yarn' with rope_freq_scale={scale} reaches further, less precisely"
        )
    return config.n_ctx


def _usual_ctx(config: EngineConfig, facts: ModelFacts) -> tuple[int, str]:
    """Returns the upper bound of an n_ctx that is not given, and its source: "trained" or "scaled"."""
    is_scaled = config.rope_freq_scale is not None and facts.n_ctx_most > facts.n_ctx_train
    # rope_freq_base allows any n_ctx, so it gives no default.
    n_ctx = facts.n_ctx_most if is_scaled and config.rope_freq_base is None else facts.n_ctx_train
    return n_ctx, "scaled" if n_ctx > facts.n_ctx_train else "trained"


def _fitted(
    config: EngineConfig, facts: ModelFacts, one_slot: ResolvedConfig, machine: Machine, reasons: dict[str, str]
) -> int:
    """Returns the value of n_ctx="fit": doubles 4096 while enough slots fit, or n_slots where given. The result is at
    most _FITTED_CTX and the context that the model was trained for. A model that pools texts gets at most 4096, since
    one pass holds a whole text."""
    trained, source = _usual_ctx(config, facts)
    most = min(trained, _FITTED_CTX, config.kv_cells if isinstance(config.kv_cells, int) else _FITTED_CTX)
    n_ctx = one_slot.n_ctx
    if facts.is_encoder or facts.names_pooling or n_ctx >= most:
        return n_ctx
    on_gpu = _is_on_gpus(facts, one_slot, machine)
    slots = (_MOST_SLOTS_ON_GPU if on_gpu else _MOST_SLOTS) // _FITTED_SHARE
    if config.n_slots != "auto":
        slots = config.n_slots
    elif has_one_slot(config.strategy):
        slots = 1

    def of_tokens(n: int) -> ResolvedConfig:
        if config.kv == "unified" or config.kv_cells != "auto":
            cells = n if config.kv_cells == "auto" else config.kv_cells
            return replace(one_slot, n_slots=slots, n_ctx=n, kv="unified", kv_cells=cells)
        return replace(one_slot, n_slots=slots, n_ctx=n)

    while n_ctx < most and _fits_in_share(facts, of_tokens(min(2 * n_ctx, most)), machine):
        n_ctx = min(2 * n_ctx, most)
    reasons["n_ctx"] = f"the smaller of {trained} ({source}) and {_FITTED_CTX}"
    if n_ctx < most:
        reasons["n_ctx"] = f"{counted(slots, 'slot')} of {2 * n_ctx} tokens would not fit"
    return n_ctx


def scaled_ctx(config: EngineConfig, facts: ModelFacts) -> int:
    """Returns the number of tokens that the options for the rotary embedding allow; 0 without such options.

    rope_freq_scale=1/4 puts 4 positions into the space of 1. rope_freq_base has no bound, so it gives MAX_CTX.
    """
    if facts.has_positions:
        return 0
    if config.rope_freq_base is not None:
        return MAX_CTX
    if config.rope_freq_scale is None:
        return 0
    return min(
        MAX_CTX, int((config.yarn_orig_ctx or facts.n_ctx_orig or facts.n_ctx_train) / config.rope_freq_scale + 0.5)
    )


def _placement(
    config: EngineConfig, facts: ModelFacts, need: Memory, machine: Machine, reasons: dict[str, str]
) -> None:
    """Adds the effects of override_tensor, cpu_moe, n_cpu_moe and use_mlock to the reasons."""
    name = "override_tensor" if config.override_tensor else "cpu_moe" if config.cpu_moe else "n_cpu_moe"
    if facts.placed and not (on_gpus := machine.gpu_shares(config.tensor_split) and config.n_gpu_layers):
        why = "llama.cpp has no GPU here" if not machine.n_gpus else "no layer is on a GPU"
        reasons[name] = f"{counted(len(facts.placed), 'tensor')}, all in main memory anyway: {why}"
    elif facts.placed and on_gpus:
        sizes = {tensor.name: tensor.n_bytes for tensor in facts.tensors}
        here = sum(sizes.get(tensor, 0) for tensor, gpu in facts.placed if gpu is None)
        reasons[name] = f"{counted(len(facts.placed), 'tensor')}, {mib(here)} of them in main memory"
    if config.use_mlock:
        reasons["use_mlock"] = f"{mib(need.locked)} are locked" + (
            f"; {mib(need.copies)} of repacked copies are not, unless extra_bufts is 'off'" if need.copies else ""
        )


def _batch_invariant(config: EngineConfig, machine: Machine, reasons: dict[str, str]) -> EngineConfig:
    """Returns `config` with the open options set to the values that batch_invariant needs."""
    if config.kv == "auto" and config.kv_cells == "auto":
        config = replace(config, kv="split")
        reasons["kv"] = "batch_invariant: a sequence's keys lie side by side"
    if config.flash_attn == "auto" and machine.fast_attention:
        config = replace(config, flash_attn="on")
        reasons["flash_attn"] = "batch_invariant: our kernel adds up in the same order whatever else is computed"
    return config


def _equal_bits(facts: ModelFacts, config: ResolvedConfig, machine: Machine) -> str:
    """Returns the plan's line on equal bits: the same logits of a row, whatever rows are computed beside it. Raises
    ConfigError if batch_invariant is True and logits depend on other rows."""
    why_not = dependence(facts, config, machine)
    if why_not is None:
        return "equal bits: yes, a row's logits are the same bits whatever is computed beside it"
    if config.batch_invariant:
        raise ConfigError(f"batch_invariant is True, but {why_not}")
    return f"equal bits: no, because {why_not}"


def _pooling(config: EngineConfig, facts: ModelFacts, reasons: dict[str, str]) -> str:
    pooling = facts.pooling if config.pooling == "auto" else config.pooling
    if pooling == RANK and not facts.has_head:
        others = ", ".join(repr(name) for name in POOLINGS if name != RANK)
        raise ConfigError(
            f"pooling is 'rank', but {facts.name} has no classification head (cls.output); allowed are {others}"
        )
    if config.pooling == "auto" and facts.names_pooling:
        reasons["pooling"] = "the file names it"
    elif config.pooling == "auto" and facts.is_encoder:
        reasons["pooling"] = "an encoder with a classification head" if facts.has_head else "the file names none"
    if pooling == RANK and facts.lacks_dense_layer:
        reasons["pooling"] = f"{reasons.get('pooling', 'as asked')}; {NO_DENSE_LAYER}"
    return pooling


def _threads(config: EngineConfig, cores: int, small: bool, reasons: dict[str, str]) -> tuple[int, int]:
    """Returns n_threads and n_threads_batch. A small model gets one thread for one row. Such a row takes half a
    millisecond: between two steps a second thread falls asleep, and waking it costs more than it saves (measured on the
    bundled model: a request of 32 tokens takes 22 ms with one thread, 67 ms with two)."""
    cores = max(1, cores)
    one_row, more_rows = config.n_threads, config.n_threads_batch
    if more_rows == "auto":
        more_rows = cores if one_row == "auto" else one_row
        reasons["n_threads_batch"] = (
            f"{counted(cores, 'core')} for each engine" if one_row == "auto" else "as n_threads"
        )
    if one_row == "auto":
        one_row = 1 if small else cores
        reasons["n_threads"] = "one row of a small model" if small else f"{counted(cores, 'core')} for each engine"
    return one_row, more_rows


def _flash_attn(
    config: EngineConfig, facts: ModelFacts, on_gpu: bool, small: bool, machine: Machine, reasons: dict[str, str]
) -> str:
    """Returns the value of flash_attn. llama.cpp's own default is on. Its kernel for CPUs reads each key once for every
    query head. This pays only where the keys are few: measured, a 0.5B shape is 1.1 to 2 times as fast with "off"; the
    bundled model reads prompts 1.6 to 2 times as fast with "on", and decodes alike. Our kernel reads each key once."""
    on_cuda = on_gpu and config.offload_kqv and bool(machine.backends & _CUDA)
    if on_cuda and config.flash_attn != "off":
        why = _why_not_on_cuda(config, facts)
        if why and (config.type_v not in _FLOATS or config.flash_attn == "on"):
            # Without this error llama.cpp would compute attention on the CPU, and copy all cells there in each step.
            raise ConfigError(f"{why}; give other types, flash_attn='off' with a type_v of f16, or offload_kqv=False")
        if why:
            reasons["flash_attn"] = why
            return "off"
        pair = f"{config.type_k}-{config.type_v}"
        if pair not in machine.kv_pairs:
            known = ", ".join(sorted(machine.kv_pairs))
            reasons["type_k"] = f"{pair} becomes f16 in each pass, which is slow; this build reads {known} as they are"
    if config.flash_attn != "auto":
        return config.flash_attn
    if config.type_v not in _FLOATS:
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


def _device_sampling(config: EngineConfig, facts: ModelFacts, machine: Machine, reasons: dict[str, str]) -> str:
    """Returns the value of device_sampling. "auto" stays "auto" where a GPU may sample, since the binding decides.

    On a CPU it is "off": the logits are in main memory already and our sampler reads each row once, so that the
    device's search for the likeliest tokens would be extra work.
    """
    if config.device_sampling != "auto":
        if config.device_sampling == "on" and facts.n_vocab <= DEVICE_TOP:
            raise ConfigError(
                f"device_sampling is 'on', but the vocabulary has {facts.n_vocab} tokens; "
                f"it is for more than {DEVICE_TOP}"
            )
        return config.device_sampling
    places = dict(facts.placed)
    here = places.get("output.weight", 0) is None or machine.n_gpus == 0 or config.n_gpu_layers == 0
    if here or config.speculate != "off" or facts.n_vocab <= DEVICE_TOP:
        return "off"
    reasons["device_sampling"] = (
        f"the GPU of the output returns {DEVICE_TOP} tokens of a row instead of {facts.n_vocab}"
    )
    return "auto"


def _why_not_on_cuda(config: EngineConfig, facts: ModelFacts) -> str:
    """Returns the reason why flash attention has no kernel on CUDA (ggml-cuda/fattn.cu); "" where it has one."""
    for name in ("type_k", "type_v"):
        if getattr(config, name) in _NOT_ON_CUDA:
            return f"{name} is {getattr(config, name)!r}, which flash attention on CUDA cannot read"
    widths = facts.widths
    width = 0 if widths is None or widths.latent else widths.queries // widths.n_head
    if width and width not in _CUDA_HEADS:
        return f"flash attention on CUDA has no kernel for heads of {width}"
    return ""


def _n_draft(
    config: EngineConfig, facts: ModelFacts, one_slot: ResolvedConfig, machine: Machine, reasons: dict[str, str]
) -> int:
    """Returns n_draft, lowered where a recurrent state is kept once more per guess, in all slots."""
    states = 1 + facts.n_snapshots(one_slot)
    if states == 1:
        return config.n_draft
    n_slots = config.n_slots if config.n_slots != "auto" else _SLOTS_OF_SNAPSHOTS
    free = machine.available_bytes
    if _is_on_gpus(facts, one_slot, machine):
        free = sum(gpu.free_bytes for gpu in machine.gpus)
    most = int(free * _SNAPSHOTS_SHARE / (n_slots * 4 * facts.state_values))
    each = mib(4 * facts.state_values)
    reasons["n_draft"] = f"the state of a sequence, {each}, is kept once more for each guess that may be wrong"
    return max(1, min(states - 1, most - 1))


def _instances(config: EngineConfig, machine: Machine, small_on_cpu: bool, reasons: dict[str, str]) -> int:
    apart = config.strategy == "multi-instance" and machine.n_gpus > 1 and config.n_gpu_layers != 0
    if apart and config.tensor_split is not None:
        raise ConfigError(
            f"tensor_split is {config.tensor_split}, but multi-instance puts each engine on one GPU; leave it out"
        )
    if config.instances != "auto":
        return config.instances
    if config.strategy != "multi-instance":
        return _engines_here(config, machine, reasons) if small_on_cpu and config.strategy == "auto" else 1
    if apart:
        reasons["instances"] = f"one for each of {machine.n_gpus} GPUs"
        return machine.n_gpus
    instances = max(2, machine.cores // 4)
    reasons["instances"] = f"{machine.cores} cores, 4 for each, at least 2 engines"
    return instances


def _engines_here(config: EngineConfig, machine: Machine, reasons: dict[str, str]) -> int:
    """Returns the number of engines in this process for a small model on a CPU. A step of a small model is a hundred
    operations of microseconds each, and its threads mostly wait for each other. On the bundled model and 2 cores, 2
    engines make 1.3 times the tokens/s of one: benchmarks/results/strategies-tiny.json."""
    if config.n_threads != "auto" or config.n_threads_batch != "auto" or config.speculate == "draft":
        return 1
    slots = _MOST_SLOTS if config.n_slots == "auto" else config.n_slots
    engines = max(1, min(machine.cores, _MOST_ENGINES, slots // 2))
    if engines > 1:
        reasons["instances"] = "engines that share the weights: in a small model the threads of one wait for each other"
    return engines


def _kv_cache(
    facts: ModelFacts,
    requested: EngineConfig,
    one_slot: ResolvedConfig,
    machine: Machine,
    reasons: dict[str, str],
    profile: Profile | None,
) -> ResolvedConfig:
    """Returns `one_slot` with kv, n_slots and kv_cells.

    A split cache is faster: the attention of a sequence reads its own cells only. A unified cache, where any sequence
    may use any cell, is for options whose split cache does not fit.
    """
    n_ctx, instances = one_slot.n_ctx, one_slot.instances
    most = _MOST_SLOTS_ON_GPU if _is_on_gpus(facts, one_slot, machine) else _MOST_SLOTS
    most = min(profile.most_rows if profile and profile.stairs else most, requested.n_batch)
    budget = int(machine.available_bytes * MEMORY_SHARE)
    share = f"{mib(budget)} (half of what is free{f', for {instances} engines' if instances > 1 else ''})"
    if one_slot.n_gpu_layers != 0 and machine.gpus and not machine.unified_memory:
        share += f" and half of the {' and '.join(mib(gpu.free_bytes) for gpu in machine.gpus)} of GPUs"
    fitting = most_slots(facts, one_slot, machine, most)
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


def _is_on_gpus(facts: ModelFacts, config: ResolvedConfig, machine: Machine) -> bool:
    """Returns True if GPUs with memory of their own hold all layers, the cells and the output."""
    layers = config.n_gpu_layers
    whole = (layers < 0 or layers > facts.n_layer) and config.offload_kqv
    return whole and not facts.placed and bool(machine.gpus) and not machine.unified_memory


def most_slots(facts: ModelFacts, config: ResolvedConfig, machine: Machine, most: int) -> int:
    """Returns the number of slots that fit in half of the free memory, 0 to `most`."""
    return bisect_right(
        range(1, most + 1), 0, key=lambda n: not _fits_in_share(facts, replace(config, n_slots=n), machine)
    )


def _fits_in_share(facts: ModelFacts, config: ResolvedConfig, machine: Machine) -> bool:
    """Returns True if a config without its `cache_ram` fits in half of the free memory."""
    return fits(facts, replace(config, cache_ram=0), machine, MEMORY_SHARE)


def _start_slots(
    facts: ModelFacts, requested: EngineConfig, config: ResolvedConfig, machine: Machine, reasons: dict[str, str]
) -> int:
    """Returns the number of slots of the first context.

    llama.cpp zeroes all cells of a new context, so that many cells take seconds and memory before the first token.
    Our build gets zeroed pages from the system when a cell is first used.

    The context starts with fewer slots only if its cells can be copied into a larger one. States and cells of a
    sliding window cannot.
    """
    n_slots = config.n_slots
    if requested.start_slots != "auto":
        return min(requested.start_slots, n_slots)
    if requested.n_slots != "auto":
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
        return not _fits_in_share(facts, shared(pages), machine)

    return shared(least + max(0, bisect_right(range(least, most + 1), 0, key=too_large) - 1))


def _cache_ram(facts: ModelFacts, config: ResolvedConfig, machine: Machine, reasons: dict[str, str]) -> int:
    """Returns the MiB for prefixes that no slot holds any more. With more chats than slots, the next turn of a chat
    needs its prefix after another chat has taken the slot."""
    has_window = facts.widths is not None and facts.widths.masks > 1
    can_copy = facts.arch not in UNCOPIED and not (has_window and config.kv == "unified")
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
    if not facts.has_state and not has_window:
        one = memory(facts, replace(config, n_slots=1, start_slots=1, kv="split", kv_cells=0))
        most = min(most, _CACHED_SLOTS * one.kv_cache // MIB)
        why += f", and the cells of {_CACHED_SLOTS} full slots"
    reasons["cache_ram"] = why
    return most


def _strategy(requested: EngineConfig, n_slots: int, reasons: dict[str, str]) -> str:
    """Returns the strategy for "auto": "sequential" with one slot, else "batched". With one request in flight both
    policies compute the same steps, so that "batched" costs nothing there."""
    if requested.strategy != "auto":
        return requested.strategy
    if n_slots == 1:
        reasons["strategy"] = "there is one slot"
        return "sequential"
    reasons["strategy"] = (
        "one pass over the weights serves all slots, and a single request runs as it would sequentially"
    )
    return "batched"
