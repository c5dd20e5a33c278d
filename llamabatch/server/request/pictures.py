"""Pictures in bodies: the parts of all dialects as one form of part, whose picture is in the body itself or at an
address that the options allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamabatch.server.http.errors import ApiError
from llamabatch.server.request.body import Body, Json
from llamabatch.utils.checks import show


def picture_part(place: str, part: Mapping[str, Any], body: Body) -> Json:
    """The part of a chat's message for a part of such a type. Raises ApiError unless the part has the picture itself,
    or the server reads addresses: one that fetched any address, or read any file, would do so for strangers."""
    source = part.get("source")
    if isinstance(source, Mapping):
        is_given = source.get("type") == "base64" and isinstance(source.get("data"), str)
        address: Any = f"data:{source.get('media_type')};base64,{source['data']}" if is_given else source.get("url")
    else:
        address = part.get("image_url", part.get("url"))
        address = address.get("url") if isinstance(address, Mapping) else address
    if not isinstance(address, str) or not (address[:5].lower() == "data:" or body.reads_addresses):
        raise ApiError(
            400,
            f"{place} has a picture with the address {show(address)}; give data:image/png;base64,… with its bytes: "
            "without allowed_media_domains nothing is fetched, and without allowed_local_media_path no file is read",
            code="unsupported_content_part",
            param=place.partition("[")[0],
        )
    return {"type": "image_url", "image_url": address}


def content_of(parts: Sequence[str | Json]) -> str | list[Json]:
    """The content of a message: one text, or a list of parts where one is a picture."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
