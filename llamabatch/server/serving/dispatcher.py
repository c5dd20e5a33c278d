"""OutputDispatcher is the common sink of all requests of an event loop. A handler reads its outputs from a
RequestStream.

After a step, the engine's thread appends the outputs of all requests to a deque, and wakes the loop unless a wake-up is
already due. A call_soon_threadsafe for each request would cost more than all other work for a token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace

from llamabatch.entrypoints.submission import Submission
from llamabatch.errors import EngineError, describe
from llamabatch.request.joining import joined
from llamabatch.request.logprobs import count
from llamabatch.request.outputs import FinishReason, RequestOutput, SequenceOutput
from llamabatch.server.http.errors import log_error

_LOOK_S = 1.0
# After _drain there is a pause. It lasts this many seconds for each stream that _drain served, and at most
# _MOST_REST_S. Outputs that come during the pause are sent together, because a stream costs the same for one token as
# for many. First and last outputs do not wait for the end of the pause. If steps take longer than the pause, no output
# waits.
_REST_PER_STREAM_S = 0.00025
_MOST_REST_S = 0.033
_COMPACT_FROM = 64  # number of outputs that may wait for a slow reader; more outputs are joined


class OutputDispatcher:
    """Accepts outputs on threads of the engine, and passes them to the streams of one event loop.

    Args:
        loop: the event loop of the streams.
        abort: aborts requests by their ids, without blocking.

    Attributes:
        sink: the sink of all requests; always the same object, because the engine's thread groups outputs by sink.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, abort: Callable[[list[str]], None]) -> None:
        self.sink = self._take
        self._loop = loop
        self._abort = abort
        self._outputs: deque[list[SequenceOutput]] = deque()
        self._is_due = False
        self._is_resting = False
        self._timer: asyncio.TimerHandle | None = None
        self._streams: dict[str, RequestStream] = {}

    def add(self, stream: RequestStream, request_ids: Iterable[str]) -> None:
        """Connects requests to a stream. Call this method before the requests are submitted, on any thread."""
        self._streams.update(dict.fromkeys(request_ids, stream))

    def watch(self) -> None:
        """Starts regular checks for outputs that came without a wake-up. Call this method on the loop, after `add`."""
        if self._timer is None or self._timer.when() < self._loop.time() - _LOOK_S:  # no timer, or its check has failed
            self._timer = self._loop.call_later(_LOOK_S, self._look)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Drops later outputs of these requests. May be called on any thread."""
        for request_id in request_ids:
            self._streams.pop(request_id, None)

    @property
    def request_ids(self) -> list[str]:
        """The requests that have not ended and whose readers have not left."""
        return list(self._streams)

    def _take(self, outputs: list[SequenceOutput]) -> None:
        """Adds outputs to the queue, on a thread of the engine. This method is the sink."""
        self._outputs.append(outputs)
        # No output is missed: _drain clears _is_due, and _rested clears _is_resting, before they look for outputs.
        if self._is_due:
            return
        if self._is_resting and not any(map(self._is_urgent, outputs)):
            return
        self._is_due = True
        try:
            self._loop.call_soon_threadsafe(self._drain)
        except RuntimeError:  # the loop was closed before its requests had ended
            self._is_due = False
            self._outputs.clear()
            left = list(self._streams)
            self.remove(left)
            self._abort(left)
        except BaseException:
            self._is_due = False
            if self._outputs and self._outputs[-1] is outputs:  # otherwise _drain or _look passes on the outputs
                self._outputs.pop()
                raise  # the engine then passes the outputs again, one by one

    def _drain(self) -> None:
        """Passes outputs to their streams. Runs on the loop. During a pause, serves only requests that begin or end."""
        self._is_due = False
        outputs: list[SequenceOutput] = []
        later: list[SequenceOutput] = []
        try:
            while self._outputs:
                outputs += self._outputs.popleft()
            if self._is_resting:
                urgent = {output.request_id for output in outputs if self._is_urgent(output)}
                later = [output for output in outputs if output.request_id not in urgent]
                outputs = [output for output in outputs if output.request_id in urgent]
            elif outputs:
                n_streams = len({output.request_id for output in outputs})
                self._loop.call_later(min(_MOST_REST_S, n_streams * _REST_PER_STREAM_S), self._rested)
                self._is_resting = True
        except BaseException:
            self._outputs.appendleft(outputs + later)  # _look passes on these outputs later
            raise
        if later:
            self._outputs.appendleft(later)
        for output in outputs:
            try:
                self._give(output)
            except BaseException as error:  # only this reader gets the error; other streams get their outputs
                self._fail(output, error)

    def _is_urgent(self, output: SequenceOutput) -> bool:
        """True for the first output of a stream, and for the last output of a request."""
        if output.finished is not None:
            return True
        stream = self._streams.get(output.request_id)
        return stream is not None and not stream.n_outputs

    def _rested(self) -> None:
        """Ends the pause after _drain, and passes on the outputs that came during the pause. Runs on the loop."""
        self._is_resting = False
        if self._outputs:
            self._drain()

    def _give(self, output: SequenceOutput) -> None:
        streams = self._streams
        stream = streams.get(output.request_id)
        if stream is not None:  # None: the reader of the stream has left
            stream.feed(output)
            if output.finished is not None:  # removed after `feed`, so that _fail finds the stream
                streams.pop(output.request_id, None)

    def _fail(self, output: SequenceOutput, error: BaseException) -> None:
        """Ends a stream whose `feed` failed."""
        with contextlib.suppress(Exception):
            log_error("an output could not be given to its reader", error)
        stream = self._streams.pop(output.request_id, None)
        if stream is not None:
            stream.fail(error)

    def _look(self) -> None:
        """Passes on outputs that stayed in the queue after an exception. Runs every _LOOK_S seconds while there are
        streams."""
        self._timer = self._loop.call_later(_LOOK_S, self._look) if self._streams else None
        self._is_resting = False
        if self._outputs:
            self._drain()


class RequestStream:
    """The outputs of one submission, for one reader on the event loop.

    `async for outputs in stream` yields lists. Each list has all SequenceOutputs since the previous list. Several
    outputs of one continuation are joined if this loses nothing. After `poke`, the list is empty. The iteration ends
    after the last output. A reader that leaves early must call `abort`.

    Attributes:
        submission: the requests; None until they are made.
        n_outputs: outputs received so far.
        n_logprobs: logprobs in the RequestOutputs received so far.
        spend: called with the number of new tokens, for the limits of the API key; None: tokens are not counted.
        noted: called on the loop with each RequestOutput; None: not called.
        on_end: called once, on the loop, when the reader has the last output or has left.
    """

    def __init__(self, dispatcher: OutputDispatcher, abort: Callable[[list[str]], None]) -> None:
        self.submission: Submission | None = None
        self.n_outputs = 0
        self.n_logprobs = 0
        self.spend: Callable[[int], None] | None = None
        self.noted: Callable[[RequestOutput], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self._dispatcher = dispatcher
        self._abort = abort
        self._has_left = False
        self._is_poked = False
        self._failure: BaseException | None = None
        self._spent: dict[str, int] = {}  # request id -> number of tokens already passed to `spend`
        self._pending: list[SequenceOutput] = []
        self._compact_at = _COMPACT_FROM
        self._reader: asyncio.Future[None] | None = None

    @property
    def has_left(self) -> bool:
        """True if the reader has left. May be read on any thread."""
        return self._has_left

    @property
    def done(self) -> bool:
        """True if every request has ended and the reader has received the last output."""
        return self.submission is not None and self.submission.done

    @property
    def prompt_lengths(self) -> list[int]:
        """The number of tokens of each prompt, once the requests are made."""
        assert self.submission is not None
        return [len(each.prompt_token_ids) for each in self.submission.requests]

    def started(self) -> None:
        """Begins the stream after the submission. The outputs of refused requests come first."""
        assert self.submission is not None
        self._dispatcher.watch()
        self._pending = [*self.submission.refused, *self._pending]
        if self.submission.done and not self._pending:
            self._end()

    def feed(self, output: SequenceOutput) -> None:
        """Adds an output for the reader, on the loop."""
        self.n_outputs += 1
        if self.spend is not None:
            self._count(output, self.spend)
        if output.finished is not None:
            self.n_logprobs += _n_logprobs(output.finished)
            if self.noted is not None:
                self.noted(output.finished)
        self._pending.append(output)
        if len(self._pending) >= self._compact_at:
            self._pending = joined(self._pending)
            self._compact_at = max(_COMPACT_FROM, 2 * len(self._pending))
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)

    def _count(self, output: SequenceOutput, spend: Callable[[int], None]) -> None:
        """Calls `spend` with the number of new tokens; at the last output, with the number of all tokens that are not
        counted yet."""
        name, n_tokens = output.request_id, len(output.token_ids)
        if output.finished is None:
            self._spent[name] = self._spent.get(name, 0) + n_tokens
        else:
            n_tokens = sum(len(each.token_ids) for each in output.finished.outputs) - self._spent.pop(name, 0)
        if n_tokens > 0:
            spend(n_tokens)

    def fail(self, error: BaseException) -> None:
        """Ends the iteration with an error, on the loop."""
        self._failure = error
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def poke(self) -> None:
        """Makes a waiting reader receive an empty list."""
        if self._reader is not None and not self._reader.done() and not self._pending:
            self._is_poked = True
            self._reader.set_result(None)

    def __aiter__(self) -> AsyncIterator[list[SequenceOutput]]:
        return self

    async def __anext__(self) -> list[SequenceOutput]:
        """Waits for outputs, and returns all outputs since the last call.

        Raises:
            EngineError: a request failed and `errors` of the submission is "raise", or an output was lost.
        """
        submission = self.submission
        assert submission is not None, "the stream of a submission that was not made"
        if submission.done or self._has_left:
            raise StopAsyncIteration
        while not self._pending and self._failure is None:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
            if self._has_left:
                raise StopAsyncIteration
            if self._is_poked:
                self._is_poked = False
                return []
        if self._failure is not None:
            self.abort()
            raise EngineError(f"an output was lost: {describe(self._failure)}") from self._failure
        pending, self._pending, self._compact_at = self._pending, [], _COMPACT_FROM
        try:
            ready, self._pending = before_failure(joined(pending) if len(pending) > 1 else pending)
            outputs = list(submission.record(ready))
        except BaseException:
            self.abort()
            raise
        if submission.done:
            self._end()
        return outputs

    async def outputs(self) -> list[RequestOutput]:
        """Returns the results in the order of the prompts. Cancelling the call aborts the requests.

        Raises:
            EngineError: a request failed and `errors` of the submission is "raise".
        """
        try:
            async for _ in self:
                pass
        finally:
            self.abort()
        assert self.submission is not None
        return self.submission.outputs

    def abort(self) -> None:
        """Ends the iteration and aborts the running requests without waiting. No effect after the last output."""
        if self._has_left or self.done:
            return
        self._has_left = True
        self._pending = []
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if self.submission is not None:
            left = self.submission.unfinished
            self._dispatcher.remove(left)
            self._abort(left)
        self._end()

    def _end(self) -> None:
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()


def _n_logprobs(output: RequestOutput) -> int:
    return count(output.prompt_logprobs) + sum([count(each.logprobs) for each in output.outputs])


def before_failure(outputs: list[SequenceOutput]) -> tuple[list[SequenceOutput], list[SequenceOutput]]:
    """Splits outputs into two parts at the first failed or aborted request. The first part has the last text of this
    request. The second part has the end of the request. No text is lost if this end raises an error."""
    for at, output in enumerate(outputs):
        finished = output.finished
        if finished is None or (finished.error is None and output.finish_reason is not FinishReason.ABORT):
            continue
        brings = output.text or output.reasoning or output.token_ids or output.tool_calls
        if not brings and not at:
            return outputs, []
        last = replace(output, token_ids=(), text="", reasoning="", tool_calls=(), logprobs=None)
        earlier = [replace(output, finished=None, ended=None)] if brings else []
        return outputs[:at] + earlier, [last, *outputs[at + 1 :]]
    return outputs, []
