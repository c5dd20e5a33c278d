"""Chooses the values of "auto" from the needs of a model and the memory of a machine. Pure Python, without I/O."""

from __future__ import annotations

from dataclasses import replace

from llamabatch.chat.formats import reasoning_of
from llamabatch.chat.tool_formats import ToolFormat
from llamabatch.config import DEVICE_TOP, MAX_SLOTS, EngineConfig, ResolvedConfig
from llamabatch.errors import ConfigError
from llamabatch.gguf.pooling import NO_DENSE_LAYER, POOLINGS, RANK
from llamabatch.planning.context_length import fitted_ctx, n_ctx_of
from llamabatch.planning.equal_bits import dependence
from llamabatch.planning.kv_cache import MOST_SLOTS, cache_ram_of, n_draft_of, slots_and_cells, start_slots_of
from llamabatch.planning.machine import Machine
from llamabatch.planning.memory import MIB, Memory, mib
from llamabatch.planning.model_facts import ModelFacts
from llamabatch.planning.plan import Plan, check_fits, planned
from llamabatch.planning.profile import Profile
from llamabatch.utils.checks import counted

_MOST_ENGINES = 4  # maximum number of engines in one process: each needs the GIL for about a tenth of its time
_SMALL_MODEL = 64 * MIB
_FLOATS = ("f32", "f16", "bf16")
_CUDA = frozenset({"CUDA", "ROCm", "MUSA"})  # backends that are compiled from ggml's CUDA source
_NOT_ON_CUDA = ("iq4_nl",)
_CUDA_HEADS = frozenset({40, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512, 576})
_UBATCH = 512  # llama.cpp's own default


def resolve(config: EngineConfig, facts: ModelFacts, machine: Machine, profile: Profile | None = None) -> Plan:
    """Turns "auto" into values: from the profile where there is one, else by rule.

    Raises:
        ConfigError: n_ctx is above the trained context of the model, and above the reach of its scaled rotary
            embedding; pooling is "rank" without a classification head; tensor_split is given, but "multi-instance" puts
            each engine on one GPU; flash attention on CUDA has no kernel for these options; device_sampling is "on"
            with a small vocabulary; kv_cells is below n_ctx; batch_invariant is True, but logits depend on the other
            rows of a pass.
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
    n_ctx = n_ctx_of(config, facts, reasons)
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
    one_slot = replace(one_slot, n_draft=n_draft_of(config, facts, one_slot, machine, reasons))
    if config.n_ctx == "fit":
        one_slot = replace(one_slot, n_ctx=fitted_ctx(config, facts, one_slot, machine, reasons))
    found = slots_and_cells(facts, config, one_slot, machine, reasons, profile if n_instances == 1 else None)
    found = replace(found, strategy=_strategy(config, found.n_slots, reasons))
    found = replace(found, start_slots=start_slots_of(facts, config, found, machine, reasons))
    if config.cache_ram == "auto":
        found = replace(found, cache_ram=cache_ram_of(facts, found, machine, reasons))
    tags = reasoning_of(facts.chat_template, config.reasoning_tags, config.reasoning_format)
    plan = planned(facts, found, machine)
    _placement(config, facts, plan.memory, machine, reasons)
    reasons["batch_invariant"] = _equal_bits(facts, found, machine)
    plan = replace(
        plan,
        reasons=reasons,
        reasoning=None if tags is None else tags.family,
        tools=ToolFormat.of(facts.chat_template).name,
        lacks_template=facts.chat_template is None and not facts.is_encoder and not facts.names_pooling,
    )
    check_fits(plan, machine)
    return plan


def _placement(
    config: EngineConfig, facts: ModelFacts, need: Memory, machine: Machine, reasons: dict[str, str]
) -> None:
    """Adds lines to `reasons` that describe the effects of override_tensor, cpu_moe, n_cpu_moe and use_mlock."""
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
    """Returns `config` with kv and flash_attn set as batch_invariant needs them, if they are "auto"."""
    if config.kv == "auto" and config.kv_cells == "auto":
        config = replace(config, kv="split")
        reasons["kv"] = "batch_invariant: a sequence's keys lie side by side"
    if config.flash_attn == "auto" and machine.fast_attention:
        config = replace(config, flash_attn="on")
        reasons["flash_attn"] = "batch_invariant: our kernel adds up in the same order whatever else is computed"
    return config


def _equal_bits(facts: ModelFacts, config: ResolvedConfig, machine: Machine) -> str:
    """Returns a line for the plan. It says whether bits are equal: whether a row's logits have the same bits whatever
    other rows are in the pass. Raises ConfigError if batch_invariant is True and bits are not equal.
    """
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
    """Returns n_threads and n_threads_batch. A small model computes one row with one thread. Such a row takes half a
    millisecond. A second thread would fall asleep between two steps, and waking it would cost more than it saves
    (measured on the bundled model: a request of 32 tokens takes 22 ms with one thread, 67 ms with two)."""
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
    """Returns the value of flash_attn. On CPUs it is "on" with our kernel, which reads each key once. llama.cpp's own
    kernel reads each key once for every query head, so "on" is faster only for few keys. Measured with llama.cpp's
    kernel: a model of 0.5B is 1.1 to 2 times as fast with "off"; the bundled model reads prompts 1.6 to 2 times as fast
    with "on", and decodes equally fast.
    """
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
    """Returns the value of device_sampling. "auto" stays "auto" where a GPU may sample: the binding decides later.

    On a CPU the value is "off". The logits are in main memory already, and our sampler reads each row only once. A
    search for the likeliest tokens in llama.cpp would be extra work.
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
    """Returns the reason why CUDA has no kernel for flash attention (ggml-cuda/fattn.cu); "" if CUDA has one."""
    for name in ("type_k", "type_v"):
        if getattr(config, name) in _NOT_ON_CUDA:
            return f"{name} is {getattr(config, name)!r}, which flash attention on CUDA cannot read"
    widths = facts.widths
    width = 0 if widths is None or widths.latent else widths.queries // widths.n_head
    if width and width not in _CUDA_HEADS:
        return f"flash attention on CUDA has no kernel for heads of {width}"
    return ""


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
    operations of microseconds each, in which the threads mostly wait for each other. On the bundled model and 2 cores,
    2 engines make 1.3 times the tokens/s of one: benchmarks/results/strategies-tiny.json.
    """
    if config.n_threads != "auto" or config.n_threads_batch != "auto" or config.speculate == "draft":
        return 1
    slots = MOST_SLOTS if config.n_slots == "auto" else config.n_slots
    engines = max(1, min(machine.cores, _MOST_ENGINES, slots // 2))
    if engines > 1:
        reasons["instances"] = "engines that share the weights: in a small model the threads of one wait for each other"
    return engines


def _strategy(requested: EngineConfig, n_slots: int, reasons: dict[str, str]) -> str:
    """Returns the strategy. "auto" becomes "sequential" with one slot, otherwise "batched". With one request in flight
    "batched" costs nothing, because both strategies then compute the same steps."""
    if requested.strategy != "auto":
        return requested.strategy
    if n_slots == 1:
        reasons["strategy"] = "there is one slot"
        return "sequential"
    reasons["strategy"] = (
        "one pass over the weights serves all slots, and a single request runs as it would sequentially"
    )
    return "batched"
