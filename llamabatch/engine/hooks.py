"""Callbacks of an engine: for its outputs, for admitted requests, and for its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.request import Request

# A sink receives outputs: those of each step if tokens are streamed, otherwise only those of finished requests.
Sink = Callable[[list[SequenceOutput]], None]
# A failover takes over requests of an engine that is gone. Arguments: requests, sink, stream, reason. Never raises.
Failover = Callable[[list[Request], Sink, bool, str], None]


@dataclass
class EngineHooks:
    """Callbacks called by an engine in its own thread, and the time of the engine's last output.

    Attributes:
        admitted: called with the ids of requests before any part of them is computed.
        failed: called with the reason once the engine cannot go on. The waiting requests end after this call.
        last_token_s: time.perf_counter() of the last step with an output; None before the first such step.
    """

    admitted: Callable[[list[str]], None]
    failed: Callable[[str], None]
    last_token_s: float | None = None
