"""The stages of tuning, each with its candidates. The stages with the most influence come first.

A later stage is measured with the choices of the earlier stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from llamabatch.config import MAX_BATCH, EngineConfig, ResolvedConfig
from llamabatch.llama.environment import OnLoad, environment_defaults
from llamabatch.planning.profile import FLOAT_TYPES
from llamabatch.utils.system import affinity

# libgomp's own default of GOMP_SPINCOUNT: "3 msec blocking when OMP_WAIT_POLICY is not specified", with 100,000 spins
# per ms (gcc/libgomp/env.c).
LIBGOMP_SPINS = 300_000
STAIRS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
_KV_TYPES = (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "f16"), ("f32", "f32"))
_SPINS = (1_000, 3_000, 10_000)
_UBATCHES = (256, 512, 1024)


@dataclass(frozen=True)
class Setting:
    """One way to run the model. The fields are named as in EngineConfig.

    extra_bufts, amx and spins are fixed when a model or library is loaded. The rest can change in a running process.

    Attributes:
        spins: the value of GOMP_SPINCOUNT.
        amx: "off": the extra buffers are used, but not for AMX kernels.
    """

    extra_bufts: str
    spins: int
    flash_attn: str
    type_k: str
    type_v: str
    n_ubatch: int
    n_threads: int
    n_threads_batch: int
    amx: str = "on"

    @property
    def load(self) -> tuple[str, str, int]:
        """The part of the setting that is fixed once a process has loaded the model."""
        return self.extra_bufts, self.amx, self.spins

    def options(self) -> dict[str, Any]:
        """Returns the setting as options of EngineConfig, without spins and amx."""
        return {name: value for name, value in vars(self).items() if name not in ("spins", "amx")}

    def environment(self) -> dict[str, str]:
        """Returns spins and amx as environment variables."""
        return environment_defaults(None, OnLoad(self.spins, self.amx))


@dataclass(frozen=True)
class Job:
    """One measurement.

    Attributes:
        prompt: number of tokens in each sequence before the timed steps.
        rows: numbers of sequences; a decode step is timed for each number.
        n_ctx, n_slots: options of EngineConfig for the measured context.
        seconds: time to spend on each number of rows.
        time_prompt: True measures the time of the prompt as well.
    """

    prompt: int
    rows: tuple[int, ...]
    n_ctx: int
    n_slots: int
    seconds: float
    time_prompt: bool = True


def config_of(base: EngineConfig, setting: Setting, job: Job) -> ResolvedConfig:
    """Returns the options of the context for a job. `base` has the model and the devices for its layers."""
    return ResolvedConfig(
        model=base.model,
        strategy="batched",
        n_slots=job.n_slots,
        start_slots=job.n_slots,
        n_ctx=job.n_ctx,
        prefill_budget=setting.n_ubatch,
        instances=1,
        n_gpu_layers=base.n_gpu_layers,
        main_gpu=base.main_gpu,
        split_mode=base.split_mode,
        devices=base.devices,
        offload_kqv=base.offload_kqv,
        device_sampling=base.device_sampling,
        row_ladder=base.row_ladder,
        op_offload=base.op_offload,
        swa_full=base.swa_full,
        tensor_split=base.tensor_split,
        kv="split",
        pooling="mean",
        kv_cells=0,
        cache_ram=0,
        override_tensor=base.override_tensor,
        n_cpu_moe=base.n_cpu_moe,
        cpu_moe=base.cpu_moe,
        kv_overrides=base.kv_overrides,
        use_mmap=base.use_mmap,
        use_mlock=base.use_mlock,
        numa=base.numa,
        profile=False,
        **setting.options(),
    )


@dataclass(frozen=True)
class Stage:
    """One step of the tuning, which chooses the value of one field of Setting.

    Attributes:
        name: the field of Setting that is tuned.
        title: the title that people see.
        measures: the figures that count: "prompt", "one" (a step of one row), "many" (a step of many rows) and "long
            prompt". With "busy " in front, another process keeps a core busy during the measurement.
        candidates: a function from the setting chosen so far to a dictionary of labels and settings to try. The first
            of these is the given setting.
        rounds: number of measurements of each candidate.
        share: approximate share of the time.
        only_on_request: True if the stage changes outputs. All candidates are measured, but the first is chosen unless
            the user allows other numerics.
    """

    name: str
    title: str
    measures: tuple[str, ...]
    candidates: Callable[[Setting], dict[str, Setting]]
    rounds: int = 3
    share: float = 1.0
    only_on_request: bool = False


def stages(cores: int, config: ResolvedConfig, longest_prompt: int, amx: bool = False) -> tuple[Stage, ...]:
    """Returns all stages.

    Args:
        config: the options as the rules resolve them without a profile.
        longest_prompt: tokens of the prompt in the stage for n_ubatch.
        amx: True if AMX kernels are on and can be turned off.
    """
    return (
        Stage("extra_bufts", "extra buffers", ("prompt", "one", "many"), lambda s: _extra_bufts(s, amx), share=1.5),
        Stage("flash_attn", "flash attention", ("prompt", "many"), _flash_attn),
        Stage("type_k", "KV types", ("prompt", "many"), _kv_types, rounds=2, only_on_request=True),
        Stage("n_threads", "threads, one row", ("one",), lambda s: _threads(s, "n_threads", cores), share=0.7),
        Stage(
            "n_threads_batch",
            "threads, more rows",
            ("prompt", "many"),
            lambda s: _threads(s, "n_threads_batch", cores),
            share=0.7,
        ),
        Stage("spins", "spin count", ("one", "many", "busy one", "busy many"), _spins, share=3.5),
        Stage("n_ubatch", "n_ubatch", ("long prompt",), lambda s: _ubatches(s, config.n_batch, longest_prompt)),
    )


def llama_cpp_defaults(setting: Setting, cores: int) -> Setting:
    """Returns the setting of llama.cpp's own programs: flash attention "auto" (on where possible), libgomp's spin
    count, n_ubatch 512, all cores. Cache types and extra buffers stay as in `setting`, because other values may crash
    on this machine."""
    return replace(
        setting, flash_attn="auto", spins=LIBGOMP_SPINS, n_ubatch=512, n_threads=cores, n_threads_batch=cores
    )


def _extra_bufts(setting: Setting, amx: bool) -> dict[str, Setting]:
    if setting.extra_bufts == "off":  # the user turned the buffers off, or they crash here
        return {"off": setting}
    without_amx = {"on, no AMX": replace(setting, amx="off")} if amx else {}
    return {"on": setting, **without_amx, "off": replace(setting, extra_bufts="off")}


def _flash_attn(setting: Setting) -> dict[str, Setting]:
    ways = {setting.flash_attn: setting}
    if setting.type_v not in FLOAT_TYPES:
        return ways  # a quantised V cache needs flash attention
    for other in ("off", "on"):
        if other != setting.flash_attn and (setting.flash_attn, other) != ("auto", "on"):  # "auto" means on if possible
            ways[other] = replace(setting, flash_attn=other)
    return ways


def _kv_types(setting: Setting) -> dict[str, Setting]:
    ways = {_kv_label(setting): setting}
    for type_k, type_v in _KV_TYPES:
        flash = setting.flash_attn if type_v in FLOAT_TYPES else "on"  # a quantised V cache needs flash attention
        way = replace(setting, type_k=type_k, type_v=type_v, flash_attn=flash)
        ways.setdefault(_kv_label(way), way)
    return ways


def _kv_label(setting: Setting) -> str:
    return f"{setting.type_k}, {setting.type_v}"


def _threads(setting: Setting, name: str, cores: int) -> dict[str, Setting]:
    """Returns settings with different numbers of threads: the current number, 1, half the cores, all cores, and twice
    the cores if the process may use that many."""
    logical = affinity()
    counts = [getattr(setting, name), 1, max(1, cores // 2), cores, *([2 * cores] if 2 * cores <= logical else [])]
    return {str(count): replace(setting, **{name: count}) for count in dict.fromkeys(counts)}


def _spins(setting: Setting) -> dict[str, Setting]:
    counts = dict.fromkeys((setting.spins, *_SPINS, LIBGOMP_SPINS))
    return {f"{count:,}": replace(setting, spins=count) for count in counts}


def _ubatches(setting: Setting, n_batch: int, longest_prompt: int) -> dict[str, Setting]:
    """Returns settings with different values of n_ubatch: the current value, and values that a prompt of
    `longest_prompt` tokens can fill."""
    most = min(n_batch, longest_prompt, MAX_BATCH)
    counts = dict.fromkeys((setting.n_ubatch, *(count for count in _UBATCHES if count <= most)))
    return {str(count): replace(setting, n_ubatch=count) for count in counts}
