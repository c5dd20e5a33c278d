"""The responses of /completion and /infill, as one document or as the events of a stream."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamabatch.engine.engine_state import EngineState
from llamabatch.llama.model import Model
from llamabatch.request.logprobs import TokenLogprobs
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.sampling.row_logprobs import NEVER
from llamabatch.server.http.errors import ApiError, check_ends
from llamabatch.server.llama_server.completion_body import LlamaCompletionBody
from llamabatch.server.llama_server.dialect import error_document
from llamabatch.server.llama_server.settings import generation_settings
from llamabatch.server.response.json_text import LIGHT, Rows, dump, weight_of_pieces
from llamabatch.server.response.timings import output_timings, prompt_timings

Json = dict[str, Any]

NO_SLOT = -1  # the id_slot of all responses, because a request may change slots
_LOWEST = -3.4028234663852886e38  # the logprob in place of minus infinity (probability 0), as in llama-server


@dataclass
class Context:
    """Common data of all responses to one body.

    Attributes:
        body: the request body.
        model: the model of the engine.
        name: the name of the model in responses.
        n_ctx: tokens of prompt and output together.
        lora: the scales of the adapters in effect.
        adapters: the names of all adapters, in the order of their ids.
    """

    body: LlamaCompletionBody
    model: Model
    name: str
    n_ctx: int
    lora: Mapping[str, float] = field(default_factory=dict)
    adapters: Sequence[str] = ()

    def settings(self) -> Json:
        """Returns the generation_settings of the responses."""
        params = self.body.params
        return generation_settings(
            params,
            self.model,
            n_predict=0 if self.body.no_output else params.max_tokens,
            stream=self.body.stream,
            timings_per_token=self.body.timings_per_token,
            lora=self.lora,
            adapters=self.adapters,
        )

    def whole(self, output: RequestOutput, each: CompletionOutput, index: int, *, stream: bool, cut: bool) -> Json:
        """Returns the response for one continuation. In a stream, this is the last event, without text and tokens.

        Args:
            cut: t_max_predict_ms ended the continuation.
        """
        body, n_output = self.body, len(each.token_ids)
        n_prompt = len(output.prompt_token_ids)
        text_ids = [token_id for token_id in output.prompt_token_ids if token_id >= 0]  # negative ids stand for media
        stop_type, word = _stop(each, cut)
        document: Json = {
            "index": index,
            "content": "" if stream else each.text,
            "tokens": list(each.token_ids) if body.return_token_ids and not stream else [],
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self.name,
            "tokens_predicted": n_output,
            "tokens_evaluated": n_prompt,
            "generation_settings": self.settings(),
            "prompt": self.model.detokenize(text_ids, skip_special=False),
            "has_new_line": "\n" in each.text,
            "truncated": output.num_truncated > 0 or self._is_out_of_context(each, n_prompt),
            "stop_type": stop_type,
            "stopping_word": word,
            "tokens_cached": n_prompt + max(0, n_output - 1),
            "timings": timings(output, n_output),
        }
        if not stream and each.logprobs is not None:
            document["completion_probabilities"] = probabilities(
                each.token_ids, each.logprobs, self.n_probs, self.model, post_sampling=body.params.post_sampling_probs
            )
        return only_fields(document, body.fields)

    def _is_out_of_context(self, each: CompletionOutput, n_prompt: int) -> bool:
        """Returns True if the context was full: the output ended there, or overflow="shift" dropped tokens."""
        params, n_output = self.body.params, len(each.token_ids)
        if params.overflow == "shift":
            return n_prompt + n_output > self.n_ctx + 1  # + 1: the last sampled token needs no cell
        return each.finish_reason is FinishReason.LENGTH and (params.max_tokens is None or n_output < params.max_tokens)

    @property
    def n_probs(self) -> int:
        """The requested number of likeliest tokens at each position."""
        return max(0, self.body.params.logprobs or 0)


def completion_documents(
    context: Context, outputs: Sequence[RequestOutput], was_cut: Callable[[int], bool] = lambda index: False
) -> list[Json]:
    """Returns one response for each prompt and continuation. Raises ApiError if an error ended a request.

    Args:
        was_cut: returns True if t_max_predict_ms ended the response with this index.
    """
    found, n = [], context.body.params.n
    for place, output in enumerate(outputs):
        for each in output.outputs:
            index = place * n + each.index
            cut = was_cut(index)
            if not cut:
                check_ends(output)
            found.append(context.whole(output, each, index, stream=False, cut=cut))
    return found


def _stop(each: CompletionOutput, is_cut: bool) -> tuple[str, str]:
    """Returns stop_type and stopping_word."""
    if is_cut or each.finish_reason is not FinishReason.STOP:
        return "limit", ""
    return ("word", each.stop_reason) if isinstance(each.stop_reason, str) else ("eos", "")


def only_fields(document: Json, names: Sequence[str]) -> Json:
    """Returns the named fields of a document, except missing fields. Without names, returns the whole document. The
    name a/b means field b of the object a."""
    if not names:
        return document
    found = {}
    for name in names:
        value: Any = document
        for part in name.split("/"):
            value = value.get(part, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            found[name] = value
    return found


_MISSING = object()


def timings(output: RequestOutput, n_output: int) -> Json:
    """Returns the timings of one continuation of `n_output` tokens."""
    times, n_cached = output.timings, output.num_cached_tokens
    first_s = times.total_s if times.ttft_s is None else times.ttft_s
    prompt_ms = 1000 * max(0.0, first_s - (times.queued_s or 0.0))
    output_ms = 1000 * max(0.0, max(times.token_times_s, default=first_s) - first_s)
    prompt = prompt_timings(len(output.prompt_token_ids) - n_cached, n_cached, prompt_ms)
    return prompt | output_timings(n_output, max(0, n_output - 1), output_ms)


def probabilities(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    n_probs: int,
    model: Model,
    *,
    post_sampling: bool = False,
) -> Sequence[Json]:
    """Returns completion_probabilities. For each position, they contain the logprobs of the chosen token and of the
    likeliest tokens. With `post_sampling`, they contain probabilities instead of logprobs."""
    top = "top_probs" if post_sampling else "top_logprobs"

    def entry(place: int) -> Json:
        token_id, given = token_ids[place], logprobs[place]
        likeliest = sorted(given.items(), key=lambda item: item[1].rank)[:n_probs]
        if post_sampling:  # a forced token that could not be drawn is left out
            likeliest = [(other, one) for other, one in likeliest if one.logprob > NEVER]
        return {
            **_token(token_id, given[token_id].logprob, model, post_sampling),
            top: [_token(other, one.logprob, model, post_sampling) for other, one in likeliest],
        }

    return Rows(range(len(token_ids)), entry)


def _token(token_id: int, logprob: float, model: Model, post_sampling: bool) -> Json:
    data = model.piece(token_id)
    return {
        "id": token_id,
        "token": data.decode("utf-8", errors="ignore"),
        "bytes": list(data),
        **({"prob": math.exp(logprob)} if post_sampling else {"logprob": max(_LOWEST, logprob)}),
    }


class TimeLimit:
    """llama-server's t_max_predict_ms: an output ends when its time is over and its text has a line break.

    Args:
        limit_ms: milliseconds from the first token on; 0: no limit.
    """

    def __init__(self, limit_ms: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.over: set[int] = set()  # prompt indices that `look` has returned
        self._limit_s = limit_ms / 1000
        self._clock = clock
        self._first: dict[int, float] = {}
        self._with_line: set[int] = set()

    def look(self, outputs: Sequence[SequenceOutput]) -> list[int]:
        """Reads new outputs. Returns the indices of the prompts that must end now."""
        if not self._limit_s:
            return []
        now, ended = self._clock(), []
        for output in outputs:
            place = output.prompt_index
            first = self._first.setdefault(place, now)
            if "\n" in output.text:
                self._with_line.add(place)
            late = now - first > self._limit_s and place in self._with_line
            if late and output.finished is None and place not in self.over:
                self.over.add(place)
                ended.append(place)
        return ended


class LlamaCompletionChunks:
    """A writer of the events of a streamed completion. The last event of a continuation has settings, counts and times.

    Args:
        end_prompts: ends the requests of the prompts with these indices. The outputs of these prompts then have the
            reason "abort".
    """

    def __init__(self, context: Context, end_prompts: Callable[[list[int]], None] = lambda places: None) -> None:
        self._context = context
        self._body = context.body
        self._n = context.body.params.n
        self._limit = TimeLimit(context.body.limit_ms)
        self._end_prompts = end_prompts
        self._n_prompt: dict[int, int] = {}  # tokens of each prompt
        self._n_output: dict[int, int] = {}
        self._first_s: dict[int, float] = {}
        self._progress: dict[int, tuple[int, int]] = {}  # keys: prompts; values: (tokens done, cached part of them)
        self._due: list[str] = []  # progress events that wait to be sent
        self._began_s = time.perf_counter()

    def begin(self, lengths: Sequence[int]) -> None:
        """Sets the lengths of the prompts in tokens. Makes the first progress events if the request asks for them."""
        self._n_prompt = dict(enumerate(lengths))
        for place in self._n_prompt if self._body.return_progress else ():
            self._add_progress(place, (0, 0), self._due)

    def feed(self, outputs: list[SequenceOutput]) -> bytes:
        """Returns the events of new outputs. Raises ApiError if an error ended a request."""
        late = self._limit.look(outputs)
        events, self._due = self._due, []
        for output in outputs:
            place = output.prompt_index
            if self._body.return_progress and place not in self._first_s:
                self._end_progress(place, events)
            self._first_s.setdefault(place, time.perf_counter())
            finished, cut = output.finished, place in self._limit.over
            if finished is not None and not cut:
                check_ends(finished)
            self._pieces(output, events)
            if finished is not None:
                for each in finished.outputs:
                    index = place * self._n + each.index
                    events.append(_event(self._context.whole(finished, each, index, stream=True, cut=cut)))
        if late:
            self._end_prompts(late)
        return "".join(events).encode()

    def takes_long(self, outputs: Sequence[SequenceOutput]) -> bool:
        """Returns True for large outputs, and for the last output of a prompt, because the last event has the text of
        the prompt."""
        return weight_of_pieces(outputs) > LIGHT or any(each.finished is not None for each in outputs)

    def end_takes_long(self) -> bool:
        return False

    def end(self) -> list[bytes]:
        """Returns nothing, because each continuation has its own last event."""
        return []

    def error(self, error: ApiError) -> bytes:
        """Returns the event of an error, the last event of the stream."""
        return f"data: {dump(error_document(error))}\n\n".encode()

    @property
    def n_begun(self) -> int:
        """Number of prompts that have output."""
        return len(self._first_s)

    def due(self) -> bytes:
        """Removes and returns the progress events that wait to be sent."""
        events, self._due = self._due, []
        return "".join(events).encode()

    def see(self, states: Sequence[EngineState], request_ids: Sequence[str]) -> bool:
        """Updates the progress of prompts without output. Returns True if progress events wait to be sent."""
        places = {request_id: place for place, request_id in enumerate(request_ids)}
        for slot in (slot for state in states for slot in state.slots if slot.request_id in places and not slot.index):
            place = places[str(slot.request_id)]
            done = slot.n_prompt_done, slot.n_cached
            if place not in self._first_s and done[0] > self._progress.get(place, (0, 0))[0]:
                self._add_progress(place, done, self._due)
        return bool(self._due)

    def _end_progress(self, place: int, events: list[str]) -> None:
        done = self._n_prompt.get(place, 0), self._progress.get(place, (0, 0))[1]
        if done[0] > self._progress.get(place, (0, 0))[0]:
            self._add_progress(place, done, events)

    def _add_progress(self, place: int, done: tuple[int, int], events: list[str]) -> None:
        self._progress[place] = done
        processed, cached = done
        ms = 1000 * (time.perf_counter() - self._began_s) if processed else 0.0
        document = self._head(place * self._n, "", ())
        document["prompt_progress"] = {
            "total": self._n_prompt.get(place, 0),
            "cache": cached,
            "processed": processed,
            "time_ms": round(ms),
        }
        if self._body.timings_per_token:
            document["timings"] = prompt_timings(processed - cached, cached, ms) | output_timings(0, 0, 0.0)
        events.append(_event(document))

    def _pieces(self, output: SequenceOutput, events: list[str]) -> None:
        """Writes one event for all new tokens. With probabilities, writes one event for each token; the last event has
        the text."""
        index = output.prompt_index * self._n + output.index
        tokens = output.token_ids
        if not tokens:
            return
        logprobs = output.logprobs if self._context.n_probs else None
        if logprobs is None:
            if output.text or output.finish_reason is None:
                self._tell(index, output, output.text, tokens, None, events)
            return
        post_sampling = self._body.params.post_sampling_probs
        found = probabilities(tokens, logprobs, self._context.n_probs, self._context.model, post_sampling=post_sampling)
        for place, (token, given) in enumerate(zip(tokens, found, strict=True)):
            text = output.text if place == len(tokens) - 1 else ""
            self._tell(index, output, text, (token,), [given], events)

    def _tell(
        self,
        index: int,
        output: SequenceOutput,
        text: str,
        tokens: Sequence[int],
        found: list[Json] | None,
        events: list[str],
    ) -> None:
        self._n_output[index] = self._n_output.get(index, 0) + len(tokens)
        document = self._head(index, text, tokens)
        if self._body.timings_per_token:
            ms = 1000 * (time.perf_counter() - self._first_s[output.prompt_index])
            document["timings"] = output_timings(self._n_output[index], self._n_output[index] - 1, ms)
        if found is not None:
            document["completion_probabilities"] = found
        events.append(_event(document))

    def _head(self, index: int, text: str, tokens: Sequence[int]) -> Json:
        return {
            "index": index,
            "content": text,
            "tokens": list(tokens),
            "stop": False,
            "id_slot": NO_SLOT,
            "tokens_predicted": self._n_output.get(index, 0),
            "tokens_evaluated": self._n_prompt.get(index // self._n, 0),
        }


def _event(document: Json) -> str:
    return f"data: {dump(document)}\n\n"
