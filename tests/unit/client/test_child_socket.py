"""The socket of a child process that cannot inherit one."""

import os
import socket
import sys

import pytest

from llamabatch.client import child_socket
from llamabatch.utils import system
from tests.waiting import PATIENCE_S


@pytest.fixture
def started(monkeypatch):
    """Starts code as a child process that inherits no socket. The code's argument is the port."""
    monkeypatch.setattr(system, "INHERITS_SOCKETS", False)
    processes = []

    def start(code):
        monkeypatch.setattr(child_socket, "command", lambda module, number: [sys.executable, "-c", code, number])
        process, ours = child_socket.start_program("", os.environ)
        processes.append((process, ours))
        return ours

    yield start
    for process, ours in processes:
        process.kill()
        process.wait()
        ours.close()


CONNECT = (
    "import sys\n"
    "from llamabatch.client import child_socket\n"
    "child_socket.system.INHERITS_SOCKETS = False\n"
    "made = child_socket.connected(int(sys.argv[1]))\n"
)


def test_a_child_connects_and_both_send(started):
    ours = started(CONNECT + "made.sendall(made.recv(9)[::-1])")
    ours.sendall(b"forwards!")
    assert ours.recv(9) == b"!sdrawrof"
    assert ours.recv(9) == b""


@pytest.mark.parametrize("sent", [b"", b"x" * 32, b"x" * 31])
def test_a_stranger_who_finds_the_port_is_not_taken_for_the_child(sent, started, monkeypatch):
    has_key, seconds = child_socket._has_key, iter([0.1])  # seconds for the stranger; the child may take longer

    def look(made, key):
        monkeypatch.setattr(child_socket, "_KEY_S", next(seconds, PATIENCE_S))
        return has_key(made, key)

    monkeypatch.setattr(child_socket, "_has_key", look)
    stranger = (
        "import socket, sys\n"
        "stranger = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        f"stranger.sendall({sent!r})\n"
    )
    ours = started(stranger + CONNECT + "made.sendall(b'the child')")
    assert ours.recv(9) == b"the child"


def test_a_child_that_ends_at_once_leaves_a_socket_at_its_end(started):
    assert started("raise SystemExit(3)").recv(9) == b""


def test_a_child_that_never_connects_is_ended(started, monkeypatch):
    monkeypatch.setattr(child_socket, "_START_S", 0.1)
    assert started("import time; time.sleep(600)").recv(9) == b""


def test_nobody_else_in_the_network_can_connect(monkeypatch):
    made = []
    real = socket.create_server
    monkeypatch.setattr(system, "INHERITS_SOCKETS", False)
    monkeypatch.setattr(socket, "create_server", lambda address: made.append(address) or real(address))
    monkeypatch.setattr(child_socket, "command", lambda module, number: [sys.executable, "-c", ""])
    process, ours = child_socket.start_program("", os.environ)
    process.wait()
    ours.close()
    assert made == [("127.0.0.1", 0)]
