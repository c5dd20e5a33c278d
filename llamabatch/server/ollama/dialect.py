"""The parts of ollama's API that its endpoints share: errors, names of models, times, and streams of lines of JSON."""

from __future__ import annotations

import datetime
from typing import Any

from llamabatch.server.http.errors import ApiError
from llamabatch.server.response.event_stream import EventStream
from llamabatch.server.serving.serving import Serving

API_VERSION = "0.12.11"  # of ollama, whose fields these are: clients compare it with the least that they need
PATHS = "/api"  # errors of these have the shape before a route is found

LATEST = ":latest"
_NANO = 10**9


class LineStream(EventStream):
    """A stream of JSON documents, one a line. Its clients know no comments, so that none keeps a connection open."""

    media = b"application/x-ndjson"


def error_document(error: ApiError) -> dict[str, Any]:
    """The body of an error, and its line in a stream."""
    return {"error": error.public_message}


def served_name(name: str, serving: Serving) -> str:
    """The name of a model without the tag that ollama's clients put behind it, unless it is served with the tag."""
    return name if name in serving.names else name.removesuffix(LATEST)


def moment(seconds: float | None = None) -> str:
    """A time of the clock as ollama writes it.

    Args:
        seconds: since 1970; None: now.
    """
    at = datetime.datetime.now(datetime.timezone.utc)
    if seconds is not None:
        at = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """A duration as ollama writes it; 0 for one below 0."""
    return max(0, int(seconds * _NANO))
