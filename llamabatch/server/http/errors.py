"""ApiError, and the status, type and code of each error of the library. An error has OpenAI's shape unless the
dialect of its endpoint has another shape."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import functools
import http
import json
import logging
import math
import re
import secrets
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from llamabatch.client.crash_triage import KILLS_ALONE
from llamabatch.client.restart_policy import ENGINE_ENDED
from llamabatch.errors import (
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    InputError,
    LlamaBatchError,
    MemoryPlanError,
    ModelFileError,
    QueueFull,
    SetupError,
)
from llamabatch.request.outputs import FinishReason, RequestOutput
from llamabatch.request.structured_outputs import CANNOT_FOLLOW
from llamabatch.scheduler.deadlines import DEADLINE_EXCEEDED
from llamabatch.server.http.private_paths import without_paths
from llamabatch.utils.checks import show

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

logger = logging.getLogger(__name__)

ErrorShape = Callable[["ApiError"], dict[str, Any]]
Endpoint = Callable[["HttpRequest"], Awaitable[Any]]

SCOPE_SHAPE = "llamabatch.error_shape"  # key in an ASGI scope; the value is the ErrorShape of the request's dialect
SCOPE_ERRORS = "llamabatch.errors"  # key in an ASGI scope; the value is a list of the request's errors
CLIENT_CLOSED = 499  # nginx's status for a caller that has left
FULL = (errno.ENOSPC, errno.EDQUOT)  # the errno values of a full disk

# OpenAI's type and code of each status, for an ApiError without a type or code of its own.
_OPENAI: dict[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_supported"),
    408: ("timeout_error", "request_timeout"),
    409: ("conflict_error", None),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    431: ("invalid_request_error", "headers_too_large"),
    CLIENT_CLOSED: ("request_cancelled", "request_cancelled"),
    500: ("server_error", "internal_error"),
    501: ("not_supported_error", "not_supported"),
    503: ("service_unavailable_error", "service_unavailable"),
    504: ("timeout_error", "deadline_exceeded"),
}

_QUOTED_OR_WORD = re.compile(r"'[^']*'|\"[^\"]*\"|\b(?:True|False|None)\b")
_WORDS_OF_JSON = {"True": "true", "False": "false", "None": "null"}
CONTEXT_CODE, _CONTEXT_TYPE = (
    "context_length_exceeded",
    "exceed_context_size_error",
)  # the error for an oversized input has OpenAI's code and llama-server's type
# An error of the engine's client with one of these texts means that the engine has ended.
_GONE = (ENGINE_ENDED, "the engine is closed", "the engine failed: ", "the supervisor failed: ")


class ApiError(Exception):
    """An error that a client gets as JSON.

    Attributes:
        status: HTTP status.
        message: text for people, with the wrong value, the allowed range and the fix. Clients get the message without
            paths.
        type, code: values for programs. If type is "" or code is None, OpenAI's value for the status is used.
        param: the field of the body that caused the error.
        headers: additional headers of the response.
        facts: additional numbers in the JSON, such as n_prompt_tokens and n_ctx.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str = "",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        facts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        usual_type, usual_code = _OPENAI.get(
            status, ("invalid_request_error" if status < 500 else "server_error", None)
        )
        self.status = status
        self.message = message
        self.type = type or usual_type
        self.code = usual_code if code is None else code
        self.param = param
        self.headers = dict(headers or {})
        self.facts = dict(facts or {})

    @classmethod
    def of(cls, error: BaseException, param: str | None = None) -> ApiError:
        """Converts any exception to an ApiError. An unexpected exception is logged under an id, and the client gets
        only the id, because the text of the exception may contain parts of other requests."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ContextLengthError):
            facts = {"n_prompt_tokens": error.n_tokens, "n_ctx": error.n_allowed}
            message = f"the input is too large, as it exceeds the available context size: {error}"
            return cls(400, message, type=_CONTEXT_TYPE, code=CONTEXT_CODE, param=param, facts=facts)
        if isinstance(error, (ModelFileError, SetupError, MemoryPlanError)):  # the model cannot be loaded
            return cls(503, str(error))
        if isinstance(error, ConfigError):  # the model cannot do the task of the endpoint
            return cls(400, str(error), code="model_not_supported", param=param or "model")
        if isinstance(error, InputError):
            return cls(400, _QUOTED_OR_WORD.sub(_in_json, str(error)), param=param)
        if isinstance(error, QueueFull):
            return cls(429, str(error), headers=retry_after(error.retry_after_s))
        if isinstance(error, EngineClosedError):
            return cls(503, str(error), headers=retry_after(None))
        if isinstance(error, (concurrent.futures.CancelledError, asyncio.CancelledError)):
            return cls(CLIENT_CLOSED, "the request was cancelled")
        if type(error).__name__ == "ClientDisconnect":  # compared by name, because jobs run without Starlette
            return cls(CLIENT_CLOSED, "the caller left before its body was whole")
        if isinstance(error, OSError) and error.errno in FULL:
            return cls(507, f"the disk of the server is full: {error.strerror}", code="disk_full")
        if isinstance(error, LlamaBatchError):
            return cls.of_output(str(error))
        error_id = f"error-{secrets.token_hex(8)}"
        log_error(error_id, error)
        return cls(500, f"an internal error; the log of the server has it under {error_id}", facts={})

    @classmethod
    def of_output(cls, error: str) -> ApiError:
        """Converts the error of a RequestOutput. The status is 504 for a missed deadline, 500 for a request that
        crashes the engine, 400 for a structured output whose grammar costs too much, 503 for an engine that has ended,
        and 500 for any other error."""
        before, deadline, late = error.partition(DEADLINE_EXCEEDED)
        if deadline:  # `before` is empty, or names the prompt that is late
            return cls(504, before + late)
        if KILLS_ALONE in error:
            return cls(500, error, code="engine_crash")
        if CANNOT_FOLLOW in error:
            return cls(400, error)
        if any(gone in error for gone in _GONE):
            return cls(503, error, headers=retry_after(None))
        return cls(500, error)

    @property
    def public_message(self) -> str:
        """The message for callers, without paths of this machine."""
        return without_paths(self.message)

    def to_openai(self) -> dict[str, Any]:
        """Returns the body in OpenAI's shape, with the message and `facts`."""
        return {
            "error": {
                "message": self.public_message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
                **self.facts,
            }
        }

    def response(self, scope: Mapping[str, Any] | None = None) -> Response:
        """Returns the response in the shape of the scope's dialect; without a scope, in OpenAI's shape."""
        from starlette.responses import Response

        body = json.dumps(error_body(self, scope or {}))
        return Response(body, self.status, self.headers, "application/json")


def _in_json(found: re.Match[str]) -> str:
    return _WORDS_OF_JSON.get(found[0], found[0])


def error_body(error: ApiError, scope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of an error in the shape of the scope's dialect; without a dialect, in OpenAI's shape."""
    shape: ErrorShape = scope.get(SCOPE_SHAPE, ApiError.to_openai)
    return shape(error)


def in_shape(shape: ErrorShape) -> Callable[[Endpoint], Endpoint]:
    """Returns a decorator for an endpoint. The errors of the endpoint get the shape of a dialect."""

    def decorate(endpoint: Endpoint) -> Endpoint:
        @functools.wraps(endpoint)
        async def call(request: HttpRequest) -> Any:
            request.scope[SCOPE_SHAPE] = shape
            return await endpoint(request)

        return call

    return decorate


def check_ends(output: RequestOutput) -> None:
    """Raises ApiError if the request failed, or if it was ended because the server shuts down."""
    if output.error is not None and (error := output.exception()) is not None:
        raise ApiError.of(error)
    if any(each.finish_reason is FinishReason.ABORT for each in output.outputs):
        raise ApiError(503, "the request was ended, as the server is shutting down", headers={"Retry-After": "10"})


def log_error(what: str, error: BaseException) -> None:
    """Logs the class and traceback of an exception, without its text, which may contain parts of prompts."""
    frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    logger.error("%s: %s\n%s", what, type(error).__name__, frames)


def retry_after(seconds: float | None) -> dict[str, str]:
    """Returns the header Retry-After in whole seconds; 1 second if `seconds` is None."""
    return {"Retry-After": str(1 if seconds is None else max(1, math.ceil(seconds)))}


def model_not_found(name: str, known: list[str]) -> ApiError:
    """Returns the error (404) of a request for a model that is not served."""
    return ApiError(
        404,
        f"the model {show(name)} does not exist; served are {', '.join(known)}",
        code="model_not_found",
        param="model",
    )


async def handle(request: HttpRequest, error: Exception) -> Response:
    """Returns the error response for any exception of an application, including Starlette's HTTPException."""
    from starlette.exceptions import HTTPException

    if isinstance(error, HTTPException):
        error = of_http(error, request.method, request.url.path)
    failure = ApiError.of(error)
    keep_error(request.scope, failure)
    return failure.response(request.scope)


def keep_error(scope: Mapping[str, Any], error: ApiError) -> None:
    """Adds the error of a request to its scope, where RequestLog finds it."""
    kept = scope.get(SCOPE_ERRORS)
    if kept is not None:
        kept.append(error)


def of_http(error: Any, method: str, path: str) -> ApiError:
    """Converts Starlette's HTTPException to an ApiError."""
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return ApiError(404, f"there is no {show(path)}; /openapi.json names the endpoints", headers=headers)
    if error.status_code == 405:
        allowed = headers.get("Allow") or headers.get("allow")
        advice = f"; allowed are {allowed}" if allowed else ""
        return ApiError(405, f"{show(path)} takes no {show(method)}{advice}", headers=headers)
    phrase = str(error.detail) or http.HTTPStatus(error.status_code).phrase
    return ApiError(error.status_code, phrase, headers=headers)


def exception_handlers() -> dict[Any, Any]:
    """Returns the `exception_handlers` of a Starlette application: `handle` for every class of exceptions."""
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect

    known: tuple[Any, ...] = (HTTPException, ApiError, LlamaBatchError, ClientDisconnect, OSError)
    return dict.fromkeys((*known, Exception), handle)
