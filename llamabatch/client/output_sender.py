"""OutputSender: the sink of a child's engine, which sends outputs to the parent."""

from __future__ import annotations

import contextlib
import threading
import time

from llamabatch.client.base import errors_logged
from llamabatch.client.parent_link import ParentLink
from llamabatch.client.wire import pack_output
from llamabatch.errors import EngineError, describe
from llamabatch.request.joining import joined
from llamabatch.request.outputs import SequenceOutput

# After a message the sender rests: REST_PER_OUTPUT_S seconds for each request in the message, at most MOST_REST_S.
# Outputs of steps during a rest are sent together when it ends, with all tokens of a continuation in one output. This
# saves time, because an output of many tokens costs no more than an output of one token. The first and the last output
# of a request do not wait. benchmarks/server_http.py measures the CPU time of a token.
REST_PER_OUTPUT_S = 0.0005
MOST_REST_S = 0.02


class OutputSender:
    """The sink of a child's engine, called on the engine's thread. Another thread sends outputs that were held back."""

    def __init__(self, parent: ParentLink) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self._held: list[SequenceOutput] = []
        self._has_held = threading.Event()
        self._rests_until_s = 0.0  # a value of time.perf_counter()
        self._begun: set[str] = set()  # ids of requests with some, but not all, outputs sent
        self._unsent: dict[str, str] = {}  # errors of outputs that could not be sent, by request_id
        threading.Thread(target=self._send_held, name="llamabatch-outputs", daemon=True).start()

    def __call__(self, outputs: list[SequenceOutput]) -> None:
        """Sends outputs now, or holds them back.

        Raises:
            Exception: an output cannot be packed, or the message is too large. emit() then calls the sink again with
                each output alone. A request whose output cannot be sent alone ends with an error.
        """
        with self._lock:
            self._check_sent(outputs)
            if time.perf_counter() >= self._rests_until_s:
                held, self._held = self._held, []
                self._send(held, outputs)
                self._rest(held + outputs)
                return
            urgent = {output.request_id for output in outputs if self._is_urgent(output)}
            if urgent:
                held = [output for output in self._held if output.request_id in urgent]
                self._held = [output for output in self._held if output.request_id not in urgent]
                self._send(held, [output for output in outputs if output.request_id in urgent])
            self._held += [output for output in outputs if output.request_id not in urgent]
            if self._held:
                self._has_held.set()

    def _is_urgent(self, output: SequenceOutput) -> bool:
        return output.finished is not None or output.request_id not in self._begun

    def _rest(self, sent: list[SequenceOutput]) -> None:
        n_outputs = len({output.request_id for output in sent})
        self._rests_until_s = time.perf_counter() + min(MOST_REST_S, n_outputs * REST_PER_OUTPUT_S)

    def _send(self, held: list[SequenceOutput], outputs: list[SequenceOutput]) -> None:
        """Sends held and new outputs together. If new outputs cannot be packed, sends only the held outputs and
        raises.
        """
        try:
            self._pack_and_send(joined(held + outputs) if held else outputs)
        except OSError:
            raise
        except Exception:
            if not held:
                raise
            for output in held:  # one output causes the error, or the message is too large
                self._send_alone(output)
            self._check_sent(outputs)
            self._pack_and_send(outputs)
        for output in outputs:
            if output.finished is None:
                self._begun.add(output.request_id)
            else:
                self._begun.discard(output.request_id)

    def _pack_and_send(self, outputs: list[SequenceOutput]) -> None:
        if outputs:
            self._parent.send("outputs", [pack_output(output) for output in outputs])

    def _send_alone(self, output: SequenceOutput) -> None:
        if output.request_id in self._unsent:  # the text of this request has a gap already
            return
        try:
            self._pack_and_send([output])
        except OSError:
            raise
        except Exception as error:
            self._unsent[output.request_id] = describe(error)

    def _check_sent(self, outputs: list[SequenceOutput]) -> None:
        """Raises EngineError for a request whose held output could not be sent. The engine then ends the request with
        this error. Raises nothing for an output that ends its request with an error."""
        for output in outputs if self._unsent else ():
            error = self._unsent.get(output.request_id)
            if error is None:
                continue
            if output.finished is None or output.finished.error is None:
                raise EngineError(error)
            del self._unsent[output.request_id]

    def _send_held(self) -> None:
        """Sends held outputs at the end of a rest. The engine's thread may send them earlier, with outputs of a newer
        step."""
        while self._has_held.wait():
            time.sleep(max(0.0, self._rests_until_s - time.perf_counter()))
            with errors_logged("held outputs could not be sent"), contextlib.suppress(OSError), self._lock:
                if time.perf_counter() < self._rests_until_s:
                    continue
                held, self._held = self._held, []
                self._has_held.clear()
                self._send(held, [])
                self._rest(held)
