"""The answer of `llamabatch plan`, as an object and as a JSON document."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamabatch.planning.capacity import Plan
from llamabatch.planning.machine import Machine
from llamabatch.planning.memory import PROCESS_BYTES, Memory
from llamabatch.utils.format import attributes

SCHEMA_VERSION = 1
ENGINE = (
    *("strategy", "instances", "n_slots", "n_ctx", "kv", "kv_cells", "type_k", "type_v", "n_ubatch", "flash_attn"),
    *("n_threads", "n_threads_batch", "cache_ram", "n_gpu_layers", "extra_bufts", "use_mmap", "use_mlock", "pooling"),
    *("rope_scaling", "rope_freq_base", "rope_freq_scale"),
)


@dataclass(frozen=True)
class Lengths:
    """Lengths of the prompts in a file, in tokens of the model's vocabulary; `output` is added to each."""

    source: str
    count: int
    median: int
    p95: int
    longest: int
    output: int

    @property
    def n_ctx(self) -> int:
        """Tokens that the longest prompt needs with its output."""
        return self.longest + self.output


@dataclass(frozen=True)
class Row:
    """The slots that fit with one context length.

    Attributes:
        n_ctx: tokens that one request may use.
        slots: slots that fit in half of the free memory, as "auto" takes them.
        most_slots: slots that fit in all of it.
        memory: memory of one engine with `slots`, at least one.
        slot_bytes: memory of one more slot.
    """

    n_ctx: int
    slots: int
    most_slots: int
    memory: Memory
    slot_bytes: int


@dataclass(frozen=True)
class Change:
    """One change that would help: `total_bytes` and `slots` are those after it."""

    what: str
    total_bytes: int
    slots: int


@dataclass(frozen=True)
class Report:
    """The whole answer.

    Attributes:
        model, file_bytes: name of the model, size of its file.
        machine: cores and memory that are free for engines, beside the process.
        given_bytes: memory that was given as free, the process included; None: that of this machine.
        plan: the options with which an engine would run; None: they do not fit.
        refusal: the reason why they do not fit, else None.
        requested: the plan of the options as given, whether they fit or not.
        total_bytes: memory of all its engines, without the process itself.
        rows: by rising context length.
        instances: engines of the plan that fit as child processes, at most one for each core.
        strategy, because: the strategy that suits, and why.
        changes: changes after which it fits, or that make room for more slots.
        prompts: lengths of --prompts.
    """

    model: str
    file_bytes: int
    machine: Machine
    given_bytes: int | None
    plan: Plan | None
    refusal: str | None
    requested: Plan
    total_bytes: int
    rows: tuple[Row, ...]
    instances: int
    strategy: str
    because: str
    changes: tuple[Change, ...]
    prompts: Lengths | None = None

    @property
    def fits(self) -> bool:
        """True if an engine would start with these options."""
        return self.plan is not None

    @property
    def memory(self) -> Memory:
        """Memory of one engine as it was asked for, whether it fits or not."""
        return self.requested.memory


def document(report: Report) -> dict[str, Any]:
    """The document of `--json`, described in docs/plan.md. All sizes are in bytes."""
    config = report.requested.config
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {"name": report.model, "path": config.model, "file_bytes": report.file_bytes},
        "machine": _machine(report),
        "fits": report.fits,
        "refusal": report.refusal,
        "engine": attributes(config.requested(), *ENGINE),
        "reasons": dict(report.requested.reasons),
        "reasoning": report.requested.reasoning,
        "tools": report.requested.tools,
        "lacks_template": report.requested.lacks_template,
        "memory": {
            "one_engine": report.memory.document(),
            "all_engines": report.total_bytes,
            "process": PROCESS_BYTES,
            "predicted_peak": report.requested.peak_bytes + (0 if report.requested.in_children else PROCESS_BYTES),
            "address_space": report.requested.address_space,
        },
        "by_n_ctx": [_row(row) for row in report.rows],
        "instances": {"planned": config.instances, "children_that_fit": report.instances},
        "strategy": {"name": report.strategy, "because": report.because},
        "changes": [dataclasses.asdict(change) for change in report.changes],
        "prompts": None
        if report.prompts is None
        else {**dataclasses.asdict(report.prompts), "n_ctx": report.prompts.n_ctx},
    }


def _machine(report: Report) -> Mapping[str, Any]:
    machine = report.machine
    return {
        "cores": machine.cores,
        "free_bytes": machine.available_bytes,
        "assumed": report.given_bytes is not None,
        **attributes(machine, "address_space", "data_bytes", "lockable_bytes"),
        "repacks_for": sorted(machine.features),
        "gpus": [dataclasses.asdict(gpu) for gpu in machine.gpus],
    }


def _row(row: Row) -> dict[str, Any]:
    return attributes(row, "n_ctx", "slots", "most_slots", "slot_bytes") | attributes(row.memory, "total", "kv_cache")
