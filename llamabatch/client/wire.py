"""Messages between a client and its child process: length-prefixed msgpack on a socket pair.

A message is an array. Its first item is the kind of message. Kinds from parent to child: init, submit, abort, close;
also stats, states and the methods of EngineClient.call. A message of the latter kinds has a number, and its answer has
the same number.
Kinds from child to parent: ready, failed, admitted, outputs, beat, stats, dying, answer, refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import threading
import weakref
from array import array
from typing import Any

from llamabatch.client.codec import Codec, crosses, pack, unpack
from llamabatch.config import EngineConfig
from llamabatch.engine.engine_state import EngineState
from llamabatch.errors import EngineError, SamplingError
from llamabatch.request.logprobs import FlatLogprobs
from llamabatch.request.media import Media
from llamabatch.request.outputs import CompletionOutput, RequestOutput, SequenceOutput, Timings
from llamabatch.request.reasoning import Reasoning, ReasoningTags
from llamabatch.request.request import Request, ResumedOutput
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.structured_outputs import Structure
from llamabatch.request.tool_calls import ToolCall, ToolCallDelta
from llamabatch.scheduler.slot_state import SlotState, WaitingState
from llamabatch.utils.lifetime import in_forks

MAX_MESSAGE = 256 * 2**20  # maximum bytes of a message; a larger length means a damaged stream
# Minimum and maximum number of bytes to ask of one recv(). The call allocates this number, even if fewer bytes come.
_AT_ONCE, _MOST_AT_ONCE = 2**16, 2**20
_LENGTH = struct.Struct("<I")


class Wire:
    """One end of a socket pair. Any thread may send; only one thread may receive."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._unread = bytearray()  # bytes received after the last message
        _open.add(self)

    def send(self, *message: Any) -> None:
        """Sends a message. Raises OSError if the other side is gone, and the errors of `pack`."""
        self.send_packed(self.pack(*message))

    @staticmethod
    def pack(*message: Any) -> bytes:
        """Returns the bytes of a message: its length, then its content. Raises EngineError for a content above
        MAX_MESSAGE, and the errors of msgpack for unsupported values.
        """
        data = pack(message)
        if len(data) > MAX_MESSAGE:
            raise EngineError(f"a message of {len(data)} bytes is too large; allowed are {MAX_MESSAGE}")
        return _LENGTH.pack(len(data)) + data

    def send_packed(self, data: bytes) -> None:
        """Sends the result of `pack`. Raises OSError when the other side is gone."""
        with self._lock:
            try:
                self._sock.sendall(data)
            except OSError:
                raise
            except BaseException:  # after part of a message, the other side would misread the next one
                self.close()
                raise

    def receive(self) -> tuple[Any, ...] | None:
        """Returns the next message; None if the stream ends, even within a message. Raises EngineError for a message
        above MAX_MESSAGE, and the errors of codec.unpack.
        """
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE:
            raise EngineError(f"the other process announced {length} bytes; allowed are {MAX_MESSAGE}")
        data = self._exactly(length)
        if data is None:
            return None
        message: tuple[Any, ...] = unpack(data)
        return message

    def close(self) -> None:
        """Closes the stream. A `receive` that waits in another thread returns None."""
        with contextlib.suppress(OSError):  # the other side may have closed the stream
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def leave(self) -> None:
        """Closes only this process's copy of the socket. The stream stays open in the other process."""
        self._sock.close()

    def _exactly(self, n_bytes: int) -> bytes | None:
        """Returns the next bytes; None at the end. Makes few system calls, because each call may let other threads go
        first.
        """
        unread = self._unread
        while len(unread) < n_bytes:
            try:
                part = self._sock.recv(min(max(n_bytes - len(unread), _AT_ONCE), _MOST_AT_ONCE))
            except OSError:
                return None
            if not part:
                return None
            unread += part
        taken = bytes(memoryview(unread)[:n_bytes])
        del unread[:n_bytes]
        return taken


_open: weakref.WeakSet[Wire] = weakref.WeakSet()


@in_forks
def _leave_all() -> None:
    """Closes a fork's copies of sockets. With an open copy, a child program does not notice the end of its parent."""
    for wire in list(_open):
        wire.leave()


def pack_config(config: EngineConfig) -> dict[str, Any]:
    return dataclasses.asdict(config.requested())


def unpack_config(packed: dict[str, Any]) -> EngineConfig:
    model = packed.pop("model")
    return EngineConfig.from_options(model, packed)


_PARAMS_KEPT = 8
_SEVERAL_TYPES = (
    *("dry_sequence_breakers", "stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids"),
    *("logprob_token_ids", "samplers"),
)
_CHECKED_BY_PARAMS: dict[str, Any] = dict.fromkeys((*_SEVERAL_TYPES, "logits_processors"), Any)

# FlatLogprobs are sent as their parts. Reading the logprobs of a long answer as objects would take a second in one
# call, and no other thread would run during this call.
crosses(FlatLogprobs, FlatLogprobs.parts, FlatLogprobs.of_parts)
_LOGPROBS = {"logprobs": FlatLogprobs | None}
Codec(ResumedOutput, _LOGPROBS)
# Decoded parameters are kept because a server's requests mostly have equal ones. Checking parameters takes longer than
# reading the rest of a request, and an engine prepares each new instance.
Codec(SamplingParams, _CHECKED_BY_PARAMS | {"structured_outputs": Structure | None}, n_kept=_PARAMS_KEPT)
Codec(Media, {"kind": str, "form": str})
Codec(ReasoningTags)
Codec(Reasoning)
_REQUEST = Codec(Request, left_out=["prompt", "make_parser"])  # the child does not use these fields
Codec(ToolCall)
Codec(ToolCallDelta)
Codec(CompletionOutput, _LOGPROBS)
Codec(Timings)
# The fields in left_out are not sent, because the parent knows them.
_WHOLE = {"embedding": array | None, "prompt_logprobs": FlatLogprobs | None}
Codec(RequestOutput, _WHOLE, left_out=["request_id", "prompt", "prompt_token_ids"])
_OUTPUT = Codec(SequenceOutput, _LOGPROBS)
Codec(SlotState)
Codec(WaitingState)
_STATE = Codec(EngineState)


def check_crosses(request: Request) -> None:
    """Raises SamplingError for a request that cannot go to another process."""
    if request.params.logits_processors:
        raise SamplingError(
            "logits_processors are Python functions and cannot go to a child process; use an engine in this one, "
            "without isolate and multi-instance"
        )


def pack_request(request: Request) -> Any:
    """Returns the fields of a request for a message. Raises SamplingError as check_crosses does."""
    check_crosses(request)
    return _REQUEST.encode(request)


def unpack_request(packed: Any) -> Request:
    """Returns a request without the text of its prompt. Raises EngineError for wrong fields, and SamplingError."""
    return _REQUEST.decode(packed)


pack_output = _OUTPUT.encode
pack_state = _STATE.encode
unpack_state = _STATE.decode


def unpack_output(packed: Any, request: Request) -> SequenceOutput:
    """Returns an output and adds the fields known only to the parent. Raises EngineError for wrong fields."""
    output = _OUTPUT.decode(packed)
    if output.finished is not None:  # decode() made a new object, so no copy is needed
        known = {"prompt": request.prompt, "prompt_token_ids": request.prompt_token_ids}
        vars(output.finished).update(known, request_id=request.request_id)
    return output
