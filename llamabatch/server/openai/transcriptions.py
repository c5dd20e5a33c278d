"""/v1/audio/transcriptions in OpenAI's format. The request becomes a chat that asks for a transcript."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from llamabatch.media.prompt import media_kinds
from llamabatch.request.media import SOUND
from llamabatch.request.outputs import RequestOutput, SequenceOutput
from llamabatch.server.batches.upload import Form
from llamabatch.server.http.errors import ApiError, check_ends
from llamabatch.server.openai.chunks import EventWriter
from llamabatch.server.request.body import Field, Fields, Json, timeout_of
from llamabatch.server.request.chat_body import ChatBody, read_chat
from llamabatch.server.request.reading import rules_of, with_model
from llamabatch.server.response.event_stream import DONE
from llamabatch.server.response.generation import respond
from llamabatch.server.response.json_text import dump
from llamabatch.server.serving.serving import serving_of
from llamabatch.utils.checks import show

PROMPT = "Transcribe audio to text"
"""The default prompt, the same as llama-server's."""

FORMATS = ("json", "text")
_NUMBERS = {"temperature": float, "max_tokens": int, "seed": int, "top_p": float, "top_k": int}

TRANSCRIPTION: Fields = {
    "file": Field({"type": "string", "format": "binary"}, "a sound: WAV, MP3 or FLAC"),
    "model": Field({"type": "string"}),
    "prompt": Field({"type": "string"}, f"what is asked about the sound; else: {PROMPT}"),
    "language": Field({"type": "string"}, "of the sound, which the prompt names"),
    "response_format": Field({"enum": [*FORMATS]}, "models tell no times"),
    "stream": Field({"type": "boolean"}, "the text as it comes"),
    "temperature": Field({"type": "number"}, "0 unless given"),
    "max_tokens": Field({"type": "integer"}, "tokens of the text at most"),
    **{name: Field({"type": "number"}) for name in ("seed", "top_p", "top_k")},
}
# Fields that would change the answer and are not supported, each with the reason for the refusal.
_REFUSED = {
    "timestamp_granularities[]": "models tell no times",
    "timestamp_granularities": "models tell no times",
    "include[]": "use /v1/chat/completions for logprobs",
    "known_speaker_names[]": "speakers are not told apart",
}


async def transcriptions(request: HttpRequest) -> Any:
    """Transcribes audio."""
    serving = serving_of(request)
    serving.check_ready()
    if SOUND not in media_kinds(serving.model):
        raise ApiError(400, "the model reads no sounds; start the server with --mmproj and the file of its encoder")
    form = Form(request.headers.get("content-type", ""))
    async for part in request.stream():
        form.feed(part)
    form.finish()
    if form.filename is None:
        raise ApiError(400, "the form has no file; send the sound in the part named file", param="file")
    rules, kind = rules_of(serving, timeout_of(request.headers)), _format_of(form.fields)

    def read() -> ChatBody:
        return read_chat(_as_chat(form.fields, form.take()), rules)

    body = with_model(await serving.on_thread(read), serving)
    answer = await respond(
        serving,
        body,
        whole=lambda outputs, _: _whole(outputs[0]),
        chunks=lambda call, _: _TextChunks(),
    )
    if body.stream or kind == "json":
        return answer
    return PlainTextResponse(json.loads(answer.body)["text"] + "\n")


def _format_of(fields: Mapping[str, str]) -> str:
    """Returns the format of the response. Raises ApiError for an unsupported field or format."""
    for name, why in _REFUSED.items():
        if name in fields:
            raise ApiError(400, f"{name} is {show(fields[name])}; leave it out: {why}", param=name)
    kind = fields.get("response_format", "json")
    if kind not in FORMATS:
        given = f"response_format is {show(kind)}; give {' or '.join(FORMATS)}: models tell no times"
        raise ApiError(400, given, param="response_format")
    return kind


def _as_chat(fields: Mapping[str, str], sound: bytes) -> Json:
    """Returns the body of a chat that asks for a transcript of the audio. Raises ApiError for a wrong field value."""
    prompt = fields.get("prompt") or PROMPT
    if language := fields.get("language"):
        prompt += f" (language: {language})"
    heard = {"data": base64.b64encode(sound).decode(), "format": "wav"}
    content = [{"type": "text", "text": prompt}, {"type": "input_audio", "input_audio": heard}]
    found: Json = {"messages": [{"role": "user", "content": content}], "temperature": 0.0}
    for name, number in _NUMBERS.items():
        if name in fields:
            try:
                found[name] = number(fields[name].replace("_", " "))
            except ValueError:
                raise ApiError(400, f"{name} is {show(fields[name])}; give a number", param=name) from None
    if fields.get("model"):
        found["model"] = fields["model"]
    stream = fields.get("stream", "false").lower()
    if stream not in ("true", "false", "1", "0"):
        raise ApiError(400, f"stream is {show(stream)}; give true or false", param="stream")
    return found | {"stream": stream in ("true", "1")}


def _whole(output: RequestOutput) -> Json:
    """Returns the whole response. Raises ApiError if an error ended the request."""
    check_ends(output)
    n_heard = sum(token_id < 0 for token_id in output.prompt_token_ids)
    n_input, n_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    details = {"text_tokens": n_input - n_heard, "audio_tokens": n_heard}
    usage = {"type": "tokens", "input_tokens": n_input, "input_token_details": details, "output_tokens": n_output}
    return {"text": output.outputs[0].text.strip(), "usage": usage | {"total_tokens": n_input + n_output}}


class _TextChunks(EventWriter):
    def __init__(self) -> None:
        self._last: RequestOutput | None = None

    def takes_long(self, outputs: Sequence[SequenceOutput]) -> bool:
        return False

    def feed(self, outputs: list[SequenceOutput]) -> bytes:
        for output in outputs:
            self._last = output.finished or self._last
        text = "".join(output.text for output in outputs)
        return _event({"type": "transcript.text.delta", "delta": text}) if text else b""

    def end(self) -> Iterable[bytes]:
        assert self._last is not None
        yield _event({"type": "transcript.text.done", **_whole(self._last)})
        yield DONE


def _event(document: Json) -> bytes:
    return f"data: {dump(document)}\n\n".encode(errors="replace")


PATHS = ("/v1/audio/transcriptions", "/audio/transcriptions")  # the second path is llama-server's

routes = [Route(path, transcriptions, methods=["POST"]) for path in PATHS]
