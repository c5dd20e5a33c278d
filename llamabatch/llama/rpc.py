"""Devices beyond those of the build: a backend in a file of its own, and RPC servers of llama.cpp on any host.

Both are named by environment variables, since they hold for a process and for the children that it starts.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
from types import ModuleType

from llamabatch.errors import SetupError

BACKEND_VARIABLE = "GGML_BACKEND_PATH"
"""ggml's own: the library of a backend that the build does not have."""
SERVERS_VARIABLE = "LLAMABATCH_RPC"
"""Addresses of RPC servers (llama.cpp's `rpc-server`), as host:port,host:port."""

_ADDRESS = re.compile(r"(?P<host>[^:\s]+):(?P<port>[0-9]{1,5})")
_CONNECT_S = 5.0
_GIVE = "give host:port, several with commas between them"


def load_named(module: ModuleType) -> None:
    """Registers the backend and the devices that the environment names, before llama_backend_init.

    Raises:
        SetupError: the file is no backend for this build, the build has no RPC, or a server does not answer: llama.cpp
            would abort the process.
    """
    library = module.llama_cpp._lib
    path = os.environ.get(BACKEND_VARIABLE)
    if path and not _load(library, path):
        raise SetupError(
            f"{BACKEND_VARIABLE} is {path!r}, which is no backend that this build of llama.cpp can load; correct it, "
            "or unset it"
        )
    servers = addresses(os.environ.get(SERVERS_VARIABLE, ""))
    if not servers:
        return
    add = _function(library, b"RPC", b"ggml_backend_rpc_add_server")
    if add is None:
        raise SetupError(
            f"{SERVERS_VARIABLE} is {','.join(servers)!r}, but this build of llama.cpp has no RPC; make one with "
            "`llamabatch build --backend rpc`"
        )
    add_server = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(add)
    register = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(("ggml_backend_register", library))
    for server in servers:
        _check_answers(server)
    for server in servers:
        found = add_server(server.encode())
        if not found:
            raise SetupError(f"{SERVERS_VARIABLE} names {server}, which has no devices")
        register(found)


def addresses(text: str) -> list[str]:
    """The addresses of a list, each once. Raises SetupError."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _ADDRESS.fullmatch(part)
        if match is None or not 1 <= int(match["port"]) <= 65_535:
            raise SetupError(f"{SERVERS_VARIABLE} has {part!r}, which is no address of a server; {_GIVE}")
        found.append(part)
    return list(dict.fromkeys(found))


def _check_answers(server: str) -> None:
    host, _, port = server.partition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_S):
            return
    except OSError as error:
        raise SetupError(
            f"{SERVERS_VARIABLE} names {server}, where no server answers ({error.strerror or error}); start it, or "
            "leave it out"
        ) from error


def _load(library: ctypes.CDLL, path: str) -> bool:
    """Let ggml load a backend; False where it cannot be."""
    try:
        load = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(("ggml_backend_load", library))
    except (AttributeError, ValueError):  # everything is in one library
        return False
    return bool(load(os.fsencode(path)))


def _function(library: ctypes.CDLL, backend: bytes, name: bytes) -> int | None:
    """The address of a function that a backend offers by name; None: it, or the backend, is not there."""
    pointer = ctypes.c_void_p
    try:
        by_name = ctypes.CFUNCTYPE(pointer, ctypes.c_char_p)(("ggml_backend_reg_by_name", library))
        find = ctypes.CFUNCTYPE(pointer, pointer, ctypes.c_char_p)(("ggml_backend_reg_get_proc_address", library))
    except (AttributeError, ValueError):
        return None
    registered = by_name(backend)
    return find(registered, name) if registered else None
