"""A server that cannot be reached is known as such within the given time."""

import socket
import threading

import pytest

from llamabatch.utils.network import public, reachable
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_server_that_listens_and_a_closed_port(port):
    assert reachable(f"http://127.0.0.1:{port}/a", PATIENCE_S)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert not reachable(f"http://127.0.0.1:{closed.getsockname()[1]}/")
    assert not reachable("no address")


@pytest.mark.parametrize("slow", ["getaddrinfo", "create_connection"])
def test_a_look_up_or_a_connection_that_hangs_takes_no_longer_than_the_budget(monkeypatch, slow):
    ended, waited = threading.Event(), []

    def hang(*args, **more):
        waited.append(ended.wait(PATIENCE_S))
        raise OSError("no answer")

    monkeypatch.setattr(socket, slow, hang)
    assert not reachable("https://example.com", 0.05)
    assert not waited
    ended.set()


def test_a_proxy_is_asked_in_place_of_the_server(monkeypatch, port):
    monkeypatch.setenv("http_proxy", f"127.0.0.1:{port}")
    assert reachable("http://192.0.2.1/", PATIENCE_S)  # the proxy answers for an address that leads nowhere


def test_the_public_part_of_an_address():
    assert public("https://me:word@a.b:8/c.gguf?key=1#x") == "https://a.b:8/c.gguf"
    assert public("http://[secret") == "the address"
