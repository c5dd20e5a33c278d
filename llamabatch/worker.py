"""The child process: an engine behind a socket. Started as a program, `python -m llamabatch.worker FD`."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

from llamabatch.client import EngineClient, connect_here
from llamabatch.errors import EngineClosedError, LlamaBatchError
from llamabatch.request import SequenceOutput
from llamabatch.wire import Wire, pack_output, unpack_config, unpack_request


def main(fd: int) -> None:
    """Serves until the parent says close or is gone; then nothing of this process stays behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what an interrupt means is the parent's to decide
    wire = Wire(socket.socket(fileno=fd))
    first = wire.receive()
    if first is None:
        return
    try:
        client = connect_here(unpack_config(first[1]).for_child())
    except LlamaBatchError as error:
        wire.send("failed", type(error).__name__, str(error))
        return
    wire.send("ready")
    if _serve(wire, client):
        client.close()
    else:
        os._exit(1)  # the parent is gone: do not wait for the step that is under way


def _serve(wire: Wire, client: EngineClient) -> bool:
    """Carries out messages; True when told to close, False when the parent is gone."""

    def tell(outputs: list[SequenceOutput]) -> None:
        wire.send("outputs", [pack_output(output) for output in outputs])

    while (message := wire.receive()) is not None:
        kind, *rest = message
        if kind == "submit":
            packed, stream = rest
            try:
                client.submit([unpack_request(request) for request in packed], tell, stream=stream)
            except EngineClosedError:
                return True  # the engine failed; the end of this process tells those who wait
        elif kind == "abort":
            client.abort(rest[0])
        elif kind == "close" or not _answer(wire, client, kind, *rest):
            return True
    return False


_QUESTIONS = ("load_adapter", "unload_adapter", "save_prefix", "load_prefix", "unload_prefix")


def _answer(wire: Wire, client: EngineClient, kind: str, number: int, *arguments: Any) -> bool:
    """Answers a question; False if the engine is gone."""
    try:
        answer: Any = None
        if kind == "stats":
            answer = client.stats().to_wire()
        elif kind in _QUESTIONS:
            answer = getattr(client, kind)(*arguments)
        wire.send("answer", number, answer)
    except EngineClosedError:
        return False
    except LlamaBatchError as error:
        wire.send("refused", number, type(error).__name__, str(error))
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]))
