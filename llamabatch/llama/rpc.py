"""Additional devices: a backend in a separate file, and RPC servers of llama.cpp on any host.

Environment variables name the file and the servers, so that child processes use the same devices.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
from types import ModuleType

from llamabatch.errors import SetupError
from llamabatch.llama import ggml

BACKEND_VARIABLE = "GGML_BACKEND_PATH"
"""ggml's own variable for the library of a backend that the build does not have."""
SERVERS_VARIABLE = "LLAMABATCH_RPC"
"""The variable for addresses of RPC servers (llama.cpp's `rpc-server`), as host:port,host:port."""

_ADDRESS = re.compile(r"(?P<host>[^:\s]+):(?P<port>[0-9]{1,5})")
_CONNECT_S = 5.0
_GIVE = "give host:port, several with commas between them"


def load_named(module: ModuleType) -> None:
    """Registers the backend file and the RPC servers from the environment variables. Call it before llama_backend_init.

    Raises:
        SetupError: the file is not a backend for this build, the build has no RPC, or a server does not answer
            (llama.cpp would then abort the process).
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
    register = ggml.bind(library, "ggml_backend_register", None, ggml.POINTER)
    for server in servers:
        _check_answers(server)
    for server in servers:
        found = add_server(server.encode())
        if not found:
            raise SetupError(f"{SERVERS_VARIABLE} names {server}, which has no devices")
        register(found)


def addresses(text: str) -> list[str]:
    """Returns the addresses in a comma-separated list, each address once. Raises SetupError for a wrong address."""
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
    try:
        return ggml.load_backend(library, path)
    except ggml.MISSING:
        return False


def _function(library: ctypes.CDLL, backend: bytes, name: bytes) -> int | None:
    """Returns the address of a backend's function, or None if the backend or the function is missing."""
    try:
        by_name = ggml.bind(library, "ggml_backend_reg_by_name", ggml.POINTER, ctypes.c_char_p)
        return ggml.registered_function(library, by_name(backend), name)
    except ggml.MISSING:
        return None
