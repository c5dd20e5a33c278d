"""Whom an engine tells what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.request import Request

Sink = Callable[[list[SequenceOutput]], None]
# Takes over requests with their sink, streamed or not, of an engine that is gone for this reason. Does not raise.
Failover = Callable[[list[Request], Sink, bool, str], None]


@dataclass
class EngineHooks:
    """Who has to know what an engine is about to do, before it may end the process.

    Attributes:
        admitted: called with the ids of requests before anything of them is computed, from the engine's thread.
        failed: called with the reason when the engine cannot go on, before those who wait are told.
        last_token_s: time.perf_counter() when a step last brought something; None before.
    """

    admitted: Callable[[list[str]], None]
    failed: Callable[[str], None]
    last_token_s: float | None = None
