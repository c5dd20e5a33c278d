"""Recommends a strategy, and finds changes that make a plan fit. Pure Python."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from llamabatch.config import MAX_CTX, MAX_SLOTS, ResolvedConfig
from llamabatch.planning.machine import Machine
from llamabatch.planning.memory import mib
from llamabatch.planning.model_facts import ModelFacts
from llamabatch.planning.passes import padded
from llamabatch.planning.plan import MEMORY_SHARE, Plan, fits, planned
from llamabatch.planning.profile import Profile
from llamabatch.scheduler.policies import has_one_slot
from llamabatch.tools.plan.report import Change
from llamabatch.utils.checks import counted

_MANY_CORES = 16  # from this many cores on, several engines are advised; a guess, not measured
_SMALLER = 4.85 / 8  # bytes per weight in Q4_K_M, from llama.cpp's own tables
_FEW = 32  # maximum number of slots that changes() tries when it looks for room
_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


def lengths(facts: ModelFacts, *requested: int) -> tuple[int, ...]:
    """Returns the context lengths for a table: powers of two, the model's longest context, and the requested lengths.

    The longest context is the trained context, or a longer one with a scaled rotary embedding.
    """
    most = facts.n_ctx_most
    if most == MAX_CTX:  # with rope_freq_base there is no upper bound
        most = max((facts.n_ctx_train, *requested))
    return tuple(sorted({n for n in (*_LENGTHS, most, *requested) if 32 <= n <= most}))


def slots_that_fit(
    facts: ModelFacts, config: ResolvedConfig, machine: Machine, share: float, most: int = MAX_SLOTS
) -> int:
    """Returns how many slots of one engine fit in `share` of the free memory: 0 to `most`, or at most 1 for a strategy
    with one slot. Assumes a split cache."""
    split = replace(config, kv="split", kv_cells=0, instances=1)
    limit = 1 if has_one_slot(config.strategy) else min(most, config.n_batch)
    return bisect_right(
        range(1, limit + 1), 0, key=lambda n: not fits(facts, replace(split, n_slots=n), machine, share)
    )


def strategy(
    plan: Plan, machine: Machine, profile: Profile | None, load: int | None, latency_ms: float | None
) -> tuple[str, str]:
    """Returns the recommended strategy for this machine and load, and the reason.

    Args:
        load: number of requests that arrive at the same time; None: many.
        latency_ms: limit of the p95 of the time between two tokens; None: no limit.
    """
    slots = plan.config.n_slots
    if load == 1:
        return "sequential", "one request at a time: there is no other to share a pass with"
    if slots == 1:
        return "sequential", "one slot, so one request at a time"
    if machine.n_gpus > 1 and plan.config.n_gpu_layers != 0:
        return "multi-instance", f"{machine.n_gpus} GPUs: an engine on each, each of them batched"
    if profile is not None and profile.best_rows(lambda rows: True) == 1:
        if latency_ms is not None:
            return (
                "interleaved",
                f"{profile.source}: more rows in a pass do not pay here; requests take turns",
            )
        return "length-sorted", f"{profile.source}: more rows in a pass do not pay here; the shortest of a list first"
    if latency_ms is not None and profile is not None:
        return _within(plan, profile, latency_ms)
    if machine.cores >= _MANY_CORES and machine.n_gpus == 0:
        return (
            "multi-instance",
            f"{machine.cores} cores are more than one context fills: engines of 4 cores, each batched",
        )
    rows = min(slots // plan.config.instances, load or slots)
    why = f"one pass over the weights serves {counted(rows, 'request')} at once"
    if latency_ms is not None:
        why += "; how long a step takes is not known here: `llamabatch tune --p95-inter-token-ms` measures it"
    return "batched", why


def _within(plan: Plan, profile: Profile, latency_ms: float) -> tuple[str, str]:
    slots = plan.config.n_slots
    steps = {stair.rows: stair.p95_ms or stair.step_ms for stair in profile.stairs}
    found = [stair for stair in profile.stairs if steps[stair.rows] <= latency_ms and stair.rows <= slots]
    if not found:
        least = min(steps.values())
        return (
            "sequential",
            f"{profile.source}: a step takes {least:.3g} ms at least, so {latency_ms:g} ms cannot be reached",
        )
    best = max(found, key=lambda stair: stair.tokens_per_s)
    return "batched", (
        f"{profile.source}: with {counted(best.rows, 'slot')} a step takes {steps[best.rows]:.3g} ms, "
        f"within {latency_ms:g} ms"
    )


def changes(facts: ModelFacts, config: ResolvedConfig, machine: Machine, fitting: bool) -> tuple[Change, ...]:
    """Returns changes in the order of _ways. Each change alone makes the plan fit. If the plan fits already
    (`fitting`), each change makes room for more slots. In this case the first change may be a number of slots that
    takes more than half of the free memory."""
    found = []
    if fitting:
        before, all_of_it = (slots_that_fit(facts, config, machine, share, _FEW) for share in (MEMORY_SHARE, 1.0))
        if all_of_it > max(before, config.n_slots):
            one = planned(facts, replace(config, n_slots=all_of_it, kv="split", kv_cells=0), machine)
            what = f"--slots {all_of_it}, in more than half of what is free"
            found.append(Change(f"{what}: {_slots(all_of_it)} instead of {before}", one.total_bytes, all_of_it))
    for what, changed, other in _ways(facts, config, machine):
        if fitting:
            after = slots_that_fit(other, changed, machine, MEMORY_SHARE, _FEW)
            if after > before:
                one = planned(other, replace(changed, n_slots=after, kv="split", kv_cells=0), machine)
                found.append(
                    Change(f"{what.split(':')[0]}: {_slots(after)} instead of {before}", one.total_bytes, after)
                )
        elif fits(other, changed, machine):
            total = planned(other, changed, machine).total_bytes
            saved = planned(facts, config, machine).total_bytes - total
            found.append(Change(f"{what}: saves {mib(saved)}, {mib(total)} in all", total, changed.n_slots))
    return tuple(found)


def _slots(count: int) -> str:
    return counted(count, "slot")


def _ways(
    facts: ModelFacts, config: ResolvedConfig, machine: Machine
) -> Iterator[tuple[str, ResolvedConfig, ModelFacts]]:
    """Yields possible changes as tuples: a description, the changed config, and the changed facts of the model."""
    yield from _fewer(facts, config, machine)
    if config.type_k == config.type_v == "f16":
        quantised: dict[str, Any] = {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}
        yield "--type-k q8_0 --type-v q8_0", replace(config, **quantised), facts
    if config.flash_attn == "off":
        yield "--flash-attn on", replace(config, flash_attn="on"), facts
    if config.n_ubatch > 128:
        yield "--n-ubatch 128", replace(config, n_ubatch=128), facts
    if planned(facts, config, machine).memory.copies:
        plain = replace(facts, features=frozenset())
        yield "--extra-bufts off, which is slower", replace(config, extra_bufts="off"), plain
    n_weights = sum(tensor.n_elements for tensor in facts.tensors)
    smaller = int(n_weights * _SMALLER)
    if 0 < smaller < 0.9 * facts.file_bytes:
        yield (
            f"the same model as Q4_K_M, a file of about {mib(smaller)}",
            config,
            replace(facts, file_bytes=smaller, tensors=()),
        )


def _fewer(
    facts: ModelFacts, config: ResolvedConfig, machine: Machine
) -> Iterator[tuple[str, ResolvedConfig, ModelFacts]]:
    """Yields up to four possible changes, in the form of _ways: fewer slots, a shorter context, a unified cache, and
    one engine."""
    n_ctx, n_slots, n = config.n_ctx, config.n_slots, config.instances
    split = replace(config, kv="split", kv_cells=0)
    slots = bisect_right(range(1, n_slots + 1), 0, key=lambda k: not fits(facts, replace(split, n_slots=k), machine))
    if 0 < slots < n_slots:
        yield f"with n_ctx {n_ctx:,}: {_slots(slots)}", replace(split, n_slots=slots), facts
    for shorter in sorted((each for each in lengths(facts) if each < n_ctx), reverse=True):
        if fits(facts, replace(split, n_ctx=shorter), machine):
            yield f"with n_ctx {shorter:,}: {_slots(n_slots)}", replace(split, n_ctx=shorter), facts
            break
    if config.kv != "unified" and n_slots > 1:
        cells = _cells(facts, config, machine)
        if cells:
            unified = replace(config, kv="unified", kv_cells=cells)
            yield f"--kv unified --kv-cells {cells}, shared by {n_slots} slots", unified, facts
    if n > 1:
        yield "--instances 1", replace(config, instances=1), facts


def _cells(facts: ModelFacts, config: ResolvedConfig, machine: Machine) -> int:
    """Returns the number of cells of the largest unified cache that fits; 0 if not even n_ctx cells fit."""
    least = padded(config.n_ctx)
    step, most = 256, least * config.n_slots

    def too_many(number: int) -> bool:
        return not fits(facts, replace(config, kv="unified", kv_cells=least + number * step), machine)

    found = bisect_right(range((most - least) // step + 1), 0, key=too_many)
    return least + (found - 1) * step if found else 0
