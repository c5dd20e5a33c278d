"""ParsingClient: takes the texts of answers apart, in front of all engines."""

from __future__ import annotations

import threading
from dataclasses import replace

from llamabatch.chat.output_parser import joined_calls
from llamabatch.client.middleware import PassingClient
from llamabatch.engine.hooks import Sink
from llamabatch.request.delta import AnswerParser
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.request import Request


class ParsingClient(PassingClient):
    """Turns the raw text of requests with a `make_parser` into thinking, answer and tool calls; others pass through."""

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        parsed = {request.request_id: request for request in requests if request.make_parser is not None}
        if not parsed:
            self.inner.submit(requests, sink, stream=stream)
            return
        answers = _Answers(parsed, stream)
        self.inner.submit(requests, lambda outputs: sink(answers.taken_apart(outputs)), stream=stream)


class _Answers:
    """The answers of one call on their way.

    Args:
        requests: those with a parser, by id.
        stream: the call gets each piece; else whole outputs only.
    """

    def __init__(self, requests: dict[str, Request], stream: bool) -> None:
        self._requests = requests
        self._stream = stream
        self._parsers: dict[tuple[str, int], AnswerParser] = {}
        # a sink that raises gets the same outputs again, on the same thread, and a parser must not
        self._last = threading.local()

    def taken_apart(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        """The outputs with parsed texts, in the same order; for outputs that come again, the same ones."""
        known: dict[int, tuple[SequenceOutput, SequenceOutput]] = getattr(self._last, "known", {})
        if not all(id(output) in known for output in outputs):
            known = self._last.known = {id(output): (output, self._taken_apart(output)) for output in outputs}
        return [known[id(output)][1] for output in outputs]

    def _taken_apart(self, output: SequenceOutput) -> SequenceOutput:
        request = self._requests.get(output.request_id)
        if request is None:
            return output
        whole = None if output.finished is None else _parsed(output.finished, request)
        if not self._stream:
            return replace(output, text="", finished=whole)
        parser = self._parser(request, output.index)
        ends = output.finish_reason is not None
        delta = parser.finish(output.text) if ends else parser.feed(output.text)
        if output.finished is not None:
            for index in range(request.params.n_copies):
                self._parsers.pop((request.request_id, index), None)
        return replace(
            output,
            text=delta.text,
            reasoning=delta.reasoning,
            tool_calls=delta.tool_calls,
            called_tools=ends and parser.has_called,
            finished=whole,
        )

    def _parser(self, request: Request, index: int) -> AnswerParser:
        assert request.make_parser is not None
        key = request.request_id, index
        if key not in self._parsers:
            self._parsers[key] = request.make_parser(request, index)
        return self._parsers[key]


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
