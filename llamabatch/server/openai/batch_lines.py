"""Reads and answers a line of a batch, with the fields, checks, defaults and responses of the HTTP endpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import Any

from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.errors import PromptError
from llamabatch.jobs.input.lines import ParsedLine
from llamabatch.jobs.rows import ServiceForm, Task
from llamabatch.request.outputs import RequestOutput
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.server.batches.results import answer_of
from llamabatch.server.batches.runner import ReadLine
from llamabatch.server.http.errors import ApiError
from llamabatch.server.openai.chat_response import chat_response
from llamabatch.server.openai.chunks import Head
from llamabatch.server.openai.completion_body import CompletionBody, read_completion
from llamabatch.server.openai.completion_response import completion_response
from llamabatch.server.openai.embeddings import EmbeddingBody, embedding_response, read_embedding
from llamabatch.server.request.chat_body import ChatBody, read_chat
from llamabatch.server.request.generation import Generation
from llamabatch.server.request.reading import adapter_ids, rules_of, with_model
from llamabatch.server.response.generation import reasoning_tokens, without_output
from llamabatch.server.response.json_text import dump
from llamabatch.server.serving.serving import Serving

CHAT, COMPLETIONS, EMBEDDINGS = ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")

_TASKS: dict[str, Task] = {CHAT: "chat", COMPLETIONS: "completion", EMBEDDINGS: "embedding"}
_Body = ChatBody | CompletionBody | EmbeddingBody


def reader_of(serving: Serving, endpoint: str) -> ReadLine:
    """Returns the reader for the lines of a batch."""
    rules, task = rules_of(serving), _TASKS[endpoint]

    def read(line: Mapping[str, Any]) -> ParsedLine:
        body: _Body
        try:
            if endpoint == CHAT:
                body = with_model(read_chat(line["body"], rules), serving)
            elif endpoint == COMPLETIONS:
                body = with_model(read_completion(line["body"], rules), serving)
            else:
                body = with_model(read_embedding(line["body"], rules), serving)
            form = _form(body, serving)
        except Exception as error:
            raise _own(error) from error
        return ParsedLine(task, "", SamplingParams(), form=form)

    return read


def _form(body: _Body, serving: Serving) -> ServiceForm:
    given = body.inputs if isinstance(body, EmbeddingBody) else getattr(body, "prompts", ())
    if len(given) > 1:
        name = "input" if isinstance(body, EmbeddingBody) else "prompt"
        raise ApiError(
            400, f"{name} is a list of {len(given)}; a line has one result: write one line for each", param=name
        )

    def prepare(inputs: InputProcessor) -> Request:
        try:
            [request] = body.submission(inputs, adapter_ids(serving)).requests
        except CancelledError:  # the batch stops, and the line has no error
            raise
        except Exception as error:
            raise _own(error) from error
        return request

    def answer(output: RequestOutput) -> Mapping[str, Any]:
        try:
            document = _answer(body, output, serving)
            # The journal's JSON encoder cannot write Rows. dump and json.loads turn Rows into lists.
            # Embeddings have no Rows.
            return document if isinstance(body, EmbeddingBody) else json.loads(dump(document))
        except Exception as error:
            raise _own(error) from error

    return ServiceForm(prepare, answer)


def _own(error: Exception) -> PromptError:
    """Turns any error into the error of one line, so that the batch goes on. Unforeseen errors are logged."""
    return PromptError(answer_of(ApiError.of(error)))


def _answer(body: _Body, output: RequestOutput, serving: Serving) -> Mapping[str, Any]:
    if isinstance(body, Generation) and body.no_output:
        output = without_output(output)
    if isinstance(body, ChatBody):
        n_reasoning = reasoning_tokens([output], serving.model)
        return chat_response(Head.of(serving, "chatcmpl", body), [output], body, n_reasoning)
    if isinstance(body, EmbeddingBody):
        return embedding_response(body, [output], body.model or serving.names[0])
    texts: list[str] = []
    if body.echo:
        given = body.prompts[0]
        texts.append(given if isinstance(given, str) else serving.model.detokenize(list(given), skip_special=False))
    return completion_response(Head.of(serving, "cmpl", body), [output], body, serving.model.piece, texts)
