"""Live: the slots, the queue and the speed of a server's engines, without prompts and outputs. The engines are asked at
most ten times a second, and all watchers share the figures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from llamabatch.engine.engine_state import EngineState
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import EngineClosedError
from llamabatch.monitor.host import MachineSample, MachineSampler
from llamabatch.scheduler.slot_state import SlotState, WaitingState
from llamabatch.server.serving.serving import Serving
from llamabatch.utils.histogram import LIMITS_S, Histogram

EVERY_S = 0.1
WINDOW_S = 2.0  # seconds over which speeds and gaps are measured
_LOOK_S = 5.0  # seconds to wait for an engine; after that, the last figures are returned again

Json = dict[str, Any]


class Live:
    """Collects the figures of a server's engines. Call all methods except `machine` on an event loop."""

    def __init__(self, serving: Serving) -> None:
        self._serving: weakref.ref[Serving] = weakref.ref(serving)
        self._past: deque[tuple[float, EngineStats]] = deque()
        self._seen: tuple[float, EngineStats, list[EngineState]] | None = None
        self._looking: asyncio.Future[Any] | None = None
        self._sampler: MachineSampler | None = None
        self._client: weakref.ref[Any] | None = None
        self._event: tuple[object, str, bytes] | None = None  # the last event, as (_seen, state, bytes)

    async def look(self) -> tuple[EngineStats, list[EngineState]]:
        """Returns figures and states. They are at most EVERY_S old, or older if an engine does not answer within 5 s.

        Raises:
            ApiError: the model is not available.
            EngineClosedError: the engine has ended.
        """
        serving = self._serving()
        assert serving is not None
        client = serving.client
        if self._client is None or self._client() is not client:
            self._client, self._seen = weakref.ref(client), None
            self._past.clear()
        if self._seen is not None and time.monotonic() - self._seen[0] < EVERY_S * 0.9:
            return self._seen[1:]
        if self._looking is None or self._looking.get_loop() is not asyncio.get_running_loop():
            self._looking = asyncio.ensure_future(serving.on_thread(_look, client))
            self._looking.add_done_callback(self._keep)
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):  # two different classes before Python 3.11
            await asyncio.wait_for(asyncio.shield(self._looking), _LOOK_S)
        if self._seen is None:
            raise EngineClosedError("the engine has not answered yet")
        return self._seen[1:]

    def _keep(self, looking: asyncio.Future[Any]) -> None:
        self._looking = None
        if looking.cancelled() or looking.exception() is not None:
            return
        now, (stats, states) = time.monotonic(), looking.result()
        self._seen = now, stats, states
        self._past.append((now, stats))
        while len(self._past) > 2 and self._past[1][0] <= now - WINDOW_S:
            self._past.popleft()

    @property
    def last(self) -> tuple[EngineStats, list[EngineState]]:
        """The last figures, without slots. They let counters keep their values while no engine runs."""
        if self._seen is None:
            return EngineStats(), []
        return self._seen[1].of_the_past(), []

    def rates(self) -> Json:
        """Returns the speeds over about the last WINDOW_S seconds. The span is shorter after the first calls of `look`,
        and longer if calls are rare."""
        if len(self._past) < 2:
            return rates(EngineStats(), 0.0)
        (before_s, before), (now_s, now) = self._past[0], self._past[-1]
        return rates(now.since(before), now_s - before_s)

    def machine(self) -> MachineSample:
        """Returns the use of the machine since the last call. Takes milliseconds, so call it on a worker thread."""
        serving = self._serving()
        if self._sampler is None:
            self._sampler = MachineSampler(lambda: _pids(self._serving()))
        return MachineSample() if serving is None else self._sampler.sample()

    async def event(self) -> bytes:
        """Returns the data about the engines that the page shows, as a server-sent event.

        All watchers share the event until the figures change. Raises the errors of `look`.
        """
        serving = self._serving()
        assert serving is not None
        stats, states = await self.look()
        made, state = self._event, serving.state
        if made is None or made[0] is not self._seen or made[1] != state:
            made = self._event = self._seen, state, sse(self._document(serving, state, stats, states))
        return made[2]

    def _document(self, serving: Serving, state: str, stats: EngineStats, states: list[EngineState]) -> Json:
        return {
            "time": time.time(),
            "state": state,
            "model": serving.names[0],
            "open": serving.n_open,
            "slots": [slot_document(slot, place, each) for place, each in enumerate(states) for slot in each.slots],
            "queue": queue_document(stats, states),
            "rates": self.rates(),
            "totals": totals(stats),
        }


def sse(document: Json) -> bytes:
    """Returns a document as a server-sent event."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def _look(client: Any) -> tuple[EngineStats, list[EngineState]]:
    return client.stats(), client.states()


def _pids(serving: Serving | None) -> list[int]:
    if serving is None or serving.state not in ("ready", "restarting", "draining"):
        return []
    try:
        return serving.client.pids
    except Exception:  # the server was closed a moment ago
        return []


_lives: weakref.WeakKeyDictionary[Serving, Live] = weakref.WeakKeyDictionary()


def live_of(serving: Serving) -> Live:
    """Returns the Live object of a server."""
    live = _lives.get(serving)
    if live is None:
        live = _lives[serving] = Live(serving)
    return live


def slot_document(slot: SlotState, engine: int, state: EngineState) -> Json:
    """Returns a slot as plain values.

    Args:
        engine: the index of the slot's engine.
    """
    document: Json = {"id": slot.id, "engine": engine, "n_ctx": state.n_ctx, "n_cells": slot.n_cells}
    if slot.request_id is None:
        return document | {"state": "free"}
    phase = "waiting for a prefix" if slot.waits_for is not None else "prompt" if slot.is_prefilling else "output"
    return document | {
        "state": phase,
        "request": request_name(slot),
        "tier": tier(slot),
        "priority": slot.priority,
        "n_prompt": slot.n_prompt,
        "n_prompt_done": slot.n_prompt_done,
        "n_cached": slot.n_cached,
        "n_output": slot.n_output,
        "max_output": slot.max_output,
        "prefix": slot.prefix,
        "waits_for": slot.waits_for,
        "adapters": list(slot.adapters),
        "age_s": round(slot.age_s, 3),
        "running_s": round(slot.running_s, 3),
    }


def queue_document(stats: EngineStats, states: Sequence[EngineState]) -> Json:
    """Returns the queues of all engines as plain values, with the reasons why the next requests wait."""
    waiting = [one for state in states for one in state.waiting]
    return {
        "n": sum(state.n_waiting for state in states),
        "embeddings": sum(state.n_embeddings for state in states),
        "next": [
            {
                "request": request_name(one),
                "tier": tier(one),
                "priority": one.priority,
                "n_prompt": one.n_prompt,
                "n_output": one.n_output,
                "age_s": round(one.age_s, 3),
                "reason": one.reason,
            }
            for one in waiting
        ],
        "rejected": stats.rejected,
    }


def request_name(one: SlotState | WaitingState) -> str:
    """Returns the id of a request, followed by the index of the continuation if the index is not 0."""
    return f"{one.request_id}.{one.index}" if one.index else str(one.request_id)


def tier(one: SlotState | WaitingState) -> str:
    """Returns the service_tier of this request: flex, priority or default."""
    return "flex" if one.background else "priority" if one.priority < 0 else "default"


def rates(span: EngineStats, seconds: float) -> Json:
    """Returns the speeds in a span of `seconds`. The gaps between tokens are None if the span has no gaps."""
    gaps = span.inter_token_s

    def each_second(count: int) -> float:
        return round(count / seconds, 2) if seconds > 0 else 0.0

    return {
        "window_s": round(seconds, 3),
        "tokens_per_s": each_second(span.generated_tokens),
        "prompt_tokens_per_s": each_second(span.prefill_tokens + span.embed_tokens),
        "steps_per_s": each_second(span.decode_calls),
        "requests_per_s": each_second(span.ok + span.errors + span.aborted),
        "rows_per_step": round(span.rows_per_step, 3),
        "passes_per_step": round(span.passes_per_step, 3),
        "gap_p50_s": gaps.percentile(50),
        "gap_p95_s": gaps.percentile(95),
        "gap_max_s": longest(gaps),
    }


def longest(gaps: Histogram) -> float | None:
    """Returns the upper limit of the bucket of the longest duration, in seconds; None: there are no durations."""
    filled = [place for place, count in enumerate(gaps.counts) if count]
    return LIMITS_S[min(filled[-1], len(LIMITS_S) - 1)] if filled else None


def totals(stats: EngineStats) -> Json:
    """Returns the figures for the page: counts since the start, and the number of slots and running continuations."""
    return {
        "requests": stats.submitted,
        "ok": stats.ok,
        "errors": stats.errors,
        "aborted": stats.aborted,
        "prompt_tokens": stats.prompt_tokens + stats.embed_tokens,
        "generated_tokens": stats.generated_tokens,
        "cached_tokens": stats.prefix_tokens + stats.shared_tokens,
        "preemptions": stats.preemptions,
        "restarts": stats.restarts,
        "slots": stats.n_slots,
        "running": stats.running,
    }
