"""An application over a FakeClient, and its clients, for tests of the server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from starlette.testclient import TestClient

from llamabatch.client.connect import with_front_client
from llamabatch.client.front_client import FrontClient
from llamabatch.config import EngineConfig
from llamabatch.server.application import make_app
from llamabatch.server.options import ServerOptions
from llamabatch.testing.answers import Answers, Script
from llamabatch.testing.fake_client import FakeClient
from tests.waiting import until


def fake_app(
    answers: Answers = None, *, server: dict[str, Any] | None = None, connect: Any = None, **engine: Any
) -> Any:
    """Returns an application whose model answers as a FakeLLM does. `connect` replaces the start of the engine."""

    def connected(config: EngineConfig) -> FrontClient:
        client = FakeClient(config, Script(answers, None, None, None, None))
        return with_front_client(client, config.max_queue)

    config = EngineConfig.from_options("fake", engine)
    return make_app(config, ServerOptions(**(server or {})), connect or connected)


def ready(client: TestClient) -> TestClient:
    """Returns the client once the model has loaded."""
    until(lambda: client.get("/readyz").status_code == 200)
    return client


@contextlib.contextmanager
def ready_client(answers: Answers = None, *, headers: Any = None, **options: Any) -> Iterator[TestClient]:
    """Yields a client of a `fake_app` whose model has loaded. An exception of the application becomes a 500."""
    with TestClient(fake_app(answers, **options), raise_server_exceptions=False, headers=headers) as client:
        yield ready(client)


def fake_client(client: TestClient) -> Any:
    """Returns the FakeClient below the application, which stores the requests that it got."""
    found = client.app.state.serving.client
    while not hasattr(found, "requests"):
        found = found.inner
    return found
