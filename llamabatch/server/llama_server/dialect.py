"""Errors in llama-server's format."""

from __future__ import annotations

from typing import Any

from llamabatch.server.http.errors import CONTEXT_CODE, ApiError, in_shape

# llama-server's error type for each status (tools/server/server-common.cpp, format_error_response).
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


def error_document(error: ApiError) -> dict[str, Any]:
    """Returns the body of an error. The code in the body is the HTTP status."""
    kind = error.type if error.code == CONTEXT_CODE else _TYPES.get(error.status, error.type)
    return {"error": {"code": error.status, "message": error.public_message, "type": kind, **error.facts}}


in_dialect = in_shape(error_document)  # a decorator that gives an endpoint's errors this format
