"""FrontSink: wraps a caller's sink, counts ended requests, and splits texts into thinking, answer and tool calls."""

from __future__ import annotations

import operator
from dataclasses import replace

from llamabatch.chat.output_parser import joined_calls
from llamabatch.client.base import errors_logged
from llamabatch.client.request_table import InFlight, RequestTable
from llamabatch.engine.hooks import Sink
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.request import Request

_TRIES = 2  # attempts to remove an ended request, which would otherwise count towards max_queue forever
_MOST_KEPT = 4096  # maximum number of outputs to keep for a sink that raises


class FrontSink:
    """A wrapper of a caller's sink. Before the caller gets the last output of a request, the request is counted and
    removed from the table.

    Args:
        sink: the caller's sink.
    """

    def __init__(self, table: RequestTable, sink: Sink) -> None:
        self._table = table
        self._sink = sink
        # (raw output, parsed output) by the id() of the raw output. After an error of the sink, the same raw outputs
        # come again, but a parser must not read them twice.
        self._kept: dict[int, tuple[SequenceOutput, SequenceOutput]] = {}

    def __call__(self, outputs: list[SequenceOutput]) -> None:
        ended = [output for output in outputs if output.finished is not None]
        passed = self._parsed(outputs) if self._table.n_parsed or self._kept else outputs
        if ended:
            for _ in range(_TRIES):
                with errors_logged("the counts of requests are off from here on"):
                    self._table.leave(ended)
                    break
        if passed is outputs:
            self._sink(outputs)
            return
        try:
            self._sink(passed)
        except BaseException:
            self._keep(outputs, passed)
            raise
        if self._kept:
            self._drop(outputs, {output.request_id for output in ended})

    def _parsed(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        """Returns the outputs with parsed texts, in the same order; `outputs` itself if there is nothing to parse."""
        passed: list[SequenceOutput] = []
        raised: Exception | None = None
        for output in outputs:
            try:
                changed = self._passed_on(output)
            except Exception as error:
                raised, changed = raised or error, output
            passed.append(changed)
        if raised is None:
            return outputs if all(map(operator.is_, passed, outputs)) else passed
        self._keep(outputs, passed)  # the client passes each output again, alone
        try:
            raise raised
        finally:
            del raised  # the traceback refers to this frame, so the variable would make a cycle

    def _passed_on(self, output: SequenceOutput) -> SequenceOutput:
        kept = self._kept.get(id(output)) if self._kept else None
        if kept is not None:
            return kept[1]
        one = self._table.get(output.request_id)
        if one is None or one.request.make_parser is None:
            return output
        try:
            return _taken_apart(output, one)
        except Exception:
            if output.finished is None or output.finished.error is None:
                raise  # the engine ends the request with this error
            return output  # the caller must get the last output, even if the parser fails again

    def _keep(self, outputs: list[SequenceOutput], passed: list[SequenceOutput]) -> None:
        for output, changed in zip(outputs, passed, strict=True):
            if changed is not output:
                self._kept[id(output)] = output, changed
        while len(self._kept) > _MOST_KEPT:
            self._kept.pop(next(iter(self._kept)), None)

    def _drop(self, outputs: list[SequenceOutput], ended: set[str]) -> None:
        for output in outputs:
            self._kept.pop(id(output), None)
        for key, (output, _) in list(self._kept.items()) if ended else ():
            if output.request_id in ended:  # an ended request has no more outputs
                self._kept.pop(key, None)


def _taken_apart(output: SequenceOutput, one: InFlight) -> SequenceOutput:
    whole = None if output.finished is None else _parsed(output.finished, one.request)
    if not one.call.stream:
        return replace(output, text="", finished=whole)
    parser = one.parser(output.index)
    ends = output.finish_reason is not None
    delta = parser.finish(output.text) if ends else parser.feed(output.text)
    # dataclasses.replace would take four times as long, and this runs for each token of each chat.
    return SequenceOutput(
        output.request_id,
        output.token_ids,
        delta.text,
        whole,
        output.index,
        output.prompt_index,
        output.logprobs,
        delta.reasoning,
        output.ended,
        delta.tool_calls,
        ends and parser.has_called,
    )


def _parsed(output: RequestOutput, request: Request) -> RequestOutput:
    return replace(output, outputs=tuple(_parsed_completion(each, request) for each in output.outputs))


def _parsed_completion(completion: CompletionOutput, request: Request) -> CompletionOutput:
    if completion.finish_reason is FinishReason.ERROR and not completion.token_ids:
        return completion  # the continuation never ran
    assert request.make_parser is not None
    parser = request.make_parser(request, completion.index)
    delta = parser.finish(completion.text)
    reasoning = delta.reasoning if parser.has_reasoned else None
    return replace(completion, text=delta.text, reasoning=reasoning, tool_calls=joined_calls(delta.tool_calls))
