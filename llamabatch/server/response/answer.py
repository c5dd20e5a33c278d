"""JSON responses that are not streamed. Worker threads make large responses part by part, so that other requests do not
wait and the whole text is never in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from starlette.responses import Response

from llamabatch.server.request.body import ignored_headers, log_ignored
from llamabatch.server.response.json_text import dump, dump_in_pieces
from llamabatch.server.serving.serving import Serving

PART = 2**17  # approximate number of characters that are sent at once


def json_response(value: Any, ignored: tuple[str, ...] = ()) -> Response:
    """Returns a value as a JSON response. A header of the response names the ignored fields of the body."""
    return Response(dump(value).encode(errors="replace"), headers=ignored_of(ignored), media_type="application/json")


async def large_response(
    serving: Serving, make: Callable[..., Any], *arguments: Any, ignored: tuple[str, ...] = ()
) -> Response | ResponseInParts:
    """Returns the response for a value of any size. A worker thread makes the value and writes it in pieces."""

    def begun() -> tuple[bytes, Iterator[bytes]]:
        parts = in_parts(dump_in_pieces(make(*arguments)))
        return next(parts), parts

    first, rest = await serving.on_thread(begun)
    headers = ignored_of(ignored)
    if len(first) < PART:
        return Response(first, headers=headers, media_type="application/json")
    return ResponseInParts(serving, first, rest, headers)


def ignored_of(names: tuple[str, ...]) -> dict[str, str]:
    """Returns the header that names the ignored fields. Logs the names."""
    if not names:
        return {}
    log_ignored(names)
    return ignored_headers(names)


def in_parts(pieces: Iterable[str]) -> Iterator[bytes]:
    """Yields parts of at least PART characters, joined from pieces of a text. The last part may be shorter."""
    held: list[str] = []
    n = 0
    for piece in pieces:
        held.append(piece)
        n += len(piece)
        if n >= PART:
            yield "".join(held).encode(errors="replace")
            held, n = [], 0
    if held:
        yield "".join(held).encode(errors="replace")


class ResponseInParts:
    """An ASGI response of JSON in parts. Each part is made after the previous part has been sent.

    Args:
        first: the first part.
        rest: the other parts.
    """

    def __init__(self, serving: Serving, first: bytes, rest: Iterator[bytes], headers: Mapping[str, str]) -> None:
        self._serving = serving
        self._first = first
        self._rest = rest
        named = {"content-type": "application/json", **headers}
        self._headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in named.items()]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        part = self._first
        while part:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            part = await self._serving.on_thread(next, self._rest, b"")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
