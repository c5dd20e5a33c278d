"""Some cases of the figures about failures around a server. `make test-long` runs all cases."""

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

from tests.long import server_disconnects, server_kills, server_raising_calls, server_soak


@pytest.fixture(scope="module")
def raising(tmp_path_factory):
    yield
    server_raising_calls.close()


@pytest.mark.parametrize("number", range(server_raising_calls.QUICK))
def test_raising_calls(number, tmp_path, raising):
    server_raising_calls.case(number, tmp_path)


@pytest.mark.parametrize("number", range(server_disconnects.QUICK))
def test_disconnects(number, tmp_path):
    server_disconnects.case(number, tmp_path)


@pytest.mark.parametrize("number", range(server_kills.QUICK))
def test_kills(number, tmp_path):
    server_kills.case(number, tmp_path)


def test_seconds_of_mixed_load(tmp_path):
    server_soak.case(0, tmp_path, seconds=4)
