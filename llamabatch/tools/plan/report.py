"""The result of `llamabatch plan`, as an object and as a JSON document."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamabatch.planning.machine import Machine
from llamabatch.planning.memory import PROCESS_BYTES, Memory
from llamabatch.planning.plan import Plan
from llamabatch.utils.format import attributes

SCHEMA_VERSION = 1
ENGINE = (
    *("strategy", "instances", "n_slots", "n_ctx", "kv", "kv_cells", "type_k", "type_v", "n_ubatch", "flash_attn"),
    *("n_threads", "n_threads_batch", "cache_ram", "n_gpu_layers", "extra_bufts", "use_mmap", "use_mlock", "pooling"),
    *("rope_scaling", "rope_freq_base", "rope_freq_scale"),
)


@dataclass(frozen=True)
class Lengths:
    """The lengths of the prompts in a file, in tokens of the model.

    Attributes:
        source: name of the file.
        count: number of prompts.
        output: tokens that each prompt may generate.
    """

    source: str
    count: int
    median: int
    p95: int
    longest: int
    output: int

    @property
    def n_ctx(self) -> int:
        """The number of tokens of the longest prompt and its output."""
        return self.longest + self.output


@dataclass(frozen=True)
class Row:
    """The number of slots that fit if the context has a given length.

    Attributes:
        n_ctx: tokens that one request may use.
        slots: slots that fit in half of the free memory, the share that "auto" takes.
        most_slots: slots that fit in all of the free memory.
        memory: memory of one engine with `slots` slots, or with one slot if `slots` is 0.
        slot_bytes: memory of each additional slot, on all devices together.
    """

    n_ctx: int
    slots: int
    most_slots: int
    memory: Memory
    slot_bytes: int


@dataclass(frozen=True)
class Change:
    """A recommended change. `what` describes it. `total_bytes` and `slots` are those of the plan after the change."""

    what: str
    total_bytes: int
    slots: int


@dataclass(frozen=True)
class Report:
    """The whole result.

    Attributes:
        model: name of the model.
        file_bytes: size of the model's file.
        machine: the machine to plan for. available_bytes does not include the memory of llamabatch's own process.
        given_bytes: the value of --memory; None: not given. It includes the memory of llamabatch's own process.
        plan: the options of an engine that would start; None: the options do not fit.
        refusal: the reason why the options do not fit, else None.
        requested: the plan of the options as given, whether they fit or not.
        total_bytes: memory of all engines of `requested`, without llamabatch's own process.
        rows: one row per context length, the shortest first.
        instances: number of engines with the options of `requested` that fit as child processes in half of the free
            memory; at most one for each core.
        strategy: the recommended strategy.
        because: the reason for this strategy.
        changes: changes that make the options fit, or that make room for more slots.
        prompts: lengths of the prompts in --prompts.
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
        """The memory of one engine with the requested options, whether it fits or not."""
        return self.requested.memory


def document(report: Report) -> dict[str, Any]:
    """Returns the document of `--json`, which docs/plan.md describes. All sizes are in bytes."""
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
