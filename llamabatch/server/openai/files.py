"""/v1/files: uploads and results of batches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse
from starlette.routing import Route

from llamabatch.server.batches.records import OUTPUT_PURPOSE, PURPOSE
from llamabatch.server.batches.runner import Batches
from llamabatch.server.batches.service import BatchService
from llamabatch.server.batches.store import Store
from llamabatch.server.batches.upload import receive_file
from llamabatch.server.http.errors import ApiError
from llamabatch.server.serving.serving import serving_of
from llamabatch.utils.checks import show

_MOST_FILES = 10_000  # maximum and default number of files in a page


async def batches_of(request: HttpRequest) -> Batches:
    """Returns the application's files and batches. Makes their folder if needed. Raises ApiError."""
    service: BatchService = request.app.state.batches
    return await asyncio.to_thread(service.batches)


async def look_at(request: HttpRequest) -> Batches | None:
    """Returns the files and batches; None: no file was ever uploaded. Does not make the folder. Raises ApiError."""
    service: BatchService = request.app.state.batches
    return await asyncio.to_thread(service.look)


async def store_with(request: HttpRequest, name: str) -> tuple[Store, str]:
    """Returns the store and a record id. The id is the path parameter `name`. Raises ApiError."""
    batches, record_id = await look_at(request), str(request.path_params[name])
    if batches is None:
        raise ApiError(404, f"there is no {name.removesuffix('_id')} {show(record_id)}", param=name)
    return batches.store, record_id


class Listed(Protocol):
    """An object in a list response."""

    @property
    def id(self) -> str: ...

    def to_openai(self) -> dict[str, Any]:
        """Returns the object in OpenAI's format."""


def page_of(records: Sequence[Listed], query: Mapping[str, str], most: int, usual: int) -> dict[str, Any]:
    """Returns a page of records in OpenAI's format, in the order of `records`.

    Args:
        query: may have `limit`, the number of records, and `after`, the id of the last record of the previous page.
        most, usual: the maximum and the default value of `limit`.

    Raises:
        ApiError: a value is refused.
    """
    text = query.get("limit", str(usual))
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise ApiError(400, f"limit is {show(text)}; give a whole number from 1 to {most:,}", param="limit")
    limit, start = int(text), 0
    after = query.get("after")
    if after:
        found = [place for place, each in enumerate(records) if each.id == after]
        if not found:
            raise ApiError(400, f"after is {show(after)}, and there is no such id", param="after")
        start = found[0] + 1
    data = [each.to_openai() for each in records[start : start + limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(records),
    }


async def upload(request: HttpRequest) -> Any:
    """Uploads the input file of a batch."""
    store = (await batches_of(request)).store
    most = serving_of(request).options.max_file_bytes
    record = await receive_file(request.headers, request.stream(), store, most)
    return JSONResponse(record.to_openai())


async def list_files(request: HttpRequest) -> Any:
    """Lists files."""
    batches = await look_at(request)
    files = [] if batches is None else batches.store.files()
    query = request.query_params
    purpose, order = query.get("purpose"), query.get("order", "desc")
    if purpose is not None:
        if purpose not in (PURPOSE, OUTPUT_PURPOSE):
            known = f"{PURPOSE} or {OUTPUT_PURPOSE}"
            raise ApiError(400, f"purpose is {show(purpose)}; give {known}", param="purpose")
        files = [each for each in files if each.purpose == purpose]
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {show(order)}; give asc or desc", param="order")
    return JSONResponse(page_of(files[:: -1 if order == "asc" else 1], query, _MOST_FILES, _MOST_FILES))


async def file(request: HttpRequest) -> Any:
    """Describes a file."""
    store, file_id = await store_with(request, "file_id")
    return JSONResponse(store.file(file_id).to_openai())


async def delete(request: HttpRequest) -> Any:
    """Deletes a file."""
    store, file_id = await store_with(request, "file_id")
    await asyncio.to_thread(store.delete_file, file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


async def content(request: HttpRequest) -> Any:
    """Sends the content of a file."""
    store, file_id = await store_with(request, "file_id")
    record = store.file(file_id)
    # Another request or program may have deleted the file.
    if not await asyncio.to_thread(store.content(record.id).exists):
        raise ApiError(404, f"the content of {record.id} is gone", param="file_id")
    return FileResponse(store.content(record.id), media_type="application/octet-stream", filename=record.filename)


routes = [
    Route("/v1/files", upload, methods=["POST"]),
    Route("/v1/files", list_files, methods=["GET"]),
    Route("/v1/files/{file_id}", file, methods=["GET"]),
    Route("/v1/files/{file_id}", delete, methods=["DELETE"]),
    Route("/v1/files/{file_id}/content", content, methods=["GET"]),
]
