"""ParsingClient: takes the texts of answers apart, in front of all engines."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace

from llamabatch.chat.output_parser import joined_calls
from llamabatch.client.base import EngineClient, SharedSinks
from llamabatch.client.middleware import PassingClient
from llamabatch.engine.hooks import Sink
from llamabatch.request.delta import AnswerParser
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.request import Request


class ParsingClient(PassingClient):
    """Turns the raw text of requests with a `make_parser` into thinking, answer and tool calls; others pass through."""

    def __init__(self, client: EngineClient) -> None:
        super().__init__(client)
        self._sinks = SharedSinks(_Answers)

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        answers = self._sinks.of(sink)
        added = answers.add(requests, stream)
        try:
            self.inner.submit(requests, answers, stream=stream)
        except BaseException:  # nothing was queued
            answers.forget(added)
            raise


class _Answers:
    """The sink around one of a caller: answers of requests with a parser go on taken apart.

    Args:
        sink: the caller's.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._requests: dict[str, _Parsed] = {}
        # a sink that raises gets the same outputs again, on the same thread, and a parser must not
        self._last = threading.local()

    def __call__(self, outputs: list[SequenceOutput]) -> None:
        self._sink(self.taken_apart(outputs) if self._requests else outputs)

    def add(self, requests: list[Request], stream: bool) -> list[str]:
        """Adds those of the requests that have a parser; returns their ids.

        Args:
            stream: the caller gets each piece; else whole outputs only.
        """
        added = []
        for request in requests:
            # of an id that is in flight already the engine refuses the second request
            if request.make_parser is not None and request.request_id not in self._requests:
                self._requests[request.request_id] = _Parsed(request, stream)
                added.append(request.request_id)
        return added

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drops requests."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def taken_apart(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        """The outputs with parsed texts, in the same order; for outputs that come again, the same ones."""
        known: dict[int, tuple[SequenceOutput, SequenceOutput]] = getattr(self._last, "known", {})
        if not all(id(output) in known for output in outputs):
            known = self._last.known = {id(output): (output, self._taken_apart(output)) for output in outputs}
        return [known[id(output)][1] for output in outputs]

    def _taken_apart(self, output: SequenceOutput) -> SequenceOutput:
        answer = self._requests.get(output.request_id)
        if answer is None:
            return output
        whole = None if output.finished is None else _parsed(output.finished, answer.request)
        if not answer.stream:
            changed = replace(output, text="", finished=whole)
        else:
            parser = answer.parser(output.index)
            ends = output.finish_reason is not None
            delta = parser.finish(output.text) if ends else parser.feed(output.text)
            # without dataclasses.replace, which takes four times as long: this is for each token of each chat
            changed = SequenceOutput(
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
        if output.finished is not None:
            self.forget([output.request_id])
        return changed


class _Parsed:
    """A request with a parser, and the parsers of its continuations by their index."""

    def __init__(self, request: Request, stream: bool) -> None:
        self.request = request
        self.stream = stream
        self._parsers: dict[int, AnswerParser] = {}

    def parser(self, index: int) -> AnswerParser:
        """The parser of a continuation, made with its first piece."""
        parser = self._parsers.get(index)
        if parser is None:
            assert self.request.make_parser is not None
            parser = self._parsers[index] = self.request.make_parser(self.request, index)
        return parser


def _parsed(output: RequestOutput, request: Request) -> RequestOutput:
    return replace(output, outputs=tuple(_parsed_completion(each, request) for each in output.outputs))


def _parsed_completion(completion: CompletionOutput, request: Request) -> CompletionOutput:
    if completion.finish_reason is FinishReason.ERROR and not completion.token_ids:
        return completion  # it never ran
    assert request.make_parser is not None
    parser = request.make_parser(request, completion.index)
    delta = parser.finish(completion.text)
    reasoning = delta.reasoning if parser.has_reasoned else None
    return replace(completion, text=delta.text, reasoning=reasoning, tool_calls=joined_calls(delta.tool_calls))
