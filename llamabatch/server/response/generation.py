"""The way of a body that asks for text to its answer, whole or as a stream; a dialect writes both forms."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from llamabatch.llama.model import Model
from llamabatch.request.outputs import RequestOutput
from llamabatch.server.request.generation import Generation
from llamabatch.server.request.reading import adapter_ids
from llamabatch.server.response.answer import ignored_of, json_response, large_response
from llamabatch.server.response.event_stream import Chunks, EventStream
from llamabatch.server.response.json_text import LIGHT, weight
from llamabatch.server.serving.dispatcher import RequestStream
from llamabatch.server.serving.serving import Prepare, Serving

Outputs = list[RequestOutput]
Count = Callable[[Outputs], int]  # tokens of the thinking in whole outputs


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
    """Submits the requests of a body, and answers it.

    Args:
        whole: the answer of outputs, given the number of tokens of their thinking.
        chunks: the writer of a stream's events, once its requests are submitted.
        prepare: makes the requests; None: the body's `submission`.
        outputs: reads the outputs of a whole answer piece by piece; None: they are taken when they are there.
        is_large: a whole answer takes long to write, whatever its outputs.
        stream: as EventStream.

    Raises:
        ApiError: a request failed. What Serving.submit raises.
    """
    adapters = adapter_ids(serving)
    in_pieces = body.stream or outputs is not None
    call = await serving.submit(
        prepare or partial(body.submission, loaded=adapters),
        body.n_prompts,
        body.params.n_copies,
        cuts=body.cuts,
        stream=in_pieces,
    )
    if body.stream:
        ping_s = serving.options.sse_ping_s if body.ping_s is None else body.ping_s
        made = chunks(call, partial(reasoning_tokens, model=serving.model))
        return stream(serving, call, made, ping_s, ignored_of(body.ignored))
    found = await (call.outputs() if outputs is None else outputs(call))
    thinks = any(each.reasoning for output in found for each in output.outputs)
    n_reasoning = await serving.on_thread(reasoning_tokens, found, serving.model) if thinks else 0
    if is_large or weight(found) > LIGHT:
        return await large_response(serving, whole, found, n_reasoning, ignored=body.ignored)
    return json_response(whole(found, n_reasoning), body.ignored)


def reasoning_tokens(outputs: Outputs, model: Model) -> int:
    """Tokens of the thinking in whole outputs, which do not say where it ends among their tokens."""
    texts = [each.reasoning for output in outputs for each in output.outputs if each.reasoning]
    return sum(len(model.tokenize(text, add_special=False)) for text in texts)
