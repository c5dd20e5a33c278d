"""The log of `llamabatch serve`: one handler and one format.

No level of the log contains any part of a prompt or an answer. The log has the path of a request, its X-Request-Id, and
names such as the names of ignored fields.
"""

from __future__ import annotations

import logging
from logging.handlers import WatchedFileHandler

from llamabatch.errors import ConfigError
from llamabatch.server.options import ServerOptions

_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LOGGERS = ("llamabatch", "uvicorn.error")
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
        # At level "info", uvicorn's lines of this level are hidden, because they repeat the server's own lines.
        found.setLevel(level if name == "llamabatch" or options.log_level != "info" else logging.WARNING)
    return handler


def _is_of_use(record: logging.LogRecord) -> bool:
    """False for uvicorn's lines about malformed requests (BoundedProtocol counts them) and WebSockets (not served)."""
    return not str(record.msg).startswith(_OF_NO_USE)
