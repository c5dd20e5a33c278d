"""The socket between a process and its child program.

A child inherits one end of a socket pair. On Windows a child cannot inherit a socket. There the child connects to a
port of the loopback address. Any program of the machine may find this port. The child therefore sends a key, which it
has read from its stdin.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

from llamabatch.utils import system
from llamabatch.utils.subprogram import command

_KEY_BYTES = 32
_KEY_S = 5.0  # seconds to receive a key; a connection without a key must not block the child
_START_S = 120.0  # seconds for the start of Python and the imports of the program
_POLL_S = 0.2


def start_program(module: str, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a module as a program; returns the process and this end of the socket.

    The program's only argument is a number for `connected`. If the program ends before it connects, a read from the
    returned socket reports the end of the stream.

    Args:
        environment: environment variables of the program.

    Raises:
        OSError: no process or no socket can be made.
    """
    if not system.INHERITS_SOCKETS:
        return _start_and_accept(module, environment)
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            return _popen(module, theirs.fileno(), subprocess.DEVNULL, environment, pass_fds=[theirs.fileno()]), ours
        except BaseException:
            ours.close()
            raise


def connected(number: int) -> socket.socket:
    """Returns the program's end of the socket. Raises OSError if the parent is gone."""
    if system.INHERITS_SOCKETS:
        return socket.socket(fileno=number)
    made = socket.create_connection(("127.0.0.1", number), timeout=_KEY_S)
    made.sendall(sys.stdin.buffer.read(_KEY_BYTES))
    return _ready(made)


def _popen(
    module: str, number: int, stdin: int, environment: Mapping[str, str], pass_fds: list[int]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command(module, str(number)),
        pass_fds=pass_fds,
        start_new_session=True,  # Ctrl-C reaches only the parent, which decides what to do
        creationflags=system.NEW_GROUP,
        stdin=stdin,
        stdout=subprocess.DEVNULL,  # only the parent writes to stdout
        env=environment,
    )


def _start_and_accept(module: str, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    key = secrets.token_bytes(_KEY_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = _popen(module, server.getsockname()[1], subprocess.PIPE, environment, pass_fds=[])
        try:
            assert process.stdin is not None
            with contextlib.suppress(OSError), process.stdin as stdin:  # the program may have ended already
                stdin.write(key)
            server.settimeout(_POLL_S)
            deadline = time.monotonic() + _START_S
            while process.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    made, _ = server.accept()
                    if _has_key(made, key):
                        return process, _ready(made)
                    made.close()
            process.kill()
            ours, theirs = socket.socketpair()
            theirs.close()
        except BaseException:
            process.kill()
            process.wait()
            raise
    return process, ours


def _has_key(made: socket.socket, key: bytes) -> bool:
    """Returns True if the first bytes from the other side are the key."""
    found, deadline = b"", time.monotonic() + _KEY_S
    try:
        while len(found) < len(key):
            made.settimeout(max(0.01, deadline - time.monotonic()))
            part = made.recv(len(key) - len(found))
            if not part:
                return False
            found += part
    except OSError:
        return False
    return hmac.compare_digest(found, key)


def _ready(made: socket.socket) -> socket.socket:
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages go out at once
    return made
