"""The nouns of a request: what was asked (Request), how it stands (Sequence), what came of it (RequestOutput)."""

from __future__ import annotations

import itertools
import secrets
import time
from array import array
from dataclasses import dataclass, field, replace
from typing import Any

from llamabatch import openai
from llamabatch.adapters import AdapterSet
from llamabatch.detokenizer import Detokenizer
from llamabatch.finish_reason import FinishReason as FinishReason
from llamabatch.known import Known
from llamabatch.logprobs import LogprobRecord, TokenLogprobs
from llamabatch.sampling_params import SamplingParams
from llamabatch.timings import Timings as Timings
from llamabatch.token_counts import TokenCounts
from llamabatch.vocabulary import Vocabulary

_group_numbers = itertools.count()


@dataclass(frozen=True)
class Request:
    """One prompt to continue; immutable, and all that has to cross a wire.

    Attributes:
        request_id: unique among the requests in flight.
        prompt_token_ids: the prompt as ids of the model's vocabulary.
        params: how to sample.
        prompt: the text that the ids came from, where there was one.
        arrival_s: time.perf_counter() when the caller asked, seconds.
        group: requests of one call share a number; later calls have higher ones. Policies sort inside a group only,
            so that a later call never overtakes an earlier one for good.
        seed: params.seed, or a random one drawn here, so that a retry draws the same tokens.
        ranked: its cumulative logprob is wanted, though no single ones are.
        embed: a vector of it is wanted, not a continuation; `params` mean nothing then.
        adapters: what the model is to compute it with; see adapters.adapter_set.
        score_from: sample nothing; tell the logprobs of the prompt's tokens from this one on, 1 .. their number - 1,
            and end. None: an ordinary request.
        num_truncated: tokens that the prompt has lost at its left (overflow="truncate").
        known: output tokens of it that another engine brought before it died.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    prompt: str | None = None
    arrival_s: float = field(default_factory=time.perf_counter)
    group: int = field(default_factory=lambda: next(_group_numbers))
    seed: int = -1
    ranked: bool = False
    adapters: AdapterSet = ()
    score_from: int | None = None
    embed: bool = False
    num_truncated: int = 0
    known: Known | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            seed = self.params.seed if self.params.seed is not None else secrets.randbits(64)
            object.__setattr__(self, "seed", seed)

    @property
    def tier(self) -> tuple[bool, int]:
        """Who goes first: the lower one."""
        return self.params.background, self.params.priority

    def is_late(self, now: float) -> bool:
        """Has its deadline passed?"""
        return self.params.deadline_s is not None and now > self.arrival_s + self.params.deadline_s

    @property
    def expected_tokens(self) -> int:
        """Tokens that this request will occupy at most, as far as is known now: the measure of load."""
        output = self.params.n_copies * (self.params.max_tokens or 256)
        return len(self.prompt_token_ids) + (output if self.score_from is None and not self.embed else 0)


def new_group() -> int:
    """A group number for the requests of one call."""
    return next(_group_numbers)


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: its number among the continuations of the prompt.
        text: what was generated, without stop string and special tokens unless the parameters say so; invalid UTF-8
            becomes U+FFFD.
        token_ids: every sampled token, the end-of-generation token included.
        finish_reason: "stop", "length", "abort" or "error".
        stop_reason: the stop string (str), stop token or end-of-generation token (int) that ended it, else None.
        logprobs: for each token of token_ids, itself and the likeliest at its place, by id; None unless asked for.
        cumulative_logprob: the sum of the logprobs of token_ids; None unless logprobs or best_of asked for it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """What came of one request; the shape is vLLM's. `text`, `token_ids`, `finish_reason` are those of outputs[0].

    Attributes:
        prompt_logprobs: for each token of the prompt, itself and the likeliest at its place, by id, and None for the
            first, which nothing comes before; None unless asked for, and where the request ended before.
        embedding: of a request for one: n_embd float32, as the model gives them.
        num_truncated: tokens that the prompt lost at its left (overflow="truncate"); prompt_token_ids is without them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    error: str | None = None
    timings: Timings = Timings()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    embedding: array[float] | None = None
    num_truncated: int = 0

    def to_openai(self, *, chat: bool = False, model: str = "") -> dict[str, Any]:
        """As OpenAI's API and llama_cpp.Llama would return it, a plain dictionary.

        Args:
            chat: as a chat completion; otherwise as a completion.
            model: what stands under "model".
        """
        return openai.chat_completion(self, model) if chat else openai.completion(self, model)

    @property
    def text(self) -> str:
        """Text of the first continuation."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first continuation."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first continuation ended."""
        return self.outputs[0].finish_reason

    @classmethod
    def failed(cls, request: Request, error: str) -> RequestOutput:
        """The output of a request that was refused before it ran."""
        nothing = CompletionOutput(0, "", (), FinishReason.ERROR)
        total = time.perf_counter() - request.arrival_s
        return cls(
            request.request_id, request.prompt, request.prompt_token_ids, (nothing,), error, Timings(total_s=total)
        )


@dataclass(frozen=True)
class SequenceOutput:
    """What one step brought one sequence: new tokens, text that is safe to show, and at its end the whole output.

    Attributes:
        index: which continuation of the prompt it belongs to.
        finished: the output of the request, when its last continuation has ended.
        prompt_index: the number of its prompt among those of its call.
        logprobs: those of token_ids, as in CompletionOutput; None unless asked for.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finished: RequestOutput | None = None
    index: int = 0
    prompt_index: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None

    def to_openai(self, *, chat: bool = False, model: str = "") -> dict[str, Any]:
        """As a chunk of a stream of OpenAI's API. Arguments as in RequestOutput.to_openai."""
        return openai.chat_chunk(self, model) if chat else openai.completion_chunk(self, model)


class Sequence:
    """The running state of one request. One object a sequence; everything else is derived.

    There is no prefill phase and no decode phase: tokens computed catch up with tokens known.
    """

    def __init__(self, request: Request, vocabulary: Vocabulary, n_ctx: int) -> None:
        self.request = request
        self.token_ids = list(request.prompt_token_ids)
        self.num_computed = 0
        self.num_discarded = 0  # of those: their cells are gone, and the positions of all after them are lower by it
        self.slot: int | None = None
        self.number: int | None = None  # order of arrival at the scheduler
        # (most expected tokens, first number) of the requests of its list that begin alike
        self.family = (request.expected_tokens, 0)
        self.background = request.params.background
        self.overtaken = 0  # by later requests, while it waited
        self.last_step = -1  # when it computed last; round robin goes by it
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.token_counts: TokenCounts | None = None  # kept for penalties only
        self.draw: Any = None  # what the engine keeps for sampling it
        self.guide: Any = None  # what keeps it to structured_outputs
        self.scores = request.score_from is not None  # samples nothing
        if self.scores:
            self.token_ids.pop()  # looked up in the row before it, never computed
        self.logprobs = LogprobRecord.asked_for(
            request.params,
            request.prompt_token_ids,
            vocabulary.all_bytes,
            ranked=request.ranked,
            score_from=request.score_from,
        )
        if request.params.penalised:
            self.token_counts = TokenCounts(request.prompt_token_ids)
        self._vocabulary = vocabulary
        self._num_prompt = len(self.token_ids)
        params = request.params
        room = n_ctx + 1 - self._num_prompt  # the last token sampled is never computed: it needs no cell
        self.shifts = params.overflow == "shift"
        self._max_output = params.max_tokens or room
        if self.scores:
            self._max_output = 1
        elif not self.shifts:
            self._max_output = min(room, self._max_output)
        self._n_ctx = n_ctx
        self._stop_ids = frozenset(params.stop_ids)
        self._detokenizer = Detokenizer(
            vocabulary.token_bytes if params.skip_special_tokens else vocabulary.all_bytes,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        self.last_token_s: float | None = None  # when its last output token was known
        self._admitted_s: float | None = None
        self._token_times: list[float] = []
        if request.known is not None:
            self._take_up(request.known)

    @property
    def num_prompt(self) -> int:
        return self._num_prompt

    @property
    def most_cells(self) -> int:
        """Cells of the KV cache that it can come to use."""
        return min(self._num_prompt + self._max_output - 1, self._n_ctx)

    @property
    def num_cells(self) -> int:
        """Cells of the KV cache that it holds, which is the position of the next token to be computed."""
        return self.num_computed - self.num_discarded

    @property
    def num_room(self) -> int:
        """Tokens that can be computed before its n_ctx cells are full."""
        return self._n_ctx - self.num_cells

    @property
    def num_shareable(self) -> int:
        """Tokens of its beginning whose cells are, or will be, as any other request would compute them."""
        return 0 if self.num_discarded else len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self._num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens known but not computed; 1 means that a decode row is all it needs, unless it scores."""
        return len(self.token_ids) - self.num_computed

    @property
    def most_steps_left(self) -> int:
        """Output tokens that it can still bring."""
        return self._max_output - self.num_output

    @property
    def most_shared(self) -> int:
        """Tokens whose cells may be copies; at least the last one is computed, as its row is the output."""
        most = len(self.token_ids) - 1
        record = self.logprobs
        return most if record is None or record.prompt_is_read else min(most, record.next_row)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def was_admitted(self) -> bool:
        """Did it ever have a slot?"""
        return self._admitted_s is not None

    def admit(self, slot: int) -> None:
        self.slot = slot
        if self._admitted_s is None:
            self._admitted_s = time.perf_counter()

    def preempt(self) -> None:
        """Give the slot up; its tokens stay and are computed again later."""
        self.slot = None
        self.num_computed = self.num_discarded = 0

    def _take_up(self, known: Known) -> None:
        """As if it had sampled these tokens and then lost its slot."""
        self._admitted_s = known.admitted_s
        for token_id, time_s in zip(known.token_ids, known.times_s, strict=True):
            self.accept(token_id, time_s)
        if self.logprobs is not None:
            self.logprobs.take_up(known.logprobs or ())

    def shift(self) -> tuple[int, int]:
        """Its cells are full: the older half goes, but for a BOS. Returns the position where it begins, and its length.

        When this happens depends on how many tokens are computed alone, so that a sequence which is computed again
        comes by the same cells.
        """
        kept = 1 if self.token_ids[0] == self._vocabulary.bos else 0
        count = (self._n_ctx - kept + 1) // 2
        self.num_discarded += count
        return kept, count

    def accept(self, token_id: int, now: float) -> str:
        """Take a sampled token in; returns the text that is now safe to show, and may set finish_reason."""
        self.token_ids.append(token_id)
        self._token_times.append(now)
        self.last_token_s = now
        if self.token_counts is not None:
            self.token_counts.add(token_id)
        if self.ends_at(token_id):
            shown = self._detokenizer.push(token_id) if self.request.params.include_stop_str_in_output else ""
            self._finish(FinishReason.STOP, token_id)
            return shown + self._detokenizer.flush()
        text = self._detokenizer.push(token_id)
        if self._detokenizer.stopped is not None:
            self._finish(FinishReason.STOP, self._detokenizer.stopped)
        elif self.num_output >= self._max_output:
            self._finish(FinishReason.LENGTH)
            text += self._detokenizer.flush()
            if self._detokenizer.stopped is not None:
                self._finish(FinishReason.STOP, self._detokenizer.stopped)
        return text

    def ends_at(self, token_id: int) -> bool:
        """Would this token, as output, end the text?"""
        if token_id in self._stop_ids:
            return True
        return self._vocabulary.is_eog(token_id) and not self.request.params.ignore_eos

    def end_score(self) -> None:
        """All that it was to tell is known."""
        self._finish(FinishReason.LENGTH)

    def abort(self, error: str | None = None) -> str:
        """Ends it from outside; returns the text that was held back."""
        self.error = error
        self._finish(FinishReason.ABORT if error is None else FinishReason.ERROR)
        return self._detokenizer.flush()

    def fail(self, message: str) -> None:
        self.error = message
        self._finish(FinishReason.ERROR)

    def _finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def output(self) -> RequestOutput:
        """The whole result; only of a finished sequence."""
        assert self.finish_reason is not None
        request, start = self.request, self.request.arrival_s
        times = tuple(t - start for t in self._token_times)
        timings = Timings(
            queued_s=None if self._admitted_s is None else self._admitted_s - start,
            ttft_s=times[0] if times else None,
            total_s=time.perf_counter() - start,
            token_times_s=times,
        )
        tokens = tuple(self.token_ids[self._num_prompt :])
        completion = CompletionOutput(0, self._detokenizer.text, tokens, self.finish_reason, self.stop_reason)
        ids, prompt_logprobs, record = request.prompt_token_ids, None, self.logprobs
        if record is not None:
            completion = replace(completion, logprobs=record.of_output(), cumulative_logprob=record.cumulative)
            prompt_logprobs = record.of_prompt()
        return RequestOutput(
            *(request.request_id, request.prompt, ids, (completion,), self.error, timings, prompt_logprobs),
            num_truncated=request.num_truncated,
        )
