"""The state of the slots and of the waiting queue at one moment, without prompts and outputs. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from llamabatch.request.sequence import Sequence


@dataclass(frozen=True)
class SlotState:
    """One slot, and the continuation that uses it.

    Attributes:
        id: number of the slot, 0 .. n_slots - 1; llama.cpp's seq id.
        request_id: id of the request; None: the slot is free, and all fields below except `n_cells` are empty.
        index: number of the continuation within its request, from 0.
        number: order of arrival at the engine.
        background, priority: as in SamplingParams.
        n_prompt: number of prompt tokens.
        n_prompt_done: number of prompt tokens that are computed or copied.
        n_cached: number of prompt tokens that were copied when the continuation first began.
        n_output: number of output tokens so far.
        max_output: maximum number of output tokens of the continuation.
        n_cells: number of cells in use. A free slot may keep the cells of a finished request for other requests.
        prefix: a number that continuations share if they copied cells from one another. A continuation without copies
            has a number of its own.
        waits_for: the slot whose prefix this slot will copy once the prefix is computed; None: no copy is planned.
        adapters: names of the request's adapters.
        age_s: seconds since the request arrived.
        running_s: seconds since the continuation first got a slot.
    """

    id: int
    request_id: str | None = None
    index: int = 0
    number: int = -1
    background: bool = False
    priority: int = 0
    n_prompt: int = 0
    n_prompt_done: int = 0
    n_cached: int = 0
    n_output: int = 0
    max_output: int = 0
    n_cells: int = 0
    prefix: int = -1
    waits_for: int | None = None
    adapters: tuple[str, ...] = ()
    age_s: float = 0.0
    running_s: float = 0.0

    @property
    def is_processing(self) -> bool:
        return self.request_id is not None

    @property
    def is_prefilling(self) -> bool:
        """True while the prompt is not completely computed."""
        return self.request_id is not None and self.n_prompt_done < self.n_prompt


@dataclass(frozen=True)
class WaitingState:
    """One continuation that waits for a slot.

    Attributes:
        request_id, index, background, priority, n_prompt, n_output, age_s: as in SlotState. If n_output is not 0, the
            continuation was preempted, or continues after a crash.
        reason: the reason of the wait. "slot": all slots are taken. "cells": the KV cache has no room for the
            continuation. "grammar": its grammar is being compiled. "company": the engine waits max_wait_ms for more
            requests. "step": the next step admits the continuation.
    """

    request_id: str
    index: int
    background: bool
    priority: int
    n_prompt: int
    n_output: int
    age_s: float
    reason: str


def slot_state(
    slot: int, sequence: Sequence, prefix: int, waits_for: int | None, now: float, ids: tuple[str, int]
) -> SlotState:
    """Returns the state of the slot of a running sequence.

    Args:
        ids: id of the request, and number of the continuation, from 0.
    """
    request, n_prompt = sequence.request, sequence.num_prompt
    return SlotState(
        id=slot,
        request_id=ids[0],
        index=ids[1],
        number=-1 if sequence.number is None else sequence.number,
        background=sequence.background,
        priority=request.params.priority,
        n_prompt=n_prompt,
        n_prompt_done=min(n_prompt, sequence.num_computed),
        n_cached=sequence.num_cached,
        n_output=sequence.num_output,
        max_output=sequence.num_output + max(0, sequence.most_steps_left),
        n_cells=sequence.num_cells,
        prefix=prefix,
        waits_for=waits_for,
        adapters=tuple(name for name, _ in request.adapters),
        age_s=now - request.arrival_s,
        running_s=0.0 if sequence.admitted_s is None else now - sequence.admitted_s,
    )


def waiting_state(sequence: Sequence, reason: str, now: float, ids: tuple[str, int]) -> WaitingState:
    """Returns the state of a sequence that waits."""
    request = sequence.request
    return WaitingState(
        request_id=ids[0],
        index=ids[1],
        background=sequence.background,
        priority=request.params.priority,
        n_prompt=sequence.num_prompt,
        n_output=sequence.num_output,
        age_s=now - request.arrival_s,
        reason=reason,
    )
