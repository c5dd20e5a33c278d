"""EngineState: the slots and the queue of an engine at one moment, for callers that watch it live."""

from __future__ import annotations

from dataclasses import dataclass

from llamabatch.scheduler.slot_state import SlotState, WaitingState

MAX_WAITING = 64  # maximum number of waiting continuations listed in a state


@dataclass(frozen=True)
class EngineState:
    """The slots and the queue of one engine, without text and tokens.

    A step may run while the state is read, so two figures can come from neighbouring steps.

    Attributes:
        slots: all slots, by id.
        waiting: the continuations that will be admitted next, at most MAX_WAITING, in the order of the queue.
        n_waiting: number of waiting continuations, texts to embed, and requests on their way to the engine.
        n_embeddings: number of waiting texts to embed.
        n_ctx: the size of a slot in tokens.
        steps: steps since the start.
    """

    slots: tuple[SlotState, ...]
    waiting: tuple[WaitingState, ...] = ()
    n_waiting: int = 0
    n_embeddings: int = 0
    n_ctx: int = 0
    steps: int = 0
