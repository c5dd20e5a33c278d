"""Common code for ollama's endpoints: errors, names of models, times, and streams of lines of JSON."""

from __future__ import annotations

import datetime
from typing import Any

from llamabatch.server.http.errors import ApiError
from llamabatch.server.response.event_stream import EventStream
from llamabatch.server.serving.serving import Serving

API_VERSION = "0.12.11"  # the version of ollama's API; clients compare it with the version that they need
PATHS = "/api"  # errors under this path have the format of error_document, even if no route matches

LATEST = ":latest"
_NANO = 10**9


class LineStream(EventStream):
    """A stream of JSON documents, one per line. Its ping_s must be 0, because a ping is not JSON."""

    media = b"application/x-ndjson"


def error_document(error: ApiError) -> dict[str, Any]:
    """Returns the body of an error. In a stream, this body is a line."""
    return {"error": error.public_message}


def served_name(name: str, serving: Serving) -> str:
    """Removes the tag ":latest" that ollama's clients add to a model's name, unless a served name has the tag."""
    return name if name in serving.names else name.removesuffix(LATEST)


def moment(seconds: float | None = None) -> str:
    """Returns a time in ollama's format.

    Args:
        seconds: seconds since 1970; None: now.
    """
    at = datetime.datetime.now(datetime.timezone.utc)
    if seconds is not None:
        at = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """Returns a duration in nanoseconds, at least 0."""
    return max(0, int(seconds * _NANO))
