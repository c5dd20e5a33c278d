"""The response with generated text, whole or as a stream. Each dialect writes both forms itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission
from llamabatch.errors import PromptError, SamplingError
from llamabatch.llama.model import Model
from llamabatch.request.outputs import FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.structured_outputs import TOOLS
from llamabatch.server.http.errors import ApiError
from llamabatch.server.request.body import Body, Rules
from llamabatch.server.request.generation import Generation, of_form
from llamabatch.server.request.reading import adapter_ids
from llamabatch.server.response.answer import ignored_of, json_response, large_response
from llamabatch.server.response.event_stream import Chunks, EventStream
from llamabatch.server.response.json_text import LIGHT, weight
from llamabatch.server.serving.dispatcher import RequestStream
from llamabatch.server.serving.serving import Prepare, Serving

Outputs = list[RequestOutput]
Count = Callable[[Outputs], int]  # returns the number of thinking tokens in whole outputs


async def respond(
    serving: Serving,
    body: Generation,
    whole: Callable[[Outputs, int], Any],
    chunks: Callable[[RequestStream, Count], Chunks],
    *,
    prepare: Prepare | None = None,
    outputs: Callable[[RequestStream], Awaitable[Outputs]] | None = None,
    is_large: bool = False,
    stream: Callable[..., EventStream] = EventStream,
) -> Any:
    """Submits the requests of a body and returns its response.

    Args:
        whole: makes the whole answer from the outputs and the number of thinking tokens.
        chunks: makes the writer of a stream's events. Called after the requests are submitted.
        prepare: makes the requests; None: the body's `submission`.
        outputs: reads the outputs of a whole answer from the stream; None: RequestStream.outputs reads the outputs.
        is_large: True: a whole answer is large, even if the outputs are short.
        stream: makes the streamed response. Takes the arguments of EventStream.

    Raises:
        ApiError: a request failed. The errors of Serving.submit are raised as well.
    """
    adapters = adapter_ids(serving)
    make = prepare or partial(body.submission, loaded=adapters)
    ignored, noted = [*body.ignored], None
    if serving.slot_files is not None and body.id_slot is not None and body.id_slot >= 0:
        noted = serving.slot_files.noted(body.id_slot)
        if body.params.cache_salt is not None or body.adapters or body.lora:
            noted = None  # the text must not be saved: slot files have no adapters, and any caller may load them
        ignored += ["id_slot"] if noted is None else []

    def prepared(processor: InputProcessor) -> Submission:
        submission = make(processor)
        ignored.extend(_not_held(submission, body, strict=serving.options.strict))
        return submission

    in_pieces = body.stream or outputs is not None
    try:
        call = await serving.submit(
            prepared,
            body.n_prompts,
            body.params.n_copies,
            cuts=body.cuts,
            stream=in_pieces,
            media=body.has_media,
            noted=noted,
        )
    except PromptError as error:  # for example an error of the chat template
        raise ApiError.of(error, "messages" if "messages[" in str(error) else None) from error
    except SamplingError as error:
        if body.form is None or "structured_outputs" not in str(error):
            raise
        raise ApiError(400, of_form(body.form, str(error)), param=body.form.partition(".")[0]) from error
    if body.stream:
        ping_s = serving.options.sse_ping_s if body.ping_s is None else body.ping_s
        made = chunks(call, partial(reasoning_tokens, model=serving.model))
        made = _WithoutOutput(made) if body.no_output else made
        return stream(serving, call, made, ping_s, ignored_of(tuple(ignored)))
    found = await (call.outputs() if outputs is None else outputs(call))
    found = [*map(without_output, found)] if body.no_output else found
    thinks = any(each.reasoning for output in found for each in output.outputs)
    n_reasoning = await serving.on_thread(reasoning_tokens, found, serving.model) if thinks else 0
    if is_large or weight(found) > LIGHT:
        return await large_response(serving, whole, found, n_reasoning, ignored=tuple(ignored))
    return json_response(whole(found, n_reasoning), tuple(ignored))


def _not_held(submission: Submission, body: Generation, *, strict: bool) -> list[str]:
    """Returns parts of tools that are not enforced by the grammar of tool calls. If there are such parts and the server
    is strict, raises ApiError."""
    own = body.params.structure
    known = () if own is None else own.not_held
    forms = [request.params.structure for request in submission.requests]
    parts = [part for form in forms if form is not None and form.kind == TOOLS for part in form.not_held]
    if not parts:
        return []
    found = Body({}, {}, Rules(strict=strict))
    found.ignore_not_held("tools", (part for part in dict.fromkeys(parts) if part not in known))
    return found.ignored


def without_output(output: RequestOutput) -> RequestOutput:
    """Returns a whole output without its generated tokens, for a body with max_tokens 0."""
    nothing: dict[str, Any] = {"text": "", "token_ids": (), "reasoning": None, "tool_calls": (), "logprobs": None}
    if output.error is None:
        nothing |= {"finish_reason": FinishReason.LENGTH, "stop_reason": None}
    return replace(output, outputs=tuple(replace(each, **nothing) for each in output.outputs))


class _WithoutOutput:
    """A writer of events without the generated tokens."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    def takes_long(self, outputs: Sequence[SequenceOutput]) -> bool:
        return self._chunks.takes_long(outputs)

    def end_takes_long(self) -> bool:
        return self._chunks.end_takes_long()

    def feed(self, outputs: list[SequenceOutput]) -> bytes:
        return self._chunks.feed([*map(_without_text, outputs)])

    def end(self) -> Iterable[bytes]:
        return self._chunks.end()

    def error(self, error: ApiError) -> bytes:
        return self._chunks.error(error)


def _without_text(piece: SequenceOutput) -> SequenceOutput:
    nothing: dict[str, Any] = {"text": "", "token_ids": (), "reasoning": "", "tool_calls": (), "logprobs": None}
    finished = None if piece.finished is None else without_output(piece.finished)
    ended = None if piece.ended is None else FinishReason.LENGTH
    return replace(piece, finished=finished, ended=ended, called_tools=False, **nothing)


def reasoning_tokens(outputs: Outputs, model: Model) -> int:
    """Returns the number of thinking tokens. Tokenizes the text again, since outputs do not mark these tokens."""
    texts = [each.reasoning for output in outputs for each in output.outputs if each.reasoning]
    return sum(len(model.tokenize(text, add_special=False)) for text in texts)
