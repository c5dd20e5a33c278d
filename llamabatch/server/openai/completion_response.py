"""The responses of /v1/completions, as one document or as the chunks of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llamabatch.request.logprobs import TextOffsets, TokenLogprobs
from llamabatch.request.outputs import CompletionOutput, RequestOutput, SequenceOutput
from llamabatch.server.http.errors import check_ends
from llamabatch.server.openai.chunks import (
    EventWriter,
    Head,
    Usage,
    last_event,
    llama_server_extras,
    prompt_logprobs_of,
    usage_of,
    usage_part,
)
from llamabatch.server.openai.completion_body import CompletionBody
from llamabatch.server.response.event_stream import DONE
from llamabatch.server.response.json_text import LIGHT, Rows, dump, quoted, weight_of_pieces

_KIND = "text_completion"

_CONTINUES = bytes(range(0x80, 0xC0))  # continuation bytes of UTF-8; no character begins with them

Piece = Callable[[int], bytes]  # returns the bytes of a token id


def completion_response(
    head: Head, outputs: list[RequestOutput], body: CompletionBody, piece: Piece, texts: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns a "text_completion" document. Choice number `p * n + i` is continuation i of prompt p.

    Args:
        texts: the texts of the prompts, for echo.

    Raises:
        ApiError: an error ended a request.
    """
    choices = []
    for place, output in enumerate(outputs):
        check_ends(output)
        text = texts[place] if body.echo else ""
        first = place * body.params.n
        choices += [_choice(output, each, first + each.index, body, piece, text) for each in output.outputs]
    usage = usage_of(outputs).to_openai()
    return head.document(_KIND, choices) | {"usage": usage} | llama_server_extras(outputs, body)


def _choice(
    output: RequestOutput, each: CompletionOutput, index: int, body: CompletionBody, piece: Piece, text: str
) -> dict[str, Any]:
    top = body.params.logprobs
    logprobs = None
    if top is not None:
        record = LogprobsRecord(piece, body.tokens_as_ids)
        of_prompt = (output.prompt_token_ids, output.prompt_logprobs or ()) if body.echo else ((), ())
        logprobs = record.add(*of_prompt, top, text)
        if each.logprobs is not None:
            more = record.add(each.token_ids, each.logprobs, top)
            logprobs = {name: logprobs[name] + more[name] for name in more}
    choice: dict[str, Any] = {
        "index": index,
        "text": text + each.text,
        "logprobs": logprobs,
        "finish_reason": each.finish_reason.value,
        "stop_reason": each.stop_reason,
    }
    if body.prompt_logprobs:
        choice["prompt_logprobs"] = prompt_logprobs_of(output)
    if body.return_token_ids:
        choice |= {"token_ids": list(each.token_ids), "prompt_token_ids": list(output.prompt_token_ids)}
    return choice


class LogprobsRecord:
    """A writer of the "logprobs" of a choice. Each call of `add` continues the text offsets of the previous call.

    Args:
        as_ids: True: the names of tokens are ids, such as token_id:17. False: the names are texts.
    """

    def __init__(self, piece: Piece, as_ids: bool = False) -> None:
        self._piece = piece
        self._as_ids = as_ids
        self._places = TextOffsets()

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], top: int, text: str = ""
    ) -> dict[str, Any]:
        """Returns the logprobs of further tokens.

        Args:
            top: the requested number of likeliest tokens; 0: only the chosen tokens have logprobs.
            text: the text of the prompt, if the tokens are a prompt. The first token has no logprob and thus no decoded
                text, so its text comes from `text`.
        """
        offsets, names, chosen = list[int](), list[str](), list[float | None]()
        for token_id, given in zip(token_ids, logprobs, strict=False):
            offsets.append(self._places.add(self._piece(token_id)))
            name = self._first(text, token_ids) if given is None else given[token_id].decoded_token
            names.append(self._named(token_id, name))
            chosen.append(None if given is None else given[token_id].logprob)
        places = [(logprobs, place) for place in range(len(names))]
        likeliest = Rows(places, self._likeliest) if top else [None] * len(names)
        return {"text_offset": offsets, "token_logprobs": chosen, "tokens": names, "top_logprobs": likeliest}

    def _first(self, text: str, token_ids: Sequence[int]) -> str:
        """Returns the text of a prompt's first token. Some vocabularies put a space before a text; the space is left
        out."""
        rest = b"".join(map(self._piece, token_ids[1:]))
        behind = rest.lstrip(_CONTINUES)  # without the rest of a character that begins in the first token
        found = text[: max(0, len(text) - len(behind.decode(errors="replace")))]
        self._places.at = len(found) - (len(behind) < len(rest))
        return found

    def _likeliest(self, at: tuple[Sequence[TokenLogprobs | None], int]) -> dict[str, float] | None:
        """Returns the logprobs of the likeliest tokens and of the chosen token, as OpenAI's API does."""
        logprobs, place = at
        given = logprobs[place]
        if given is None:
            return None
        return {
            self._named(i, each.decoded_token): each.logprob
            for i, each in sorted(given.items(), key=lambda item: item[1].rank)
        }

    def _named(self, token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if self._as_ids else text


class CompletionChunks(EventWriter):
    """A writer of the events of a streamed completion. The last event of each choice has its finish_reason.

    Args:
        n_prompt: the number of tokens in all prompts.
        texts: the texts of the prompts, for echo.
    """

    def __init__(
        self, head: Head, body: CompletionBody, piece: Piece, n_prompt: int, texts: Sequence[str] = ()
    ) -> None:
        self._token_bytes = piece
        self._head = head.chunk(_KIND)
        self._body = body
        self._n = body.params.n
        self._texts = texts
        self._top = body.params.logprobs
        self._token_ids = body.return_token_ids
        self._is_rich = body.continuous_usage or self._token_ids or self._top is not None
        # With echo, the logprobs of the prompt are sent first, but are known only at the end of the request. Until
        # then, the output pieces are stored here. Keys: prompt indices.
        self._held: dict[int, list[SequenceOutput]] | None = {} if body.echo and self._top is not None else None
        self._usage = Usage(n_prompt)  # usage of the pieces so far
        self._ended = Usage()  # usage of the finished requests
        self._outputs: list[RequestOutput] = []  # outputs of the finished requests
        self._records: dict[int, LogprobsRecord] = {}
        self._begun: set[int] = set()
        self._finished: dict[int, RequestOutput] = {}  # finished outputs by prompt index; used only with _held
        self._text_tail = f',"logprobs":null,"finish_reason":null}}]{self._usage_part()}}}\n\n'

    def feed(self, outputs: list[SequenceOutput]) -> bytes:
        """Returns the events of new outputs. Raises ApiError if an error ended a request."""
        events: list[str] = []
        for output in outputs if self._held is None else self._released(outputs, self._held):
            finished = output.finished
            if finished is not None:
                check_ends(finished)
                self._ended.add(finished)
                self._outputs.append(finished)
            index = output.prompt_index * self._n + output.index
            if self._body.echo and index not in self._begun:
                self._begin(index, output, events)
            if self._is_rich or output.finish_reason is not None:
                self._piece(index, output, events)
            elif output.text:
                events.append(f'{self._head}{{"index":{index},"text":{quoted(output.text)}{self._text_tail}')
        return "".join(events).encode()

    def takes_long(self, outputs: Sequence[SequenceOutput]) -> bool:
        return weight_of_pieces(outputs) > LIGHT or (
            self._held is not None and any(each.finished is not None for each in outputs)
        )

    def end(self) -> list[bytes]:
        """Returns the last events: usage and timings if the request asks for them, and [DONE]."""
        return [last_event(self._head, self._ended, self._outputs, self._body) + DONE]

    def _usage_part(self) -> str:
        return usage_part(self._usage, self._body)

    def _released(
        self, outputs: list[SequenceOutput], held: dict[int, list[SequenceOutput]]
    ) -> Iterator[SequenceOutput]:
        """Yields the outputs of finished prompts, and stores the outputs of other prompts in `held`."""
        for output in outputs:
            waiting = held.setdefault(output.prompt_index, [])
            waiting.append(output)
            if output.finished is not None:
                self._finished[output.prompt_index] = output.finished
                yield from held.pop(output.prompt_index)

    def _begin(self, index: int, output: SequenceOutput, events: list[str]) -> None:
        """Writes the prompt before the first piece of a choice."""
        self._begun.add(index)
        text, part = self._texts[output.prompt_index], None
        whole = self._finished.get(output.prompt_index)
        if whole is not None and self._top is not None:
            part = self._record(index).add(whole.prompt_token_ids, whole.prompt_logprobs or (), self._top, text)
        choice = {"index": index, "text": text, "logprobs": part, "finish_reason": None}
        events.append(f"{self._head}{dump(choice)}]{self._usage_part()}}}\n\n")

    def _piece(self, index: int, output: SequenceOutput, events: list[str]) -> None:
        """Writes a piece with all requested fields. Leaves out an empty piece."""
        self._usage.completion_tokens += len(output.token_ids)
        reason, text, token_ids, logprobs = output.finish_reason, output.text, output.token_ids, output.logprobs
        if not text and reason is None and not logprobs and not (self._token_ids and token_ids):
            return
        part = None
        if logprobs is not None and self._top is not None:
            part = self._record(index).add(token_ids, logprobs, self._top)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": part,
            "finish_reason": None if reason is None else reason.value,
        }
        if self._token_ids:
            choice["token_ids"] = list(token_ids)
        events.append(f"{self._head}{dump(choice)}]{self._usage_part()}}}\n\n")

    def _record(self, index: int) -> LogprobsRecord:
        return self._records.setdefault(index, LogprobsRecord(self._token_bytes, self._body.tokens_as_ids))
