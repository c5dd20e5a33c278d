"""Answers a Question from the header of a model's file, the machine and, if prompts are given, the vocabulary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llamabatch.config import MAX_CTX, MAX_SLOTS, EngineConfig, ResolvedConfig, with_paths
from llamabatch.engine.resolve_config import machine_here, read_facts
from llamabatch.errors import ConfigError, MemoryPlanError
from llamabatch.gguf.resolve import resolve as resolve_path
from llamabatch.llama.tuned_load import profile_for
from llamabatch.planning.capacity import resolve
from llamabatch.planning.machine import Machine
from llamabatch.planning.memory import PROCESS_BYTES
from llamabatch.planning.model_facts import ModelFacts
from llamabatch.planning.plan import MEMORY_SHARE, fits, planned
from llamabatch.tools.plan.advice import changes, lengths, slots_that_fit, strategy
from llamabatch.tools.plan.report import Lengths, Report, Row
from llamabatch.utils.checks import integer, number, show
from llamabatch.utils.paths import absolute

_UNLIMITED = 2**62
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)I?B?$", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Question:
    """A model, options and a load to plan for. Raises ConfigError.

    Attributes:
        model: path of a .gguf file, or "tiny".
        engine: options of EngineConfig.
        prompts: a file of prompts, one per line or JSONL. The longest prompt decides n_ctx unless n_ctx is given.
        max_tokens: tokens that each prompt may generate.
        memory_bytes: free memory of another machine to plan for; None: this machine.
        load: number of requests that arrive at the same time; None: many.
        latency_ms: limit of the p95 of the time between two tokens, in milliseconds; None: no limit.
    """

    model: str = "tiny"
    engine: Mapping[str, Any] = field(default_factory=dict)
    prompts: Path | None = None
    max_tokens: int = 256
    memory_bytes: int | None = None
    load: int | None = None
    latency_ms: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", with_paths({"model": self.model})["model"])
        object.__setattr__(self, "engine", with_paths(self.engine))
        if self.prompts is not None:
            object.__setattr__(self, "prompts", Path(absolute(self.prompts)))
        integer(ConfigError, "max_tokens", self.max_tokens, 1, MAX_CTX)
        if self.load is not None:
            integer(ConfigError, "load", self.load, 1, 10**9)
        if self.latency_ms is not None:
            number(ConfigError, "latency_ms", self.latency_ms, 1e-3, 1e9)
        if self.memory_bytes is not None:
            integer(ConfigError, "memory", self.memory_bytes, 1, 2**60)
        self.config()

    def config(self) -> EngineConfig:
        return EngineConfig.from_options(self.model, self.engine)


def size_in_bytes(text: str) -> int:
    """Returns the bytes of "8G", "512M" or "1.5 GiB", in binary units. Raises ConfigError."""
    match = _SIZE.match(text.strip())
    if match is None:
        raise ConfigError(f"memory is {show(text)}; give a size such as 8G or 512M")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def answer(question: Question) -> Report:
    """Returns the report for a question. Loads llama.cpp's library, and with prompts a vocabulary, but no weights.

    Raises:
        InputError: the model's header is damaged, or an option is refused.
    """
    config = question.config()
    path = resolve_path(question.model)
    facts = read_facts(config, path)
    profile = profile_for(path, config)
    machine = machine_here(config, computes_here=False)
    if question.memory_bytes is not None:
        # available_bytes never contains the memory of this process
        free = max(0, question.memory_bytes - PROCESS_BYTES)
        machine = replace(machine, available_bytes=free, address_space=None, data_bytes=None, gpus=())
    prompts = _lengths(question, path) if question.prompts is not None else None
    if prompts is not None and config.n_ctx == "auto":
        config = replace(config, n_ctx=_context_for(prompts, facts))
    load = question.load if question.load is not None or prompts is None else prompts.count
    plan, refusal = None, None
    try:
        plan = requested = resolve(config, facts, machine, profile)
    except MemoryPlanError as error:
        refusal = str(error)
        least = replace(config, n_slots=1) if config.n_slots == "auto" else config
        least = replace(least, cache_ram=0) if config.cache_ram == "auto" else least  # "auto" needs no memory
        roomy = replace(machine, available_bytes=_UNLIMITED, address_space=None, data_bytes=None, gpus=())
        requested = resolve(least, facts, roomy, profile)
    facts = facts.on(machine, requested.config.extra_bufts)
    # The options for counting the slots that fit. All slots get their memory at the start. strategy="auto" becomes
    # "batched", because "auto" may have chosen "sequential", which has one slot. cache_ram="auto" becomes 0, because
    # "auto" takes only spare memory.
    many = replace(requested.config, start_slots=MAX_SLOTS)
    if config.cache_ram == "auto":
        many = replace(many, cache_ram=0)
    if config.strategy == "auto":
        many = replace(many, strategy="batched")
    suits, because = strategy(requested, machine, profile, load, question.latency_ms)
    return Report(
        model=facts.name,
        file_bytes=facts.file_bytes,
        machine=machine,
        given_bytes=question.memory_bytes,
        plan=plan,
        refusal=refusal,
        requested=requested,
        total_bytes=requested.total_bytes,
        rows=tuple(_row(facts, many, machine, n) for n in lengths(facts, requested.config.n_ctx)),
        instances=_children(facts, replace(requested.config, cache_ram=many.cache_ram), machine),
        strategy=suits,
        because=because,
        changes=changes(facts, many, machine, plan is not None),
        prompts=prompts,
    )


def _context_for(prompts: Lengths, facts: ModelFacts) -> int:
    """Returns the n_ctx for these prompts. Raises ConfigError if the model's longest context is too short."""
    if prompts.n_ctx > facts.n_ctx_most:
        raise ConfigError(
            f"the longest prompt of {prompts.source} has {prompts.longest} tokens and gets {prompts.output} more; "
            f"{facts.name} was trained for {facts.n_ctx_most}"
        )
    return max(32, prompts.n_ctx)


def _lengths(question: Question, path: Path) -> Lengths:
    from llamabatch.llama.model import Model
    from llamabatch.tools.workload import load  # imported late, since the import loads llama.cpp's library

    assert question.prompts is not None
    with closing(Model(path, question.config(), vocab_only=True)) as vocabulary:
        found = sorted(len(ids) for ids in load(question.prompts, vocabulary, MAX_CTX).prompts)

    def at(share: float) -> int:
        return found[min(len(found) - 1, int(share * len(found)))]

    return Lengths(question.prompts.name, len(found), at(0.5), at(0.95), found[-1], question.max_tokens)


def _row(facts: ModelFacts, requested: ResolvedConfig, machine: Machine, n_ctx: int) -> Row:
    config = replace(requested, n_ctx=n_ctx, kv="split", kv_cells=0, instances=1)
    slots = slots_that_fit(facts, config, machine, MEMORY_SHARE)
    one, two = (planned(facts, replace(config, n_slots=n), machine).memory for n in (4, 5))
    shown = planned(facts, replace(config, n_slots=max(1, slots)), machine).memory
    per_slot = two.total - one.total + sum(b.total - a.total for a, b in zip(one.gpus, two.gpus, strict=True))
    return Row(n_ctx, slots, slots_that_fit(facts, config, machine, 1.0), shown, per_slot)


def _children(facts: ModelFacts, requested: ResolvedConfig, machine: Machine) -> int:
    """Returns the number of engines that fit as child processes in half of the free memory, at most one per core."""
    config = replace(requested, strategy="multi-instance")
    most = 0
    for count in range(1, min(machine.cores, MAX_SLOTS) + 1):
        if not fits(facts, replace(config, instances=count), machine, MEMORY_SHARE):
            break
        most = count
    return most
