"""A profile: the results of `llamabatch tune` for one shape of model on one machine. Pure Python.

The engine uses these results as values of options that are "auto".
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llamabatch.config import KV_TYPES, MAX_BATCH, MAX_SLOTS, EngineConfig
from llamabatch.errors import ConfigError
from llamabatch.gguf.shape import ModelShape
from llamabatch.utils.checks import choice, integer, number, show

VERSION = 1
MAX_SPINS = 10**9
FLOAT_TYPES = ("f32", "f16", "bf16")  # types of a V cache; any other type needs flash attention
MARGIN = 0.03  # a smaller gain in tokens/s counts as noise, so that the smaller number of slots is chosen


@dataclass(frozen=True)
class ProfileKey:
    """The conditions of a profile. Its figures are invalid once any condition changes.

    Attributes:
        shape: the shape of the model.
        cpu: name of the CPU.
        cpu_flags: a hash of the CPU's flags.
        cores: number of cores available to a process.
        library: version and build of the llama.cpp binding.
        type_k, type_v: types of the KV cache, which decide the cost of attention.
        changes: EngineConfig.speed_changes, the options that change the work of a step or its place.
    """

    shape: ModelShape
    cpu: str
    cpu_flags: str
    cores: int
    library: str
    type_k: str
    type_v: str
    changes: str = ""

    @property
    def digest(self) -> str:
        """A hash of the key. It is the name of the profile's file."""
        facts = dataclasses.asdict(self)
        if not self.changes:  # so that older profiles, which lack this field, keep their digests
            del facts["changes"]
        text = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Stair:
    """The measured time of a decode step with `rows` sequences: its median (step_ms) and its p95 in milliseconds."""

    rows: int
    step_ms: float
    p95_ms: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.rows * 1000 / self.step_ms


@dataclass(frozen=True)
class Profile:
    """The measured values that beat a plan's rules by more than the noise. If a value is None, the rule decides.

    Attributes:
        created: date, ISO 8601.
        model: name of the measured model, for display only.
        gpus: names of the devices that had layers of the model.
        flash_attn, extra_bufts, n_threads, n_threads_batch, n_ubatch: as in EngineConfig.
        spins: value of GOMP_SPINCOUNT, which sets how long a waiting thread spins.
        stairs: measured decode steps with increasing numbers of rows. They decide the best number of slots.
        p95_inter_token_ms: the tuning's limit for the time between two tokens at p95, in milliseconds.
        latency_rows: the best number of slots within this limit.
        amx: "off" if the CPU has AMX, but other repacked kernels are faster.
    """

    key: ProfileKey
    created: str
    model: str
    gpus: tuple[str, ...] = ()
    flash_attn: str | None = None
    extra_bufts: str | None = None
    n_threads: int | None = None
    n_threads_batch: int | None = None
    n_ubatch: int | None = None
    spins: int | None = None
    stairs: tuple[Stair, ...] = ()
    p95_inter_token_ms: float | None = None
    latency_rows: int | None = None
    amx: str | None = None

    def __post_init__(self) -> None:
        choice(ConfigError, "type_k", self.key.type_k, KV_TYPES)
        choice(ConfigError, "type_v", self.key.type_v, KV_TYPES)
        for name in ("flash_attn", "extra_bufts", "amx"):
            if getattr(self, name) is not None:
                choice(ConfigError, name, getattr(self, name), ("on", "off"))
        if self.flash_attn == "off" and self.key.type_v not in FLOAT_TYPES:
            raise ConfigError(f"flash_attn is 'off', but type_v is {self.key.type_v!r}, which needs it")
        for name, most in (("n_threads", 512), ("n_threads_batch", 512), ("n_ubatch", MAX_BATCH), ("spins", MAX_SPINS)):
            if getattr(self, name) is not None:
                integer(ConfigError, name, getattr(self, name), 0 if name == "spins" else 1, most)
        for name in ("created", "model"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} is {show(getattr(self, name))}; give a text")
        for stair in self.stairs:
            integer(ConfigError, "rows", stair.rows, 1, MAX_SLOTS)
            number(ConfigError, "step_ms", stair.step_ms, 1e-6, 1e9)
            if stair.p95_ms is not None:
                number(ConfigError, "p95_ms", stair.p95_ms, 1e-6, 1e9)
        if (self.p95_inter_token_ms is None) != (self.latency_rows is None):
            raise ConfigError("p95_inter_token_ms and latency_rows go together")
        if self.latency_rows is not None:
            integer(ConfigError, "latency_rows", self.latency_rows, 1, MAX_SLOTS)
            number(ConfigError, "p95_inter_token_ms", self.p95_inter_token_ms, 1e-3, 1e9)

    @property
    def source(self) -> str:
        """The profile with its date, in words. A plan gives this as the reason of measured values."""
        return f"profile of {self.created}"

    def fill(self, config: EngineConfig) -> tuple[EngineConfig, dict[str, str]]:
        """Returns the config with measured values in place of "auto", and the reason for each value.

        With several instances, n_threads and n_threads_batch stay "auto", because they were measured with one
        instance. If n_threads is given, n_threads_batch stays "auto" and then equals n_threads.
        """
        found: dict[str, Any] = {"flash_attn": self.flash_attn, "extra_bufts": self.extra_bufts}
        if self.n_ubatch is not None:
            found["n_ubatch"] = min(self.n_ubatch, config.n_batch)
        if config.instances == 1 and config.n_threads == "auto":
            found |= {"n_threads": self.n_threads, "n_threads_batch": self.n_threads_batch}
        open_options = {
            name: value for name, value in found.items() if value is not None and getattr(config, name) == "auto"
        }
        return replace(config, **open_options), dict.fromkeys(open_options, self.source)

    def best_rows(self, fits: Callable[[int], bool]) -> int | None:
        """Returns latency_rows if this number is known and fits. Otherwise returns the smallest number of rows whose
        tokens/s are within 3 % of the highest. Only numbers that fit and keep the latency limit count. None if no
        number fits.
        """
        if self.latency_rows is not None and fits(self.latency_rows):
            # best_rows could return a smaller number, because it sees only the stairs that fit. tune saw all of them.
            return self.latency_rows
        return best_rows([stair for stair in self.stairs if stair.rows <= self.most_rows and fits(stair.rows)])

    @property
    def most_rows(self) -> int:
        """The largest measured number of rows that keeps the latency limit."""
        measured = max((stair.rows for stair in self.stairs), default=MAX_SLOTS)
        return measured if self.latency_rows is None else min(measured, self.latency_rows)

    @property
    def why_rows(self) -> str:
        """A plan's reason for the result of best_rows."""
        if self.p95_inter_token_ms is None:
            return f"{self.source}: the most tokens/s"
        return f"{self.source}: the most tokens/s with {self.p95_inter_token_ms:g} ms between two tokens at p95"

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, as in the profile's file."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, document: Any) -> Profile:
        """Reads a document of to_json. Raises ValueError, TypeError or KeyError for anything else."""
        if not isinstance(document, Mapping) or document.get("version") != VERSION:
            raise ValueError(f"it is no profile of version {VERSION}")
        values = {name: value for name, value in document.items() if name != "version"}
        key = dict(values["key"])
        values["key"] = ProfileKey(**{**key, "shape": ModelShape(**key["shape"])})
        values["stairs"] = tuple(Stair(**stair) for stair in values["stairs"])
        values["gpus"] = tuple(values["gpus"])
        return cls(**values)


def best_rows(stairs: list[Stair]) -> int | None:
    """Returns the smallest number of rows within 3 % of the highest tokens/s; None without stairs."""
    if not stairs:
        return None
    most = max(stair.tokens_per_s for stair in stairs)
    return min(stair.rows for stair in stairs if stair.tokens_per_s >= most * (1 - MARGIN))
