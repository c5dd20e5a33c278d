"""The child process: an engine behind a socket. Started as a program, `python -m llamabatch.client.worker FD`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from typing import Any, cast, get_args

from llamabatch.client.base import EngineClient, EngineMethod
from llamabatch.client.connect import connect_here
from llamabatch.client.parent_link import ParentLink
from llamabatch.client.wire import pack_output, unpack_config, unpack_request
from llamabatch.engine.hooks import EngineHooks
from llamabatch.errors import EngineClosedError, describe
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.request import Request

# ----------------------------------------------------------------------------------------------------
# Signs of life of a child program, once a second, whatever its engine does meanwhile.


logger = logging.getLogger(__name__)

BEAT_S = 1.0


class HeartbeatThread:
    """Tells the parent how long ago the last token came, and what the engine has counted since it was last told, so
    that its figures outlive it. A thread of its own, which no step holds up.

    Args:
        watch: of the engine that is or will be here.
    """

    def __init__(self, parent: ParentLink, watch: EngineHooks) -> None:
        self.client: EngineClient | None = None  # whose figures are told, once it is there
        self._parent = parent
        self._watch = watch
        self._telling = threading.Lock()  # figures go out in the order in which they were taken
        threading.Thread(target=self._beat, name="llamabatch-heart", daemon=True).start()

    def tell_stats(self) -> None:
        """Sends the engine's figures. Raises EngineClosedError."""
        if self.client is not None:
            with self._telling:
                self._parent.send("stats", self.client.stats().to_wire())

    def _beat(self) -> None:
        told = None
        while True:
            try:
                last = self._watch.last_token_s
                self._parent.send("beat", None if last is None else time.perf_counter() - last)
                if last != told:
                    self.tell_stats()
                    told = last
            except (OSError, EngineClosedError):
                return  # the parent is gone, or the engine
            except Exception:  # without a beat the parent takes a healthy engine for one that hangs
                logger.exception("a beat failed")
            time.sleep(BEAT_S)


def main(fd: int) -> None:
    """Serves until the parent says close or is gone; then nothing of this process stays behind."""
    parent = ParentLink(fd)
    first = parent.receive()

    def fail(reason: str) -> None:
        """The parent tries its requests again in another process."""
        with contextlib.suppress(OSError):
            parent.send("dying", reason)
        os._exit(1)

    watch = EngineHooks(lambda request_ids: parent.send("admitted", request_ids), fail)
    heart = HeartbeatThread(parent, watch)
    try:
        client = connect_here(unpack_config(first[1]).for_child(), watch)
    except Exception as error:
        parent.send("failed", type(error).__name__, describe(error))
        return
    parent.send("ready")
    heart.client = client
    _serve(parent, client, heart)
    client.close()


def _serve(parent: ParentLink, client: EngineClient, heart: HeartbeatThread) -> None:
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


def _unpacked(parent: ParentLink, packed: list[list[Any]]) -> list[Request]:
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


def tell_all(parent: ParentLink, outputs: list[SequenceOutput]) -> None:
    """Sends outputs. What cannot be packed, or is too large for a message, is raised: client.tell then tries each alone
    and ends as an error what cannot be sent alone."""
    parent.send("outputs", [pack_output(output) for output in outputs])


_CALLS = get_args(EngineMethod)


def _answer(
    parent: ParentLink, client: EngineClient, heart: HeartbeatThread, kind: str, number: int, *arguments: Any
) -> bool:
    """Answers a question; False if the engine is gone."""
    try:
        answer: Any = None
        if kind == "stats":
            heart.tell_stats()
        elif kind in _CALLS:
            answer = client.call(cast(EngineMethod, kind), *arguments)
        parent.send("answer", number, answer)
    except EngineClosedError:
        return False
    except Exception as error:
        parent.send("refused", number, type(error).__name__, describe(error))
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]))
