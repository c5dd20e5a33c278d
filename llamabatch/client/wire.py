"""What crosses between a client and its child process: length-prefixed msgpack messages on a socket pair.

A message is a list, its kind first. Parent to child: init, submit, abort, close; with a number for the answer: stats,
load_adapter, unload_adapter. Child to parent: ready, failed, outputs, answer, refused.
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

import msgpack

from llamabatch.config import EngineConfig
from llamabatch.errors import EngineError, SamplingError
from llamabatch.request.logprobs import Logprob, TokenLogprobs
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput, Timings
from llamabatch.request.request import Request, ResumedOutput
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.structured_outputs import Structure
from llamabatch.utils.lifetime import in_forks

MAX_MESSAGE = 256 * 2**20  # bytes; a larger length is a damaged stream
_LENGTH = struct.Struct("<I")


class Wire:
    """One end of the socket pair. Sending is safe from several threads; receiving is for one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        _open.add(self)

    def send(self, *message: Any) -> None:
        """Raises OSError when the other side is gone, and what `pack` raises."""
        self.send_packed(self.pack(*message))

    @staticmethod
    def pack(*message: Any) -> bytes:
        """Raises EngineError for a message above the limit, and what msgpack raises for what it cannot write."""
        data: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
        if len(data) > MAX_MESSAGE:
            raise EngineError(f"a message of {len(data)} bytes is too large; allowed are {MAX_MESSAGE}")
        return _LENGTH.pack(len(data)) + data

    def send_packed(self, data: bytes) -> None:
        """Sends what `pack` gave. Raises OSError when the other side is gone."""
        with self._lock:
            try:
                self._sock.sendall(data)
            except OSError:
                raise
            except BaseException:  # interrupted: what is left of the message would be read as another one
                self.close()
                raise

    def receive(self) -> list[Any] | None:
        """The next message; None at the end of the stream, be it in the middle of a message."""
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE:
            raise EngineError(f"the other process announced {length} bytes; allowed are {MAX_MESSAGE}")
        data = self._exactly(length)
        if data is None:
            return None
        message: list[Any] = msgpack.unpackb(data, unicode_errors="surrogatepass")
        return message

    def close(self) -> None:
        """Wakes a receive that is under way in another thread."""
        with contextlib.suppress(OSError):  # the other side may have gone first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def leave(self) -> None:
        """Closes this process's copy alone; the stream goes on for who shares it."""
        self._sock.close()

    def _exactly(self, n_bytes: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < n_bytes:
            try:
                part = self._sock.recv(min(n_bytes - len(parts), 2**20))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)


_open: weakref.WeakSet[Wire] = weakref.WeakSet()


@in_forks
def _leave_all() -> None:
    """While a fork held a copy, a child program would not see that its parent has gone."""
    for wire in list(_open):
        wire.leave()


def pack_config(config: EngineConfig) -> dict[str, Any]:
    return dataclasses.asdict(config.asked())


def unpack_config(packed: dict[str, Any]) -> EngineConfig:
    model = packed.pop("model")
    return EngineConfig.from_options(model, packed)


def check_crosses(request: Request) -> None:
    """Refuses what cannot go to another process. Raises SamplingError."""
    if request.params.logits_processors:
        raise SamplingError(
            "logits_processors are Python functions and cannot go to a child process; use an engine in this one, "
            "without isolate and multi-instance"
        )


def pack_request(request: Request) -> list[Any]:
    """Without the prompt's text: the child has no use for it, and the parent puts it into the result."""
    check_crosses(request)
    params = vars(request.params)
    return [
        request.request_id,
        request.prompt_token_ids,
        params,
        request.arrival_s,
        request.group,
        request.seed,
        request.adapters,
        request.score_from,
        request.embed,
        request.num_truncated,
        _pack_known(request.known),
    ]


def unpack_request(packed: list[Any]) -> Request:
    request_id, ids, params, arrival_s, group, seed, adapters, score_from, embed, num_truncated, known = packed
    if params["structured_outputs"] is not None:  # a named tuple came as a list
        params["structured_outputs"] = Structure(*params["structured_outputs"])
    sampling, pairs = SamplingParams(**params), tuple((name, scale) for name, scale in adapters)
    more = {"adapters": pairs, "score_from": score_from, "embed": embed, "num_truncated": num_truncated}
    more["known"] = _unpack_known(known)
    return Request(request_id, tuple(ids), sampling, None, arrival_s, group, seed, **more)


def _pack_known(known: ResumedOutput | None) -> list[Any] | None:
    if known is None:
        return None
    return [known.token_ids, known.times_s, _pack_logprobs(known.logprobs), known.admitted_s]


def _unpack_known(packed: list[Any] | None) -> ResumedOutput | None:
    if packed is None:
        return None
    token_ids, times_s, told, admitted_s = packed
    return ResumedOutput(tuple(token_ids), tuple(times_s), _known(_unpack_logprobs(told)), admitted_s)


def pack_output(output: SequenceOutput) -> list[Any]:
    finished = output.finished
    packed = None
    if finished is not None:
        completions = [
            [
                *[c.index, c.text, c.token_ids, c.finish_reason.value, c.stop_reason],
                *[_pack_logprobs(c.logprobs), c.cumulative_logprob],
            ]
            for c in finished.outputs
        ]
        timings = finished.timings
        packed = [
            completions,
            finished.error,
            [timings.queued_s, timings.ttft_s, timings.total_s, timings.token_times_s],
            _pack_logprobs(finished.prompt_logprobs),
            None if finished.embedding is None else finished.embedding.tobytes(),
            finished.num_truncated,
        ]
    logprobs = _pack_logprobs(output.logprobs)
    return [output.request_id, output.token_ids, output.text, packed, output.index, logprobs]


def unpack_output(packed: list[Any], request: Request) -> SequenceOutput:
    """The other side of pack_output; what the parent knows already (the prompt) did not travel."""
    request_id, token_ids, text, finished, number, packed_logprobs = packed
    logprobs = _known(_unpack_logprobs(packed_logprobs))
    if finished is None:
        return SequenceOutput(request_id, tuple(token_ids), text, index=number, logprobs=logprobs)
    completions, error, (queued_s, ttft_s, total_s, times), of_prompt, vector, num_truncated = finished
    outputs = tuple(
        CompletionOutput(
            index, text_, tuple(ids), FinishReason(reason), stop, _known(_unpack_logprobs(told)), cumulative
        )
        for index, text_, ids, reason, stop, told, cumulative in completions
    )
    timings = Timings(queued_s, ttft_s, total_s, tuple(times))
    prompt_ids, prompt_logprobs = request.prompt_token_ids, _unpack_logprobs(of_prompt)
    told = (prompt_logprobs, None if vector is None else array("f", vector), num_truncated)
    whole = RequestOutput(request_id, request.prompt, prompt_ids, outputs, error, timings, *told)
    return SequenceOutput(request_id, tuple(token_ids), text, whole, number, logprobs=logprobs)


def _pack_logprobs(told: tuple[TokenLogprobs | None, ...] | None) -> list[Any] | None:
    if told is None:
        return None
    return [None if one is None else [(token_id, *logprob) for token_id, logprob in one.items()] for one in told]


def _unpack_logprobs(packed: list[Any] | None) -> tuple[TokenLogprobs | None, ...] | None:
    if packed is None:
        return None
    return tuple(None if one is None else {token_id: Logprob(*logprob) for token_id, *logprob in one} for one in packed)


def _known(told: tuple[TokenLogprobs | None, ...] | None) -> tuple[TokenLogprobs, ...] | None:
    """Of output tokens: none is missing."""
    return None if told is None else tuple(one for one in told if one is not None)
