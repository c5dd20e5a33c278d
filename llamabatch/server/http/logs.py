"""The log of `llamabatch serve`: one handler, one format, and on demand a line for each request.

Nothing of a prompt or an answer is ever written: no body, no query, no header, at any level.
"""

from __future__ import annotations

import logging
import time
from logging.handlers import WatchedFileHandler

from llamabatch.errors import ConfigError
from llamabatch.server.http.keys import SCOPE_KEY
from llamabatch.server.http.security import App, Message, Receive, Scope, Send
from llamabatch.server.options import ServerOptions

logger = logging.getLogger("llamabatch.server.access")

_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LOGGERS = ("llamabatch", "uvicorn.error")
_LONGEST_PATH = 200  # characters
_OF_NO_USE = ("Invalid HTTP request", "Unsupported upgrade request", "No supported WebSocket library")


def configure(options: ServerOptions) -> logging.Handler:
    """Sends the log to stderr, or to a file that may be rotated. Raises ConfigError."""
    handler: logging.Handler
    if options.log_file is None:
        handler = logging.StreamHandler()
    else:
        try:
            handler = WatchedFileHandler(options.log_file, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"log_file {options.log_file} cannot be written: {error.strerror}") from error
    handler.setFormatter(logging.Formatter(_FORM))
    level = logging.getLevelName(options.log_level.upper())
    for name in _LOGGERS:
        found = logging.getLogger(name)
        found.addHandler(handler)
        found.propagate = False
        found.addFilter(_is_of_use)
        # uvicorn's "info" lines repeat the server's own lines
        found.setLevel(level if name == "llamabatch" or options.log_level != "info" else logging.WARNING)
    return handler


def _is_of_use(record: logging.LogRecord) -> bool:
    """False for uvicorn's lines about malformed requests (the protocol counts them) and WebSockets (not served)."""
    return not str(record.msg).startswith(_OF_NO_USE)


class AccessLog:
    """A middleware that logs each request: client, name of its key, method, path, status, seconds."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 0  # no response has begun

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            client = scope.get("client") or ("-",)
            path = str(scope["path"])[:_LONGEST_PATH].encode("unicode_escape").decode()  # no line breaks
            who = (client[0], *scope.get(SCOPE_KEY, ()))  # the name of a key, never a key
            took = time.monotonic() - began
            logger.info("%s %s %s %s %.3f s", " ".join(who), scope["method"], path, status, took)
