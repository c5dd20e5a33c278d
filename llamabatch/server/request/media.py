"""Media in bodies: converts the parts of all dialects to one form for images and one form for audio. The bytes are in
the body, or at an address allowed by the options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamabatch.chat.messages import media_kind
from llamabatch.request.media import SOUND
from llamabatch.server.http.errors import ApiError
from llamabatch.server.request.body import Body, Json
from llamabatch.utils.checks import show


def media_part(place: str, part: Mapping[str, Any], body: Body) -> Json:
    """Converts an image part or audio part to a part of a chat message. Raises ApiError if the part has an address and
    the options allow none: strangers could make the server fetch any address or read any file."""
    is_sound = media_kind(part) == SOUND
    name = "audio_url" if is_sound else "image_url"
    source = part.get("input_audio" if is_sound else "source")
    if isinstance(source, Mapping):
        is_given = isinstance(source.get("data"), str) and (is_sound or source.get("type") == "base64")
        kind = "audio" if is_sound else source.get("media_type")
        address: Any = f"data:{kind};base64,{source['data']}" if is_given else source.get("url")
    else:
        address = part.get(name, part.get("url"))
        address = address.get("url") if isinstance(address, Mapping) else address
    if address is None:
        raise ApiError(
            400,
            f"{place} has no {name}; give {{'type': {name!r}, {name!r}: {{'url': 'data:…;base64,…'}}}}",
            code="unsupported_content_part",
            param=place.partition("[")[0],
        )
    if not isinstance(address, str) or not (address[:5].lower() == "data:" or body.reads_addresses):
        what = "a sound" if is_sound else "a picture"
        raise ApiError(
            400,
            f"{place} has {what} with the address {show(address)}; give data:…;base64,… with its bytes: without "
            "allowed_media_domains nothing is fetched, and without allowed_local_media_path no file is read",
            code="unsupported_content_part",
            param=place.partition("[")[0],
        )
    return {"type": name, name: address}


def content_of(parts: Sequence[str | Json]) -> str | list[Json]:
    """Returns the content of a message: one text, or a list of parts if one part is an image or audio."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
