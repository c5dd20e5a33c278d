"""The child process: an engine behind a socket. `python -m llamabatch.client.worker NUMBER` starts it."""

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
from llamabatch.client.output_sender import OutputSender
from llamabatch.client.parent_link import ParentLink
from llamabatch.client.wire import pack_state, unpack_config, unpack_request
from llamabatch.engine.hooks import EngineHooks, Sink
from llamabatch.errors import EngineClosedError, describe
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.request import Request

logger = logging.getLogger(__name__)

BEAT_S = 1.0


def main(number: int) -> None:
    """Serves until the parent sends close or is gone."""
    parent = ParentLink(number)
    first = parent.receive()

    def fail(reason: str) -> None:
        """Ends this process. The parent then sends the requests to another process."""
        with contextlib.suppress(OSError):
            parent.send("dying", reason)
        os._exit(1)

    hooks = EngineHooks(lambda request_ids: parent.send("admitted", request_ids), fail)
    heartbeat = HeartbeatThread(parent, hooks)
    try:
        client = connect_here(unpack_config(first[1]).for_child(), hooks)
    except Exception as error:
        parent.send("failed", type(error).__name__, describe(error))
        return
    parent.send("ready")
    heartbeat.client = client
    _serve(parent, client, heartbeat)
    client.close()


def _serve(parent: ParentLink, client: EngineClient, heartbeat: HeartbeatThread) -> None:
    """Handles messages until the parent sends close or the engine fails."""
    sink = OutputSender(parent)
    while True:
        kind, *rest = parent.receive()
        if kind == "submit":
            packed, stream = rest
            try:
                client.submit(_unpacked(packed, sink), sink, stream=stream)
            except EngineClosedError:
                return  # the engine failed; the parent notices the end of this process
        elif kind == "abort":
            client.abort(rest[0])
        elif kind == "close" or not _answer(parent, client, heartbeat, kind, *rest):
            return


def _unpacked(packed: tuple[Any, ...], sink: Sink) -> list[Request]:
    """Returns the requests of a message. A request that cannot be read ends with an error."""
    requests = []
    for each in packed:
        try:
            requests.append(unpack_request(each))
        except Exception as error:
            nothing = CompletionOutput(0, "", (), FinishReason.ERROR)
            whole = RequestOutput(each[0], None, (), (nothing,), f"the request cannot be read: {describe(error)}")
            sink([SequenceOutput(each[0], (), "", whole)])
    return requests


_CALLS = get_args(EngineMethod)


def _answer(
    parent: ParentLink, client: EngineClient, heartbeat: HeartbeatThread, kind: str, number: int, *arguments: Any
) -> bool:
    """Answers a message that has a number. Returns False if the engine is gone."""
    try:
        answer: Any = None
        if kind == "stats":
            heartbeat.send_stats()
        elif kind == "states":
            answer = [pack_state(state) for state in client.states()]
        elif kind in _CALLS:
            answer = client.call(cast(EngineMethod, kind), *arguments)
        parent.send("answer", number, answer)
    except EngineClosedError:
        return False
    except Exception as error:
        parent.send("refused", number, type(error).__name__, describe(error))
    return True


class HeartbeatThread:
    """A thread that sends a sign of life to the parent once a second, also during a step. It sends the time since the
    last token. After new tokens it also sends the engine's counts, so that the parent has them if this process dies.

    Args:
        hooks: the hooks of this process's engine. The engine may not have started yet.

    Attributes:
        client: the source of the counts; None until the engine is ready.
    """

    def __init__(self, parent: ParentLink, hooks: EngineHooks) -> None:
        self.client: EngineClient | None = None
        self._parent = parent
        self._hooks = hooks
        self._sending = threading.Lock()  # so that later counts are also sent later
        threading.Thread(target=self._beat, name="llamabatch-heartbeat", daemon=True).start()

    def send_stats(self) -> None:
        """Sends the engine's counts. Raises EngineClosedError."""
        if self.client is not None:
            with self._sending:
                self._parent.send("stats", self.client.stats().to_wire())

    def _beat(self) -> None:
        sent = None
        while True:
            try:
                last = self._hooks.last_token_s
                self._parent.send("beat", None if last is None else time.perf_counter() - last)
                if last != sent:
                    self.send_stats()
                    sent = last
            except (OSError, EngineClosedError):
                return  # the parent or the engine is gone
            except Exception:  # continues, because the parent kills a child that sends no beat
                logger.exception("a heartbeat could not be sent")
            time.sleep(BEAT_S)


if __name__ == "__main__":
    main(int(sys.argv[1]))
