"""The responses of /v1/completions: whole, and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llamabatch.request.logprobs import Logprob, TokenLogprobs
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.server.errors import ApiError
from llamabatch.server.openai.chunks import Head, Usage, check_ends, dump, error_event, quoted, usage_of
from llamabatch.server.sse import DONE

_KIND = "text_completion"


def completion_response(
    head: Head,
    outputs: list[RequestOutput],
    *,
    n: int = 1,
    echo: bool = False,
    top: int | None = None,
    max_tokens: int | None = None,
    token_ids: bool = False,
    prompt_text: Callable[[RequestOutput], str] = lambda output: output.prompt or "",
) -> dict[str, Any]:
    """A "text_completion" document: choice prompt * n + i is continuation i of that prompt.

    Args:
        n: continuations of each prompt.
        echo: the prompt stands before its continuation, also in logprobs.
        top: the number of likeliest tokens in logprobs; None: there are none.
        max_tokens: 0: the continuation, which the engine has made of one token, is left out.
        prompt_text: the text of a prompt.

    Raises:
        ApiError: a request was ended by an error.
    """
    choices = []
    for place, output in enumerate(outputs):
        check_ends(output)
        for each in output.outputs:
            choices.append(_choice(output, each, place * n + each.index, echo, top, max_tokens, token_ids, prompt_text))
    usage = usage_of(outputs)
    if max_tokens == 0:
        usage.completion_tokens = 0
    return head.document(_KIND, choices) | {"usage": usage.to_openai()}


def _choice(
    output: RequestOutput,
    each: CompletionOutput,
    index: int,
    echo: bool,
    top: int | None,
    max_tokens: int | None,
    token_ids: bool,
    prompt_text: Callable[[RequestOutput], str],
) -> dict[str, Any]:
    is_empty = max_tokens == 0
    ids = () if is_empty else each.token_ids
    logprobs = None
    if top is not None:
        record = LogprobsRecord()
        if echo:
            record.add(output.prompt_token_ids, output.prompt_logprobs or (), prompt_text(output), top)
        if each.logprobs is not None and not is_empty:
            record.add(ids, each.logprobs, None, top)
        logprobs = record.to_openai()
    choice: dict[str, Any] = {
        "index": index,
        "text": (prompt_text(output) if echo else "") + ("" if is_empty else each.text),
        "logprobs": logprobs,
        "finish_reason": FinishReason.LENGTH.value if is_empty else each.finish_reason.value,
        "stop_reason": None if is_empty else each.stop_reason,
    }
    if token_ids:
        choice |= {"token_ids": list(ids), "prompt_token_ids": list(output.prompt_token_ids)}
    return choice


class LogprobsRecord:
    """ "logprobs" of a choice, which grow token by token, as offsets count from the beginning of its text."""

    def __init__(self) -> None:
        self._offset = 0

    def begin(self) -> dict[str, Any]:
        """Empty lists."""
        return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}

    _whole: dict[str, Any] | None = None

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], text: str | None, top: int
    ) -> dict[str, Any]:
        """Adds tokens; returns their part.

        Args:
            text: of all these tokens where the first has no logprob, since nothing stands before it.
            top: the number of the likeliest tokens that are shown.
        """
        part = self.begin()
        others = sum(len(_token(i, given).decoded_token) for i, given in zip(token_ids, logprobs, strict=True) if given)
        for token_id, given in zip(token_ids, logprobs, strict=True):
            part["text_offset"].append(self._offset)
            if given is None:  # the first token of a prompt
                name = "" if text is None else text[: max(0, len(text) - others)]
                part["tokens"].append(name)
                part["token_logprobs"].append(None)
                part["top_logprobs"].append(None)
                self._offset += len(name)
                continue
            chosen = _token(token_id, given)
            part["tokens"].append(chosen.decoded_token)
            part["token_logprobs"].append(chosen.logprob)
            # with the chosen one, though it may not be among the likeliest, as OpenAI's API has it
            likeliest = sorted(given.values(), key=lambda t: t.rank)
            part["top_logprobs"].append({t.decoded_token: t.logprob for t in likeliest} if top else None)
            self._offset += len(chosen.decoded_token)
        self._whole = part if self._whole is None else {name: self._whole[name] + part[name] for name in part}
        return part

    def to_openai(self) -> dict[str, Any]:
        """All that was added."""
        return self._whole or self.begin()


def _token(token_id: int, given: TokenLogprobs) -> Logprob:
    return given[token_id]


class CompletionChunks:
    """The events of a streamed completion. The last one of each choice has its finish_reason.

    Args:
        n: continuations of each prompt. echo: the prompt comes first.
        prompts: text of each prompt, for echo.
        top: the number of likeliest tokens in logprobs; None: there are none.
        include_usage: a chunk without choices at the end has the usage; continuous_usage: every chunk has it so far.
        token_ids: chunks have their token ids.
        prompt_tokens: of all prompts together.
        at_once: continuations come whole, when the last one has ended: of best_of above n.
    """

    def __init__(
        self,
        head: Head,
        *,
        n: int = 1,
        echo: bool = False,
        prompts: Sequence[str] = (),
        top: int | None = None,
        include_usage: bool = False,
        continuous_usage: bool = False,
        token_ids: bool = False,
        prompt_tokens: int = 0,
        at_once: bool = False,
    ) -> None:
        self._at_once = at_once
        self._head = head.chunk(_KIND)
        self._n = n
        self._echo = echo
        self._prompts = prompts
        self._top = top
        self._wants_usage = include_usage
        self._counts = continuous_usage
        self._token_ids = token_ids
        self._usage = Usage()  # of what has come
        self._usage.prompt_tokens = prompt_tokens
        self._ended = Usage()
        self._records: dict[int, LogprobsRecord] = {}
        self._begun: set[int] = set()
        self._text_tail = f',"logprobs":null,"finish_reason":null}}]{self._usage_part()}}}\n\n'

    def feed(self, outputs: list[SequenceOutput]) -> bytes:
        """The events of outputs. Raises ApiError for a request that was ended by an error."""
        events: list[str] = []
        for output in outputs:
            finished = output.finished
            if finished is not None:
                check_ends(finished)
                self._ended.add(finished)
            if finished is not None and self._at_once:
                for each in finished.outputs:
                    self._begin(output.prompt_index * self._n + each.index, output.prompt_index, events)
                    self._whole(output.prompt_index, each, events)
                continue
            index = output.prompt_index * self._n + output.index
            self._begin(index, output.prompt_index, events)
            if output.finish_reason is None and self._top is None and not (self._counts or self._token_ids):
                if output.text:
                    events.append(f'{self._head}{{"index":{index},"text":{quoted(output.text)}{self._text_tail}')
                continue
            self._full(index, output.text, output.token_ids, output.logprobs, output.finish_reason, events)
        return "".join(events).encode()

    def end(self) -> bytes:
        """The usage, where it was asked for, and the end."""
        if not self._wants_usage:
            return DONE
        return f'{self._head}],"usage":{dump(self._ended.to_openai())}}}\n\n'.encode() + DONE

    def error(self, error: ApiError) -> bytes:
        return error_event(error)

    def _usage_part(self) -> str:
        if self._counts:
            return f',"usage":{dump(self._usage.to_openai())}'
        return ',"usage":null' if self._wants_usage else ""

    def _whole(self, prompt_index: int, each: CompletionOutput, events: list[str]) -> None:
        index = prompt_index * self._n + each.index
        self._full(index, each.text, each.token_ids, each.logprobs, each.finish_reason, events)

    def _begin(self, index: int, prompt_index: int, events: list[str]) -> None:
        """Writes the prompt before the first piece of a choice, with echo."""
        if not self._echo or index in self._begun:
            return
        self._begun.add(index)
        text = self._prompts[prompt_index]
        events.append(f'{self._head}{{"index":{index},"text":{quoted(text)}{self._text_tail}')

    def _full(
        self,
        index: int,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        reason: FinishReason | None,
        events: list[str],
    ) -> None:
        self._usage.completion_tokens += len(token_ids)
        if not text and reason is None and logprobs is None and not self._token_ids:
            return
        part = None
        if logprobs is not None and self._top is not None:
            part = self._records.setdefault(index, LogprobsRecord()).add(token_ids, logprobs, None, self._top)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": part,
            "finish_reason": None if reason is None else reason.value,
        }
        if self._token_ids:
            choice["token_ids"] = list(token_ids)
        events.append(f"{self._head}{dump(choice)}]{self._usage_part()}}}\n\n")
