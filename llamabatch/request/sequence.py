"""Sequence: the running state of one request, its tokens and their cells in the KV cache."""

from __future__ import annotations

import time
from dataclasses import replace

from llamabatch.request.detokenizer import Detokenizer, Vocabulary
from llamabatch.request.logprobs import LogprobRecord
from llamabatch.request.media import MediaRun
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, Timings
from llamabatch.request.request import Request, ResumedOutput
from llamabatch.request.sampling_params import SamplingParams


class Sequence:
    """The running state of one request; everything else is derived from it.

    There is no prefill phase and no decode phase: the computed tokens catch up with the known tokens.

    Args:
        vocabulary: the model's vocabulary.
        n_ctx: cells of the KV cache that the request may use.
        streamed: the caller gets each token as it comes, instead of the whole output at the end.

    Attributes:
        token_ids: prompt and output so far.
        num_computed: how many of token_ids are computed.
        num_discarded: how many of token_ids have lost their cells; the positions of all later tokens are lower by this.
        least_cut: the cells cannot be cut to fewer tokens, because older cells of a sliding window are missing.
        slot: seq id in the KV cache; None while the sequence waits.
        number: order of arrival at the scheduler.
        family: (most expected tokens, first number) of the requests of its call that begin alike.
        overtaken: times that a later request entered first.
        last_step: number of the last step that computed the sequence, for round robin.
        scores: the sequence samples nothing and ends with the logprobs of its prompt.
        shifts: a full slot forgets its oldest tokens (overflow="shift").
        logprobs: the logprobs that the request asks for; None: it asks for none.
        num_cached: tokens of the prompt that came from other cells when the sequence first began to compute.
        shared_from: sequences that have copied cells from one another share this number, which is that of the first of
            them; None: the sequence has copied from no running one.
        not_held: the parts of the requested form that the output is not held to.
        last_token_s: time.perf_counter() of the last output token.
        media_runs: the runs of the prompt that stand for pictures and sounds.
    """

    def __init__(self, request: Request, vocabulary: Vocabulary, n_ctx: int, *, streamed: bool = True) -> None:
        self.request = request
        self.streamed = streamed
        self.token_ids = list(request.prompt_token_ids)
        self.num_computed = 0
        self.num_discarded = 0
        self.num_cached = 0
        self.least_cut = 0
        self.shared_from: int | None = None
        self._began = False  # the sequence has had cells
        self.slot: int | None = None
        self.number: int | None = None
        self.family = (request.expected_tokens, 0)
        self.background = request.params.background
        self.not_held = () if request.params.structure is None else request.params.structure.not_held
        self.overtaken = 0
        self.last_step = -1
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.scores = request.score_from is not None
        if self.scores:
            self.token_ids.pop()  # the logprob of the last token is read from the row before it
        self.logprobs = LogprobRecord.of_request(
            request.params,
            request.prompt_token_ids,
            vocabulary.all_bytes,
            vocabulary.size,
            ranked=request.ranked,
            score_from=request.score_from,
        )
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
        self._ignores_eos = params.ignore_eos
        self._detokenizer = Detokenizer(
            vocabulary.shown_bytes(request.preserved_token_ids) if params.skip_special_tokens else vocabulary.all_bytes,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        self.media_runs = request.media_runs
        self.last_token_s: float | None = None
        self._admitted_s: float | None = None
        self._token_times: list[float] = []
        if request.resumed is not None:
            self._resume(request.resumed)

    @property
    def num_prompt(self) -> int:
        return self._num_prompt

    @property
    def most_cells(self) -> int:
        """The upper bound of the cells that the sequence may use."""
        return min(self._num_prompt + self._max_output - 1, self._n_ctx)

    @property
    def num_cells(self) -> int:
        """The number of cells that the sequence holds, and the position of the next token to be computed."""
        return self.num_computed - self.num_discarded

    @property
    def num_room(self) -> int:
        """Tokens that can be computed before the n_ctx cells are full."""
        return self._n_ctx - self.num_cells

    @property
    def num_shareable(self) -> int:
        """The number of leading tokens whose cells another sequence may copy, now or once they are computed."""
        return 0 if self.num_discarded else len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self._num_prompt

    @property
    def num_pending(self) -> int:
        """The number of known tokens that are not computed. 1: a decode row is enough, unless the sequence scores."""
        return len(self.token_ids) - self.num_computed

    @property
    def most_steps_left(self) -> int:
        """The number of output tokens that can still come."""
        return self._max_output - self.num_output

    @property
    def most_shared(self) -> int:
        """The number of leading tokens that may be copied. The last one is computed, because its row is the output."""
        most = len(self.token_ids) - 1
        record = self.logprobs
        return most if record is None or record.prompt_is_read else min(most, record.next_row)

    def last_turn(self, most: int) -> int:
        """Returns the prompt tokens up to the last one that ends a turn, if among the last `most`; otherwise all."""
        is_eog, end = self._vocabulary.is_eog, self._num_prompt
        tail = enumerate(self.token_ids[max(0, end - most) : end], max(0, end - most) + 1)
        turns = [count for count, token_id in tail if token_id >= 0 and is_eog(token_id)]
        return turns[-1] if turns else end

    def whole(self, count: int) -> int:
        """Returns the most leading tokens, up to `count`, that split no picture or sound: parts are not shared."""
        for run in self.media_runs:
            if run.start < count < run.end:
                return run.start
        return count

    def next_piece(self, count: int) -> tuple[int, MediaRun | None]:
        """Returns how many of the next `count` tokens one call can compute, and their run; None for text.

        A run that is not causal is computed whole, even if it is longer than `count`.
        """
        at = self.num_computed
        for run in self.media_runs:
            if at < run.start:
                return min(count, run.start - at), None
            if at < run.end:
                return min(count, run.end - at) if run.is_causal else run.end - at, run
        return count, None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def was_admitted(self) -> bool:
        """True if the sequence has ever had a slot."""
        return self._admitted_s is not None

    @property
    def admitted_s(self) -> float | None:
        """time.perf_counter() when the sequence first had a slot; None before."""
        return self._admitted_s

    def admit(self, slot: int) -> None:
        self.slot = slot
        if self._admitted_s is None:
            self._admitted_s = time.perf_counter()

    def begin_at(self, count: int) -> None:
        """Starts the sequence with cells of the first `count` tokens that were computed elsewhere.

        The cells that a preempted sequence finds when it starts again do not count as cached, as in vLLM.
        """
        self.num_computed = count
        if not self._began:
            self.num_cached = min(count, self._num_prompt)

    def preempt(self) -> None:
        """Gives up the slot; the tokens stay and are computed again later."""
        self._began = self._began or self.num_computed > 0
        self.slot = None
        self.shared_from = None
        self.num_computed = self.num_discarded = self.least_cut = 0

    def _resume(self, output: ResumedOutput) -> None:
        """Continues after these tokens, as if the sequence had sampled them and then lost its slot."""
        self._admitted_s = output.admitted_s
        for token_id, time_s in zip(output.token_ids, output.times_s, strict=True):
            self.accept(token_id, time_s)
        if self.logprobs is not None:
            self.logprobs.resume(output.logprobs or ())

    def shift(self) -> tuple[int, int]:
        """Drops the older half of the full cells except a BOS and n_keep tokens. Returns its position and length.

        The moment depends on the number of computed tokens alone, so that a sequence that is computed again gets the
        same cells.
        """
        has_bos = 1 if self.token_ids[0] == self._vocabulary.bos else 0
        kept = kept_tokens(self.request.params, self._num_prompt, self._n_ctx, has_bos)
        count = (self._n_ctx - kept + 1) // 2
        self.num_discarded += count
        return kept, count

    def accept(self, token_id: int, now: float) -> str:
        """Appends a sampled token. Returns the text that is now safe to show, and may set finish_reason.

        Args:
            now: time.perf_counter() of the step.
        """
        self.token_ids.append(token_id)
        self._token_times.append(now)
        self.last_token_s = now
        if self.ends_at(token_id):
            shown = self._detokenizer.push(token_id) if self.request.params.include_stop_str_in_output else ""
            self._finish(FinishReason.STOP, token_id)
            return shown + self._detokenizer.flush()
        detokenizer = self._detokenizer
        text = detokenizer.push(token_id)
        if detokenizer.stopped is not None:
            self._finish(FinishReason.STOP, detokenizer.stopped)
        elif len(self.token_ids) - self._num_prompt >= self._max_output:
            self._finish(FinishReason.LENGTH)
            text += detokenizer.flush()
            if detokenizer.stopped is not None:
                self._finish(FinishReason.STOP, detokenizer.stopped)
        return text

    def ends_at(self, token_id: int) -> bool:
        """True if this token, as output, would end the text."""
        return token_id in self._stop_ids or (not self._ignores_eos and self._vocabulary.is_eog(token_id))

    def end_score(self) -> None:
        """Ends a sequence that scores: the logprobs of its prompt are complete."""
        self._finish(FinishReason.LENGTH)

    def abort(self, error: str | None = None) -> str:
        """Ends the sequence from outside, as an error if one is given. Returns the text that was held back."""
        self.error = error
        self._finish(FinishReason.ABORT if error is None else FinishReason.ERROR)
        return self._detokenizer.flush()

    def fail(self, message: str) -> None:
        """Ends the sequence with this error."""
        self.error = message
        self._finish(FinishReason.ERROR)

    def _finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def output(self) -> RequestOutput:
        """Returns the whole result of a finished sequence."""
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
            num_cached_tokens=self.num_cached,
            not_held=self.not_held,
        )


def kept_tokens(params: SamplingParams, num_prompt: int, n_ctx: int, least: int) -> int:
    """Returns how many first tokens stay when `overflow` drops tokens.

    Args:
        least: 1 for a prompt with a BOS, else 0.
    """
    n_keep = params.n_keep or 0
    wanted = num_prompt if n_keep < 0 else min(n_keep, num_prompt)
    return max(least, min(wanted, n_ctx // 2))
