"""/slots: the state of each slot without its texts, once or as a stream. Saves slots to files and restores them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.engine.engine_state import EngineState
from llamabatch.errors import EngineClosedError
from llamabatch.scheduler.slot_state import SlotState
from llamabatch.server.http.errors import ApiError
from llamabatch.server.llama_server.dialect import in_dialect
from llamabatch.server.monitor.live import EVERY_S, Json, live_of, sse, tier
from llamabatch.server.request.json_body import read_json
from llamabatch.server.request.reading import check_model
from llamabatch.server.response.answer import json_response
from llamabatch.server.response.event_stream import EVENT_STREAM_HEAD
from llamabatch.server.serving.serving import Serving, serving_of
from llamabatch.utils.checks import show

_YES, _NO = ("1", "true"), ("0", "false", "")
MAX_WATCHERS = 32  # maximum number of open streams in this process


def slot_documents(states: list[EngineState], *, speculates: bool) -> list[Json]:
    """Returns llama-server's list of slots. The numbers of the slots continue from engine to engine."""
    found, first = [], 0
    for state in states:
        found += [_slot(slot, first + slot.id, state, speculates) for slot in state.slots]
        first += len(state.slots)
    return found


def _slot(slot: SlotState, number: int, state: EngineState, speculates: bool) -> Json:
    n_left = slot.max_output - slot.n_output if slot.is_processing else -1
    return {
        "id": number,
        "id_task": slot.number,
        "n_ctx": state.n_ctx,
        "speculative": speculates,
        "is_processing": slot.is_processing,
        "n_prompt_tokens": slot.n_prompt if slot.is_processing else slot.n_cells,
        "n_prompt_tokens_processed": slot.n_prompt_done - slot.n_cached if slot.is_processing else 0,
        "n_prompt_tokens_cache": slot.n_cached,
        "next_token": [
            {
                "has_next_token": slot.is_processing,
                "n_remain": n_left,
                "n_decoded": slot.n_output,
            }
        ],
        "tier": tier(slot),
        "adapters": list(slot.adapters),
    }


async def slots(request: HttpRequest) -> Any:
    """Lists the slots; with ?stream=1, sends ten events a second."""
    serving, query = serving_of(request), request.query_params
    if not serving.options.slots:
        raise ApiError(501, "this server does not answer /slots; start it without --no-slots")
    stream = query.get("stream", "0")
    if stream not in _YES and stream not in _NO:
        raise ApiError(400, f"stream is {show(stream)}; give 1 or 0", param="stream")
    if stream in _YES:
        return SlotEvents(serving)
    serving.check_ready()
    check_model(query.get("model") or None, serving)
    _, states = await live_of(serving).look()
    found = slot_documents(states, speculates=serving.plan.config.speculate != "off")
    if query.get("fail_on_no_slot", "") not in ("", "0") and all(slot["is_processing"] for slot in found):
        raise ApiError(503, "no slot is free", headers={"Retry-After": "1"})
    return json_response(found)


class SlotEvents:
    """An ASGI response with the live view of a server's engines, as server-sent events.

    The response ends when its reader leaves or the server stops. A slow reader gets fewer events, but never old ones.
    """

    _n_open = 0  # open streams of this process

    def __init__(self, serving: Serving) -> None:
        if SlotEvents._n_open >= MAX_WATCHERS:
            raise ApiError(
                429, f"there are {MAX_WATCHERS} streams of /slots already; close one", headers={"Retry-After": "5"}
            )
        self._serving = serving

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        SlotEvents._n_open += 1
        leaving = asyncio.ensure_future(_leaves(receive))
        try:
            await send(dict(EVENT_STREAM_HEAD))
            loop = asyncio.get_running_loop()
            due_s = loop.time()
            while not leaving.done():
                body = await self._event()
                is_last = self._serving.state in ("draining", "failed")
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})
                if is_last:
                    return
                due_s = max(due_s + EVERY_S, loop.time() + EVERY_S / 4)
                await asyncio.wait([leaving], timeout=due_s - loop.time())
        finally:
            SlotEvents._n_open -= 1
            leaving.cancel()

    async def _event(self) -> bytes:
        """Returns an event with the slots. Before the model is loaded and after the engine has ended, the event has the
        state of the server instead."""
        try:
            return await live_of(self._serving).event()
        except (ApiError, EngineClosedError) as error:
            return sse({"state": self._serving.state, "message": ApiError.of(error).public_message})


async def _leaves(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def slot_action(request: HttpRequest) -> Any:
    """Saves, restores or erases the text of a slot, as llama-server does with --slot-save-path."""
    serving, action = serving_of(request), request.query_params.get("action", "")
    serving.check_ready()
    if action not in ("save", "restore", "erase"):
        raise ApiError(400, f"action is {show(action)}; give save, restore or erase", param="action")
    if serving.slot_files is None:
        raise ApiError(501, "this server has no slot_save_path; --cache-disk keeps prefixes in files by itself")
    number, n_slots = request.path_params["id_slot"], serving.admission.n_slots
    if number >= n_slots:
        raise ApiError(400, f"id_slot is {number}; give 0 to {n_slots - 1}", param="id_slot")
    if action == "erase":
        return json_response({"id_slot": number, "n_erased": await serving.slot_files.erase(number)})
    name = read_json(await request.body(), request.headers).get("filename")
    began = time.perf_counter()
    act = serving.slot_files.save if action == "save" else serving.slot_files.restore
    n_tokens, n_bytes = await act(number, name)
    count, size = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
    timings = {f"{action}_ms": 1000 * (time.perf_counter() - began)}
    return json_response({"id_slot": number, "filename": name, count: n_tokens, size: n_bytes, "timings": timings})


routes = [
    Route("/slots", in_dialect(slots), methods=["GET"]),
    Route("/slots/{id_slot:int}", in_dialect(slot_action), methods=["POST"]),
]
