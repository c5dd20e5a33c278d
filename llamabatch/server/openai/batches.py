"""/v1/batches: the requests of a file, run in the background. A batch survives a restart of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from llamabatch.errors import InputError
from llamabatch.server.batches.records import BatchRecord, expiry_of, metadata_of, new_batch_id
from llamabatch.server.batches.runner import Batches
from llamabatch.server.batches.window import seconds_of
from llamabatch.server.http.errors import ApiError
from llamabatch.server.http.keys import key_use
from llamabatch.server.openai.batch_lines import ENDPOINTS
from llamabatch.server.openai.files import batches_of, look_at, page_of, store_with
from llamabatch.server.request.body import OBJECT, RULES, Body, Field, Fields, Json, Rules, reads
from llamabatch.server.request.reading import read_body
from llamabatch.server.response.answer import ignored_of
from llamabatch.server.serving.serving import serving_of
from llamabatch.utils.checks import nearest, show

_MOST_BATCHES, _USUAL_BATCHES = 100, 20  # maximum and default number of batches in a page

BATCH: Fields = {
    "input_file_id": Field({"type": "string"}, "id of an uploaded file of lines"),
    "endpoint": Field({"enum": list(ENDPOINTS)}, "the url of all of its lines"),
    "completion_window": Field(
        {"type": "string"},
        "time until the batch expires, such as 24h or 10m; near its end the batch is no longer background work",
    ),
    "metadata": Field(OBJECT, "texts by name, which come back with the batch"),
    "output_expires_after": Field(
        OBJECT, 'when its files of results expire: {"anchor": "created_at", "seconds": 86400}'
    ),
}


@dataclass(frozen=True)
class BatchBody:
    """A request for a batch.

    Attributes:
        window_s: the seconds of completion_window.
        output_expires_s: the seconds after which the result files expire; None: they do not expire.
        ignored: names of unknown fields.
    """

    input_file_id: str
    endpoint: str
    completion_window: str
    window_s: int
    metadata: Mapping[str, str] | None = None
    output_expires_s: int | None = None
    ignored: tuple[str, ...] = ()

    def record(self, now: float) -> BatchRecord:
        """Returns the record of a new batch. The batch begins at `now`, in seconds since 1970."""
        return BatchRecord(
            new_batch_id(),
            self.endpoint,
            self.input_file_id,
            self.completion_window,
            int(now),
            int(now) + self.window_s,
            metadata=self.metadata,
            output_expires_s=self.output_expires_s,
        )


@reads
def read_batch(body: Mapping[str, Any], rules: Rules = RULES) -> BatchBody:
    """Reads a BatchBody from a request body. Raises ApiError with the field, its value and the allowed values."""
    given = Body(body, BATCH, rules)
    file_id = given.needed("input_file_id", "the id of an uploaded file")
    endpoint = given.needed("endpoint", " or ".join(ENDPOINTS))
    window = given.needed("completion_window", '"24h", or another time')
    if not isinstance(file_id, str):
        raise InputError(f"input_file_id is {show(file_id)}; give the id of an uploaded file")
    if endpoint not in ENDPOINTS:
        raise InputError(f"endpoint is {show(endpoint)}{nearest(str(endpoint), ENDPOINTS)}")
    return BatchBody(
        file_id,
        endpoint,
        window,
        seconds_of(window),
        metadata_of(given.take("metadata")),
        expiry_of(given.take("output_expires_after"), "output_expires_after"),
        tuple(given.ignored),
    )


def _document(batches: Batches | None, record: BatchRecord) -> Json:
    """Returns a batch in OpenAI's format, with `waiting_for` if the batch waits for the disk or the engine."""
    waits = None if batches is None else batches.waiting_for(record)
    return record.to_openai() | ({} if waits is None else {"waiting_for": waits})


async def create(request: HttpRequest) -> Any:
    """Creates a batch from the lines of a file.

    Raises ApiError (403) for a key with limits, because the lines of a batch do not count against limits.
    """
    use = key_use.get()
    if use is not None and (use.key.rpm, use.key.tpm) != (None, None):
        raise ApiError(
            403,
            f"the key {use.key.name!r} has limits per minute (rpm, tpm), which a batch would not obey; send the "
            "requests one by one, or use a key without limits",
            code="key_with_limits",
        )
    batches = await batches_of(request)
    body = await read_body(request, serving_of(request), read_batch)
    record = body.record(batches.store.clock())
    await asyncio.to_thread(batches.add, record)
    return JSONResponse(_document(batches, batches.store.batch(record.id)), headers=ignored_of(body.ignored))


async def list_batches(request: HttpRequest) -> Any:
    """Lists batches."""
    batches = await look_at(request)
    records = [] if batches is None else batches.store.batches()
    return JSONResponse(page_of(records, request.query_params, _MOST_BATCHES, _USUAL_BATCHES))


async def batch(request: HttpRequest) -> Any:
    """Describes a batch."""
    store, batch_id = await store_with(request, "batch_id")
    return JSONResponse(_document(await look_at(request), store.batch(batch_id)))


async def cancel(request: HttpRequest) -> Any:
    """Cancels a batch. Its finished lines keep their results."""
    _, batch_id = await store_with(request, "batch_id")
    record = await asyncio.to_thread((await batches_of(request)).cancel, batch_id)
    return JSONResponse(record.to_openai())


routes = [
    Route("/v1/batches", create, methods=["POST"]),
    Route("/v1/batches", list_batches, methods=["GET"]),
    Route("/v1/batches/{batch_id}", batch, methods=["GET"]),
    Route("/v1/batches/{batch_id}/cancel", cancel, methods=["POST"]),
]
