"""What a measurement is made with, and what of it needs a fresh process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llamabatch.config import EngineConfig
from llamabatch.llama.environment import OnLoad, environment_defaults

# What libgomp does where nobody sets GOMP_SPINCOUNT: "3 msec blocking when OMP_WAIT_POLICY is not specified", at
# 100,000 spins a ms (gcc/libgomp/env.c).
LIBGOMP_SPINS = 300_000


@dataclass(frozen=True)
class Setting:
    """One way to run the model; the names are EngineConfig's, `spins` is GOMP_SPINCOUNT, and `amx` is "off" where the
    extra buffers are those of other kernels.

    extra_bufts, amx and spins are fixed when a model or a library is loaded; the rest can change in a running process.
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
        """What a process is started with."""
        return self.extra_bufts, self.amx, self.spins

    def options(self) -> dict[str, Any]:
        """As options of EngineConfig."""
        return {name: value for name, value in vars(self).items() if name not in ("spins", "amx")}

    def environment(self) -> dict[str, str]:
        """The rest, as variables."""
        return environment_defaults(None, OnLoad(self.spins, self.amx))


@dataclass(frozen=True)
class Job:
    """One measurement.

    Attributes:
        prompt: tokens of each sequence before its steps are timed.
        rows: numbers of sequences whose decode step is timed.
        n_ctx, n_slots: of the context.
        seconds: to spend on each number of rows.
        time_prompt: whether the prompt itself is timed.
    """

    prompt: int
    rows: tuple[int, ...]
    n_ctx: int
    n_slots: int
    seconds: float
    time_prompt: bool = True


def config_of(base: EngineConfig, setting: Setting, job: Job) -> EngineConfig:
    """The options of a context that carries out a job; `base` says which model, and where its layers lie."""
    options = {name: getattr(base, name) for name in ("n_gpu_layers", "main_gpu", "tensor_split", "use_mmap")}
    ours = {"n_ctx": job.n_ctx, "n_slots": job.n_slots, "kv": "split", "profile": False}
    return EngineConfig.from_options(base.model, {**options, **setting.options(), **ours})
