"""What `llamabatch plan` answers, as an object and as a JSON document."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamabatch.planning.capacity import Plan
from llamabatch.planning.machine import Machine
from llamabatch.planning.memory import PROCESS_BYTES, Memory

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Lengths:
    """Tokens of the prompts in a file, counted with the model's vocabulary; `output` is added for each."""

    source: str
    count: int
    median: int
    p95: int
    longest: int
    output: int

    @property
    def n_ctx(self) -> int:
        """What the longest needs."""
        return self.longest + self.output


@dataclass(frozen=True)
class Row:
    """What fits with one context length.

    Attributes:
        n_ctx: tokens that one request may use.
        slots: that fit in half of what is free: what "auto" takes.
        most_slots: that fit in all of it.
        memory: of one engine with `slots`, or with one slot where none fits.
        slot_bytes: what one slot more takes.
    """

    n_ctx: int
    slots: int
    most_slots: int
    memory: Memory
    slot_bytes: int


@dataclass(frozen=True)
class Change:
    """Something that would help, and what comes of it."""

    what: str
    total_bytes: int
    slots: int


@dataclass(frozen=True)
class Report:
    """Everything.

    Attributes:
        model: its name; `file_bytes` of its file.
        machine: what is free on it for engines, beside the process.
        given_bytes: what was given as free instead, the process included; None where this machine was asked.
        plan: the options that an engine would run with; None where they do not fit, then `refusal` says why.
        memory: of one engine as it was asked for, whether it fits or not.
        total_bytes: of all engines as they were asked for, without the process itself.
        rows: by rising context length.
        instances: engines of the plan in child processes that would fit, at most one for each core.
        strategy, because: which strategy suits.
        changes: what to change where it does not fit, or to have more slots.
        prompts: of --prompts.
    """

    model: str
    file_bytes: int
    machine: Machine
    given_bytes: int | None
    plan: Plan | None
    refusal: str | None
    asked: Plan
    total_bytes: int
    rows: tuple[Row, ...]
    instances: int
    strategy: str
    because: str
    changes: tuple[Change, ...]
    prompts: Lengths | None = None

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def memory(self) -> Memory:
        return self.asked.memory


def document(report: Report) -> dict[str, Any]:
    """For `--json`; docs/plan.md describes it. All sizes in bytes."""
    config = report.asked.config
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {"name": report.model, "path": config.model, "file_bytes": report.file_bytes},
        "machine": _machine(report),
        "fits": report.fits,
        "refusal": report.refusal,
        "engine": {name: getattr(config.asked(), name) for name in ENGINE},
        "reasons": dict(report.asked.reasons),
        "memory": {
            "one_engine": report.memory.document(),
            "all_engines": report.total_bytes,
            "process": PROCESS_BYTES,
            "predicted_peak": report.asked.peak_bytes + (0 if report.asked.in_children else PROCESS_BYTES),
            "address_space": report.asked.address_space,
        },
        "by_n_ctx": [_row(row) for row in report.rows],
        "instances": {"planned": config.instances, "children_that_fit": report.instances},
        "strategy": {"name": report.strategy, "because": report.because},
        "changes": [dataclasses.asdict(change) for change in report.changes],
        "prompts": None
        if report.prompts is None
        else {**dataclasses.asdict(report.prompts), "n_ctx": report.prompts.n_ctx},
    }


ENGINE = (
    *("strategy", "instances", "n_slots", "n_ctx", "kv", "kv_cells", "type_k", "type_v", "n_ubatch", "flash_attn"),
    *("n_threads", "n_threads_batch", "n_gpu_layers", "extra_bufts", "use_mmap"),
)


def _machine(report: Report) -> Mapping[str, Any]:
    machine = report.machine
    return {
        "cores": machine.cores,
        "free_bytes": machine.available_bytes,
        "assumed": report.given_bytes is not None,
        "address_space": machine.address_space,
        "data_bytes": machine.data_bytes,
        "repacks_for": sorted(machine.features),
        "gpus": [dataclasses.asdict(gpu) for gpu in machine.gpus],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "n_ctx": row.n_ctx,
        "slots": row.slots,
        "most_slots": row.most_slots,
        "slot_bytes": row.slot_bytes,
        "total": row.memory.total,
        "kv_cache": row.memory.kv_cache,
    }
