"""A request that outlives the process which computes it, and what its caller has been told so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from llamabatch.known import Known
from llamabatch.logprobs import TokenLogprobs
from llamabatch.request import CompletionOutput, FinishReason, Request, RequestOutput, SequenceOutput, Timings
from llamabatch.watch import Sink


@dataclass
class _Told:
    """Of one continuation: what its caller has, and how much of that the present child is still to bring once more."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    n_chars: int = 0
    times: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tokens_again: int = 0
    chars_again: int = 0


class Ticket:
    """One request under a supervisor.

    Args:
        number: its place in the order of arrival.

    Attributes:
        admitted_s: when the present child said that it computes it; None before.
        ran_s: how long it had been computed when a child died with it, at most.
        deaths: children that died while it was the only one there; blame: the same, weighed.
        doubtful: a child died while it was on trial.
        aborted: its caller has taken it back.
    """

    def __init__(self, request: Request, sink: Sink, stream: bool, number: int) -> None:
        self.request = request
        self.sink = sink
        self.stream = stream
        self.number = number
        self.admitted_s: float | None = None
        self.ran_s = 0.0
        self.deaths = 0
        self.blame = 0.0
        self.doubtful = False
        self.aborted = False
        self._first_s: float | None = None  # time.perf_counter() when it was first admitted
        self._told: dict[int, _Told] = {}
        self._again = False  # some of what comes has been told before

    def admit(self, now: float) -> None:
        """The child says that it computes it."""
        self.admitted_s = now
        if self._first_s is None:
            self._first_s = time.perf_counter()

    @property
    def untouched(self) -> bool:
        """Has no child begun it, nor died with it alone?"""
        return self._first_s is None and not self.doubtful

    def leave(self, now: float) -> None:
        """The child that had it is gone."""
        if self.admitted_s is not None:
            self.ran_s = max(self.ran_s, now - self.admitted_s)
            self.admitted_s = None
        told = self._told.get(0)
        if told is not None and told.token_ids and _can_resume(self.request):
            logprobs = None if self.request.params.logprobs is None else tuple(told.logprobs)
            known = Known(tuple(told.token_ids), tuple(told.times), logprobs, self._first_s)
            self.request = replace(self.request, known=known)
            return
        self._again = bool(self._told)
        for told in self._told.values():
            told.tokens_again, told.chars_again = len(told.token_ids), told.n_chars

    def take(self, output: SequenceOutput) -> SequenceOutput | None:
        """What is left to tell of something that the child has said; None if that is nothing."""
        if not self.stream:
            return output if output.finished is not None else None
        told = self._told.get(output.index)
        if told is None:
            told = self._told[output.index] = _Told()
        if self._again:
            output = _unknown_part(output, told)
        if output.token_ids:
            told.token_ids += output.token_ids
            told.times += [time.perf_counter()] * len(output.token_ids)
            told.logprobs += output.logprobs or ()
        if output.text:
            told.pieces.append(output.text)
            told.n_chars += len(output.text)
        return output if output.token_ids or output.text or output.finished is not None else None

    def ended(self, reason: FinishReason, error: str | None) -> SequenceOutput:
        """The event that ends it without a child, with what was told of it."""
        request, start = self.request, self.request.arrival_s
        completions = tuple(
            CompletionOutput(index, "".join(told.pieces), tuple(told.token_ids), reason)
            for index, told in sorted(self._told.items())
        )
        times = tuple(t - start for t in (self._told[0].times if 0 in self._told else ()))
        timings = Timings(None, times[0] if times else None, time.perf_counter() - start, times)
        nothing = CompletionOutput(0, "", (), reason)
        output = RequestOutput(
            *(request.request_id, request.prompt, request.prompt_token_ids, completions or (nothing,), error, timings),
            num_truncated=request.num_truncated,
        )
        return SequenceOutput(request.request_id, (), "", output)


def _can_resume(request: Request) -> bool:
    """Do the tokens told so far say all about how it goes on? Of several continuations, some may have ended; and
    mirostat remembers how likely its tokens were."""
    return request.params.n_copies == 1 and not request.params.mirostat


def _unknown_part(output: SequenceOutput, told: _Told) -> SequenceOutput:
    """Without what has been told before: the same tokens come again, as draws depend on seed and place alone."""
    tokens, chars = min(len(output.token_ids), told.tokens_again), min(len(output.text), told.chars_again)
    told.tokens_again -= tokens
    told.chars_again -= chars
    logprobs = output.logprobs if output.logprobs is None else output.logprobs[tokens:]
    return replace(output, token_ids=output.token_ids[tokens:], text=output.text[chars:], logprobs=logprobs)
