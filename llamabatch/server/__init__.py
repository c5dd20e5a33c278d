"""The server: OpenAI's, llama-server's and vLLM's HTTP endpoints over one loaded model. Needs llamabatch[server].

::

    app = llamabatch.server.app("model.gguf")  # for `uvicorn module:app`, or to be mounted in another application
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["app"]


def app(model: str | os.PathLike[str], **options: Any) -> Starlette:
    """The server as an ASGI application. It loads the model in its lifespan, or, where no lifespan reaches it since it
    is mounted in another application, at its first request; until then it answers 503.

    Args:
        model: as for LLM.
        **options: those of LLM, and those of ServerOptions. isolate is True unless it is given: the engine runs in a
            child process, whose death ends no other request.

    Raises:
        ConfigError: an option is wrong, or unknown. SetupError: starlette is not installed.
    """
    from llamabatch.server.application import app as made  # starlette is an extra

    return made(model, **options)
