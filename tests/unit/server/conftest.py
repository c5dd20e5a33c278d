"""The client of most tests of the server."""

import pytest

from tests.unit.server.serving_clients import ready_client


@pytest.fixture
def client():
    with ready_client() as client:
        yield client
