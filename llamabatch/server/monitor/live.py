"""Live: the slots, the queue and the speed of a server's engines, looked at ten times a second at most for all watchers
together. Never a prompt, never an output.
"""

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
WINDOW_S = 2.0  # of speeds and gaps
_LOOK_S = 5.0  # for an engine to answer, before what was last seen is shown

Json = dict[str, Any]


class Live:
    """Looks at the engines of one server. Its methods belong to an event loop unless they say more."""

    def __init__(self, serving: Serving) -> None:
        self._serving: weakref.ref[Serving] = weakref.ref(serving)
        self._past: deque[tuple[float, EngineStats]] = deque()
        self._seen: tuple[float, EngineStats, list[EngineState]] | None = None
        self._looking: asyncio.Future[Any] | None = None
        self._sampler: MachineSampler | None = None
        self._client: weakref.ref[Any] | None = None
        self._event: tuple[object, str, bytes] | None = None  # the look and the state that it was made of

    async def look(self) -> tuple[EngineStats, list[EngineState]]:
        """Figures and states of at most EVERY_S ago; of before, where an engine takes longer than 5 s to answer.

        Raises:
            ApiError: the model is not there. EngineClosedError: the engine is gone.
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
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):  # two classes before Python 3.11
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
        """The last figures that were seen, so that counters stand still while there is no engine; no slots."""
        if self._seen is None:
            return EngineStats(), []
        return self._seen[1].of_the_past(), []

    def rates(self) -> Json:
        """Speeds of the last WINDOW_S seconds, as far as there were looks."""
        if len(self._past) < 2:
            return rates(EngineStats(), 0.0)
        (before_s, before), (now_s, now) = self._past[0], self._past[-1]
        return rates(now.since(before), now_s - before_s)

    def machine(self) -> MachineSample:
        """The machine since the last call. Takes milliseconds: on a worker's thread."""
        serving = self._serving()
        if self._sampler is None:
            self._sampler = MachineSampler(lambda: _pids(self._serving()))
        return MachineSample() if serving is None else self._sampler.sample()

    async def event(self) -> bytes:
        """All that a page shows of the engines, as a server-sent event: one for all watchers of a look.

        Raises:
            As look.
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
    """A document as a server-sent event."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def _look(client: Any) -> tuple[EngineStats, list[EngineState]]:
    return client.stats(), client.states()


def _pids(serving: Serving | None) -> list[int]:
    if serving is None or serving.state not in ("ready", "restarting", "draining"):
        return []
    try:
        return serving.client.pids
    except Exception:  # it was closed a moment ago
        return []


_lives: weakref.WeakKeyDictionary[Serving, Live] = weakref.WeakKeyDictionary()


def live_of(serving: Serving) -> Live:
    """The Live of a server."""
    live = _lives.get(serving)
    if live is None:
        live = _lives[serving] = Live(serving)
    return live


def slot_document(slot: SlotState, engine: int, state: EngineState) -> Json:
    """A slot as plain values.

    Args:
        engine: number of its engine.
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
    """The queues of all engines as plain values: how many wait, and the next of them with the reasons."""
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
    """Id of a request; with several continuations, the number of this one behind it."""
    return f"{one.request_id}.{one.index}" if one.index else str(one.request_id)


def tier(one: SlotState | WaitingState) -> str:
    """The tier in the words of service_tier: flex, priority or default."""
    return "flex" if one.background else "priority" if one.priority < 0 else "default"


def rates(span: EngineStats, seconds: float) -> Json:
    """Speeds of a span; gaps are None where there were none."""
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
    """Upper limit of the bucket of the longest duration, seconds; None: there are none."""
    filled = [place for place, count in enumerate(gaps.counts) if count]
    return LIMITS_S[min(filled[-1], len(LIMITS_S) - 1)] if filled else None


def totals(stats: EngineStats) -> Json:
    """Counts since the start that a page shows."""
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
