"""The child process: an engine behind a socket. Started as a program, `python -m llamabatch.worker FD`."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from llamabatch.client import EngineClient, connect_here
from llamabatch.errors import EngineClosedError, describe
from llamabatch.heart import Heart
from llamabatch.parent import Parent
from llamabatch.request import CompletionOutput, FinishReason, Request, RequestOutput, SequenceOutput
from llamabatch.watch import Watch
from llamabatch.wire import pack_output, unpack_config, unpack_request


def main(fd: int) -> None:
    """Serves until the parent says close or is gone; then nothing of this process stays behind."""
    parent = Parent(fd)
    first = parent.receive()

    def fail(reason: str) -> None:
        """The parent tries its requests again in another process."""
        with contextlib.suppress(OSError):
            parent.send("dying", reason)
        os._exit(1)

    watch = Watch(lambda request_ids: parent.send("admitted", request_ids), fail)
    heart = Heart(parent, watch)
    try:
        client = connect_here(unpack_config(first[1]).for_child(), watch)
    except Exception as error:
        parent.send("failed", type(error).__name__, describe(error))
        return
    parent.send("ready")
    heart.client = client
    _serve(parent, client, heart)
    client.close()


def _serve(parent: Parent, client: EngineClient, heart: Heart) -> None:
    """Carries out messages until told to close."""

    def tell(outputs: list[SequenceOutput]) -> None:
        tell_all(parent, outputs)

    while True:
        kind, *rest = parent.receive()
        if kind == "submit":
            packed, stream = rest
            try:
                client.submit(_unpacked(parent, packed), tell, stream=stream)
            except EngineClosedError:
                return  # the engine failed; the end of this process tells those who wait
        elif kind == "abort":
            client.abort(rest[0])
        elif kind == "close" or not _answer(parent, client, heart, kind, *rest):
            return


def _unpacked(parent: Parent, packed: list[list[Any]]) -> list[Request]:
    """The requests of a message; one that cannot be read ends as an error."""
    requests = []
    for each in packed:
        try:
            requests.append(unpack_request(each))
        except Exception as error:
            nothing = CompletionOutput(0, "", (), FinishReason.ERROR)
            whole = RequestOutput(each[0], None, (), (nothing,), f"the request cannot be read: {describe(error)}")
            tell_all(parent, [SequenceOutput(each[0], (), "", whole)])
    return requests


def tell_all(parent: Parent, outputs: list[SequenceOutput]) -> None:
    """Sends outputs. What cannot be packed, or is too large for a message, is raised: client.tell then tries each alone
    and ends as an error what cannot be sent alone."""
    parent.send("outputs", [pack_output(output) for output in outputs])


_QUESTIONS = ("load_adapter", "unload_adapter", "save_prefix", "load_prefix", "unload_prefix")


def _answer(parent: Parent, client: EngineClient, heart: Heart, kind: str, number: int, *arguments: Any) -> bool:
    """Answers a question; False if the engine is gone."""
    try:
        answer: Any = None
        if kind == "stats":
            heart.tell_stats()
        elif kind in _QUESTIONS:
            answer = getattr(client, kind)(*arguments)
        parent.send("answer", number, answer)
    except EngineClosedError:
        return False
    except Exception as error:
        parent.send("refused", number, type(error).__name__, describe(error))
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]))
