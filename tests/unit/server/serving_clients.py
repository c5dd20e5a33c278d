"""An application over a FakeClient, for tests of the server."""

from __future__ import annotations

from typing import Any

from llamabatch.client.connect import with_front_client
from llamabatch.client.front_client import FrontClient
from llamabatch.config import EngineConfig
from llamabatch.server.application import make_app
from llamabatch.server.options import ServerOptions
from llamabatch.testing.answers import Answers, Script
from llamabatch.testing.fake_client import FakeClient


def fake_app(
    answers: Answers = None, *, server: dict[str, Any] | None = None, connect: Any = None, **engine: Any
) -> Any:
    """An application whose model answers as FakeLLM's; `connect` stands in for the start of the engine."""

    def connected(config: EngineConfig) -> FrontClient:
        client = FakeClient(config, Script(answers, None, None, None, None))
        return with_front_client(client, config.max_queue)

    config = EngineConfig.from_options("fake", engine)
    return make_app(config, ServerOptions(**(server or {})), connect or connected)
