"""RPC devices of the environment: a list of addresses, and errors before llama.cpp would abort."""

import socket
from types import SimpleNamespace

import pytest

from llamabatch.errors import SetupError
from llamabatch.llama import rpc


def test_addresses_of_servers():
    assert rpc.addresses("") == []
    assert rpc.addresses(" a:1, b.example:50052 ,a:1,") == ["a:1", "b.example:50052"]


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:0", "a:65536", "a:1;b:2", "http://a:1", "a b:1"])
def test_what_is_no_address(text):
    with pytest.raises(SetupError, match=r"LLAMABATCH_RPC has .*; give host:port"):
        rpc.addresses(text)


class Library:
    """A library that has Python functions where ctypes would look for its own."""


def loaded(monkeypatch, load=1, add=None):
    monkeypatch.setattr(rpc, "_load", lambda library, path: bool(load))
    monkeypatch.setattr(rpc, "_function", lambda *_: add)
    return SimpleNamespace(llama_cpp=SimpleNamespace(_lib=Library()))


def test_a_file_that_is_no_backend(monkeypatch):
    monkeypatch.setenv(rpc.BACKEND_VARIABLE, "/nowhere.so")
    monkeypatch.delenv(rpc.SERVERS_VARIABLE, raising=False)
    with pytest.raises(SetupError, match=r"GGML_BACKEND_PATH is '/nowhere.so'"):
        rpc.load_named(loaded(monkeypatch, load=0))
    rpc.load_named(loaded(monkeypatch))


def test_a_build_without_rpc(monkeypatch):
    monkeypatch.delenv(rpc.BACKEND_VARIABLE, raising=False)
    monkeypatch.setenv(rpc.SERVERS_VARIABLE, "127.0.0.1:50052")
    with pytest.raises(SetupError, match=r"has no RPC; make one with `llamabatch build --backend rpc`"):
        rpc.load_named(loaded(monkeypatch))


def test_a_server_that_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        rpc._check_answers(address)
    with pytest.raises(SetupError, match=rf"names {address}, where no server answers"):
        rpc._check_answers(address)
