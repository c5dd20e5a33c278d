"""The files of the page, and their routes. The files contain no data of the server, so they need no key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from llamabatch.server.http.errors import ApiError
from llamabatch.utils.checks import show

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# The content security policy. Scripts, styles and calls are limited to this server. Inline scripts and styles are
# forbidden, so that no text of a model can become a script or a style. Images come from the server or the user.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' blob: data:",
        "media-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "cache-control": "no-cache",  # browsers must check the etag, because another release has the same URLs
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True)
class PageFile:
    """A file of the page: its bytes, their media type, and an etag made from the bytes."""

    content: bytes
    media_type: str
    etag: str


@cache
def page_files() -> dict[str, PageFile]:
    """Returns the files of the page by name."""
    found = {}
    for path in files(__package__).joinpath("static").iterdir():
        media_type = _TYPES.get(path.name.rpartition(".")[2])
        if media_type is not None:
            content = path.read_bytes()
            digest = hashlib.blake2b(content, digest_size=12).hexdigest()
            found[path.name] = PageFile(content, media_type, f'"{digest}"')
    return found


def _response(request: HttpRequest, file: PageFile) -> Response:
    headers = {**_HEADERS, "etag": file.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


async def page(request: HttpRequest) -> Response:
    """Returns the page."""
    return _response(request, page_files()["index.html"])


async def page_file(request: HttpRequest) -> Response:
    """Returns a file of the page. Raises ApiError (404)."""
    name = request.path_params["name"]
    file = page_files().get(name)
    if file is None:
        raise ApiError(404, f"the page has no file {show(name)}")
    return _response(request, file)


routes = [
    Route("/", page, methods=["GET"], include_in_schema=False),
    Route("/page/{name}", page_file, methods=["GET"], include_in_schema=False),
]
