"""The child process: an engine behind a socket. Started as a program, `python -m llamabatch.worker FD`."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from llamabatch.client import EngineClient, connect_here
from llamabatch.errors import EngineClosedError, EngineError, LlamaBatchError
from llamabatch.heart import Heart
from llamabatch.parent import Parent
from llamabatch.request import FinishReason, RequestOutput, SequenceOutput
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
    except LlamaBatchError as error:
        parent.send("failed", type(error).__name__, str(error))
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
                client.submit([unpack_request(request) for request in packed], tell, stream=stream)
            except EngineClosedError:
                return  # the engine failed; the end of this process tells those who wait
        elif kind == "abort":
            client.abort(rest[0])
        elif kind == "close" or not _answer(parent, client, heart, kind, *rest):
            return


def tell_all(parent: Parent, outputs: list[SequenceOutput]) -> None:
    """Sends outputs, each alone where together they are too large for a message; what is too large alone ends as an
    error."""
    try:
        parent.send("outputs", [pack_output(output) for output in outputs])
    except EngineError as error:
        if len(outputs) > 1:
            for output in outputs:
                tell_all(parent, [output])
        elif outputs[0].finished is not None:
            parent.send("outputs", [pack_output(_without_content(outputs[0], outputs[0].finished, str(error)))])
        else:
            raise


def _without_content(output: SequenceOutput, finished: RequestOutput, error: str) -> SequenceOutput:
    nothing = tuple(type(c)(c.index, "", (), FinishReason.ERROR) for c in finished.outputs[:1])
    whole = RequestOutput(finished.request_id, None, (), nothing, error, type(finished.timings)())
    return SequenceOutput(output.request_id, (), "", whole)


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
    except LlamaBatchError as error:
        parent.send("refused", number, type(error).__name__, str(error))
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]))
