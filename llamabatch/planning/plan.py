"""A plan: the resolved options of an engine, and the memory that they need. The module also checks the free memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llamabatch.chat.conversation import without_template
from llamabatch.chat.named_templates import IN_PYTHON
from llamabatch.chat.tool_formats import GENERIC
from llamabatch.config import ResolvedConfig
from llamabatch.errors import MemoryPlanError
from llamabatch.planning.machine import Machine
from llamabatch.planning.memory import GpuNeed, Memory, memory, mib
from llamabatch.planning.model_facts import ModelFacts
from llamabatch.scheduler.policies import has_one_slot
from llamabatch.utils.paths import shown as shown_path

MEMORY_SHARE = 0.5  # the share of the free memory that "auto" may use; the rest is left to other programs


@dataclass(frozen=True)
class Plan:
    """The resolved options of an engine, its memory, and the reason for each choice.

    Attributes:
        reasoning: the family of models whose tags separate thinking from the answer in chats; "custom" with
            reasoning_tags; None: thinking is not separated.
        tools: the family of models whose notation of tool calls is parsed and forced; "generic": no known family.
        lacks_template: True if the model generates text, but its file has no chat template.
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
        """The part of one process's memory that is not mapped from a file, in bytes. RLIMIT_DATA limits this part."""
        return self.memory.data + (self._engines_here - 1) * self.memory.own

    @property
    def total_bytes(self) -> int:
        """The main memory of all engines. The rest of this process is not counted."""
        return self.memory.together(self.config.instances, children=self.in_children, mapped=self.config.use_mmap)

    @property
    def peak_bytes(self) -> int:
        """The maximum main memory of all engines together, during the load or afterwards. The memory of the load causes
        no MemoryPlanError, because it consists of mapped pages that the system can free.
        """
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


def planned(facts: ModelFacts, config: ResolvedConfig, machine: Machine) -> Plan:
    """Returns the plan of these options on this machine, without reasons. Does not check that the plan fits."""
    one = config.for_one_engine()
    if has_one_slot(config.strategy):
        one = replace(one, n_slots=1)
    shares = machine.gpu_shares(config.tensor_split) if config.n_gpu_layers else ()
    if _has_gpu_each(config, len(shares)):
        shares = (1.0,)
    return Plan(config, memory(facts, one, shares), {})


def check_fits(plan: Plan, machine: Machine, share: float = 1.0) -> None:
    """Raises MemoryPlanError if a plan needs more than `share` of the free memory, or exceeds an rlimit."""
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


def fits(facts: ModelFacts, config: ResolvedConfig, machine: Machine, share: float = 1.0) -> bool:
    """Returns True if check_fits accepts these options."""
    try:
        check_fits(planned(facts, config, machine), machine, share)
    except MemoryPlanError:
        return False
    return True


def bytes_by_place(plan: Plan, n_gpus: int) -> tuple[int, ...]:
    """Returns the bytes of all engines of a plan: in main memory, then on each of the machine's GPUs."""
    on_gpus = [n * gpu.total for gpu, n in _on_gpus(plan, n_gpus)]
    return (plan.total_bytes, *(on_gpus + [0] * n_gpus)[:n_gpus])


def _on_gpus(plan: Plan, n_gpus: int) -> list[tuple[GpuNeed, int]]:
    """Returns one pair for each GPU: the needs of one engine on it, and the number of engines on it."""
    need, n = plan.memory.gpus, plan.config.instances
    if need and _has_gpu_each(plan.config, n_gpus):
        return [(need[0], -(-(n - number) // n_gpus)) for number in range(n_gpus)]
    return [(gpu, n) for gpu in need]


def _has_gpu_each(config: ResolvedConfig, n_gpus: int) -> bool:
    """Returns True if there are several GPUs, and no engine is split between them."""
    return config.strategy == "multi-instance" and n_gpus > 1 and config.n_gpu_layers != 0
