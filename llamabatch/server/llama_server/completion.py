"""llama-server's /completion, /completions and /infill. OpenAI's /v1/completions is another endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from llamabatch.errors import EngineClosedError
from llamabatch.request.outputs import RequestOutput
from llamabatch.server.http.errors import ApiError
from llamabatch.server.llama_server.completion_body import (
    InfillBody,
    LlamaCompletionBody,
    read_infill,
    read_llama_completion,
)
from llamabatch.server.llama_server.completion_response import (
    Context,
    LlamaCompletionChunks,
    TimeLimit,
    completion_documents,
)
from llamabatch.server.llama_server.dialect import in_dialect
from llamabatch.server.monitor.live import EVERY_S, live_of
from llamabatch.server.request.infill import missing_marks
from llamabatch.server.request.reading import adapter_ids, read_body, with_model
from llamabatch.server.response.event_stream import EventStream
from llamabatch.server.response.generation import respond
from llamabatch.server.serving.dispatcher import RequestStream
from llamabatch.server.serving.serving import Serving, serving_of


async def completion(request: HttpRequest) -> Any:
    """Continues prompts."""
    serving = serving_of(request)
    return await _answer(serving, with_model(await read_body(request, serving, read_llama_completion), serving))


async def infill(request: HttpRequest) -> Any:
    """Fills the gap between two texts."""
    serving = serving_of(request)
    serving.check_ready()
    missing = missing_marks(serving.model.special_ids)
    if missing:
        raise ApiError(501, f"infill is not supported by this model: its vocabulary has no {', '.join(missing)}")
    body: InfillBody = await read_body(request, serving, read_infill)
    return await _answer(serving, with_model(body, serving))


async def _answer(serving: Serving, body: LlamaCompletionBody) -> Any:
    adapters = adapter_ids(serving)
    lora: Mapping[str, float] = body.adapter_scales(adapters) or {}
    context = Context(
        body, serving.model, body.model or serving.names[0], serving.client.plan.config.n_ctx, lora, adapters
    )
    limit, n = TimeLimit(body.limit_ms), body.params.n

    def documents(outputs: Sequence[RequestOutput], _: int) -> Any:
        found = completion_documents(context, outputs, lambda index: index // n in limit.over)
        return found if body.is_list else found[0]

    def chunks(call: RequestStream, _: object) -> LlamaCompletionChunks:
        made = LlamaCompletionChunks(context, lambda places: _end(serving, call, places))
        made.begin(call.prompt_lengths)
        return made

    return await respond(
        serving,
        body,
        documents,
        chunks,
        outputs=partial(_outputs, serving, limit) if body.limit_ms else None,
        is_large=True,  # each response contains the text of its prompt, which may be long
        stream=ProgressStream if body.return_progress else EventStream,
    )


async def _outputs(serving: Serving, limit: TimeLimit, call: RequestStream) -> list[RequestOutput]:
    async for outputs in call:
        late = limit.look(outputs)
        if late:
            _end(serving, call, late)
    assert call.submission is not None
    return call.submission.outputs


def _end(serving: Serving, call: RequestStream, places: list[int]) -> None:
    """Aborts the requests of the prompts with these indices. `call` still returns the outputs made so far."""
    assert call.submission is not None
    serving.abort([call.submission.requests[place].request_id for place in places])


class ProgressStream(EventStream):
    """An EventStream that reports the number of computed tokens of each prompt until the prompt has output."""

    def __init__(
        self,
        serving: Serving,
        stream: RequestStream,
        chunks: LlamaCompletionChunks,
        ping_s: float,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(serving, stream, chunks, ping_s, headers)
        self._progress = chunks
        self._call = stream

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        looking = asyncio.ensure_future(self._look())
        self._call.poke()
        try:
            await super().__call__(scope, receive, send)
        finally:
            looking.cancel()

    def idle(self) -> bytes:
        """Returns the new events about the progress of the prompts, or a comment if there are no such events."""
        return self._progress.due() or super().idle()

    async def _look(self) -> None:
        """Watches the slots until each prompt has output."""
        assert self._call.submission is not None
        ids = [each.request_id for each in self._call.submission.requests]
        while self._progress.n_begun < len(ids):
            try:
                _, states = await live_of(self._serving).look()
            except (ApiError, EngineClosedError):  # the stream itself reports the error
                return
            if self._progress.see(states, ids):
                self._call.poke()
            await asyncio.sleep(EVERY_S)


routes = [
    Route("/completion", in_dialect(completion), methods=["POST"]),
    Route("/completions", in_dialect(completion), methods=["POST"]),
    Route("/infill", in_dialect(infill), methods=["POST"]),
]
