"""An RPC server of CPU devices on loopback: python -m tests.devices.server N_DEVICES

It writes its port once it listens. A server of llama.cpp serves one client at a time, so each connection gets a process
of its own. The memory of its devices ends with this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time

from llamabatch.llama import library, rpc

_START_S = 30.0


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are never waited for
    start = starter(int(sys.argv[1]))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        parent = os.getppid()
        listener.settimeout(1.0)
        while os.getppid() == parent:
            with contextlib.suppress(TimeoutError):
                client, _ = listener.accept()
                with client:
                    if os.fork() == 0:
                        listener.close()
                        serve(client, start)
                        os._exit(0)


def starter(n_devices: int):
    """Returns a function that serves at host:port for ever, with this many devices, each of one CPU thread."""
    lib = library.load().llama_cpp._lib
    pointer = ctypes.c_void_p
    cpu = ctypes.CFUNCTYPE(pointer, ctypes.c_int)(("ggml_backend_dev_by_type", lib))(0)
    devices = (pointer * n_devices)(*[cpu] * n_devices)
    shape = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(pointer))
    start = ctypes.CFUNCTYPE(None, *shape)(rpc._function(lib, b"RPC", b"ggml_backend_rpc_start_server"))
    return lambda place: start(place.encode(), None, 1, n_devices, devices)


def serve(client: socket.socket, start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = os.fork()
    if server == 0:
        client.close()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        start(f"127.0.0.1:{port}")
        os._exit(1)
    try:
        with connected(port) as inner:
            for one in (client, inner):
                one.setblocking(True)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=pump, args=(inner, client))
            back.start()
            pump(client, inner)
            back.join()
    finally:
        os.kill(server, signal.SIGKILL)


def connected(port: int) -> socket.socket:
    end = time.monotonic() + _START_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.005)


def pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 18):
            target.sendall(data)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
