"""EngineState: the slots and the queue of an engine at one moment, for callers that watch it live."""

from __future__ import annotations

from dataclasses import dataclass

from llamabatch.scheduler.slot_state import SlotState, WaitingState

MAX_WAITING = 64  # continuations of the queue that a state lists


@dataclass(frozen=True)
class EngineState:
    """The slots and the queue of one engine. It holds no text and no tokens.

    It is read while a step may be under way, so that two of its figures can be of neighbouring steps.

    Attributes:
        slots: all of them, by id.
        waiting: the next continuations to be admitted, at most MAX_WAITING, in the order of the queue.
        n_waiting: all that wait, texts to embed and requests on their way to the engine included.
        n_embeddings: texts to embed among them.
        n_ctx: tokens that one slot may hold.
        steps: steps since the start.
    """

    slots: tuple[SlotState, ...]
    waiting: tuple[WaitingState, ...] = ()
    n_waiting: int = 0
    n_embeddings: int = 0
    n_ctx: int = 0
    steps: int = 0
