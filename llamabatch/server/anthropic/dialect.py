"""Errors in Anthropic's format."""

from __future__ import annotations

from typing import Any

from llamabatch.server.http.errors import CONTEXT_CODE, ApiError
from llamabatch.server.http.ids import current_id

PATHS = "/v1/messages"  # errors under this path have the format of error_document, even if no route matches

# Anthropic's error type for each status (https://docs.claude.com/en/api/errors).
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_document(error: ApiError) -> dict[str, Any]:
    """Returns the body of an error."""
    usual = "invalid_request_error" if error.status < 500 else "api_error"
    message = error.public_message
    if error.code == CONTEXT_CODE and error.facts:
        # Client programs look for these words of Anthropic's API, and then shorten the conversation.
        message = "prompt is too long: {n_prompt_tokens} tokens > {n_ctx} maximum: ".format(**error.facts) + message
    found = {"type": _TYPES.get(error.status, usual), "message": message}
    return {"type": "error", "error": found, "request_id": current_id.get()}
