"""The HTTP server: endpoints of OpenAI, Anthropic, llama-server, vLLM and ollama. Needs llamabatch[server].

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
    """Returns the server as an ASGI application.

    The model is loaded in the lifespan. A mounted application may get no lifespan. It then loads the model at the
    first request. The application answers 503 until the model is loaded.

    Args:
        model: as for LLM.
        **options: options of LLM and of ServerOptions. isolate is True by default: the engine runs in a child process.
            A request that crashes the engine then does not end the other requests.

    Raises:
        ConfigError: an option is wrong or unknown.
        SetupError: starlette is not installed.
    """
    from llamabatch.server.application import app as made  # starlette is an extra

    return made(model, **options)
