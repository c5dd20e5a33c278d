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
    """The running state of one request.

    There is no prefill phase and no decode phase: steps compute known tokens until all of them are computed.

    Args:
        vocabulary: the model's vocabulary.
        n_ctx: number of KV cells that the request may use.
        streamed: True: the caller gets each token at once; False: the whole output at the end.

    Attributes:
        token_ids: prompt and output so far.
        num_computed: number of token_ids that are computed.
        num_discarded: number of token_ids that have lost their cells. The positions of later tokens are lower by this
            number.
        least_cut: the cells cannot be cut to fewer tokens than this number, because a restored sliding window has no
            older cells.
        slot: seq id in the KV cache; None while the sequence waits.
        number: position of the request in the order of arrival at the scheduler.
        family: (highest expected_tokens, lowest `number`) of the requests that arrived together and start with the same
            tokens.
        overtaken: how often a later request entered before this one.
        last_step: number of the last step that computed the sequence, for round robin.
        scores: True: the sequence samples nothing and ends with the logprobs of its prompt.
        shifts: True: a full slot drops its oldest tokens (overflow="shift").
        logprobs: the logprobs that the request asks for; None: it asks for no logprobs.
        num_cached: number of prompt tokens whose cells were copied when the sequence first began to compute.
        shared_from: `number` of a running sequence, the source of the copied cells, directly or through other
            sequences; None: no cells were copied from a running sequence.
        not_held: the parts of the requested structure that are not enforced.
        last_token_s: time.perf_counter() of the last output token.
        media_runs: the runs of the prompt that represent pictures and sounds.
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
        self._began = False  # True: the sequence has had cells before
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
            self.token_ids.pop()  # the last token is not computed: its logprob is in the row before
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
        room = n_ctx + 1 - self._num_prompt  # the last output token is not computed and needs no cell
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
        """The maximum number of cells that the sequence may use."""
        return min(self._num_prompt + self._max_output - 1, self._n_ctx)

    @property
    def num_cells(self) -> int:
        """The number of cells of the sequence. This is also the position of the next token to compute."""
        return self.num_computed - self.num_discarded

    @property
    def num_room(self) -> int:
        """The number of tokens that can be computed before the n_ctx cells are full."""
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
        """The number of known tokens that are not computed. If this is 1, the sequence decodes, unless it scores."""
        return len(self.token_ids) - self.num_computed

    @property
    def most_steps_left(self) -> int:
        """The maximum number of output tokens that are still to come."""
        return self._max_output - self.num_output

    @property
    def most_shared(self) -> int:
        """The maximum number of leading tokens whose cells this sequence may copy. The last token must be computed,
        because its row of logits is needed."""
        most = len(self.token_ids) - 1
        record = self.logprobs
        return most if record is None or record.prompt_is_read else min(most, record.next_row)

    def last_turn(self, most: int) -> int:
        """Returns the number of prompt tokens up to the last end of a turn.

        Args:
            most: number of last tokens that are searched for an end. If they contain no end, all prompt tokens are
                counted.
        """
        is_eog, end = self._vocabulary.is_eog, self._num_prompt
        tail = enumerate(self.token_ids[max(0, end - most) : end], max(0, end - most) + 1)
        turns = [count for count, token_id in tail if token_id >= 0 and is_eog(token_id)]
        return turns[-1] if turns else end

    def whole(self, count: int) -> int:
        """Returns `count`, or the start of the media run that `count` would split. Parts of a run are not shared."""
        for run in self.media_runs:
            if run.start < count < run.end:
                return run.start
        return count

    def next_piece(self, count: int) -> tuple[int, MediaRun | None]:
        """Returns the number of tokens for the next call, and the media run of these tokens (None for text).

        The number is at most `count`, except in a media run that is not causal: one call must compute the whole rest
        of such a run.
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
        """Starts the sequence with existing cells for its first `count` tokens.

        If a preempted sequence starts again, its existing cells do not count as cached, as in vLLM.
        """
        self.num_computed = count
        if not self._began:
            self.num_cached = min(count, self._num_prompt)

    def preempt(self) -> None:
        """Takes the sequence out of its slot. The tokens stay, and are computed again later."""
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
        """Drops the older half of the cells when all are full. A BOS and n_keep tokens stay. Returns the position of
        the first dropped cell, and the number of dropped cells.

        The moment of a shift depends only on the number of computed tokens. So a sequence that is computed again gets
        the same cells.
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
        """Returns True if this token ends the text when it is sampled."""
        return token_id in self._stop_ids or (not self._ignores_eos and self._vocabulary.is_eog(token_id))

    def end_score(self) -> None:
        """Ends a sequence that scores: the logprobs of its prompt are complete."""
        self._finish(FinishReason.LENGTH)

    def abort(self, error: str | None = None) -> str:
        """Ends the sequence at a caller's request, or with an error. Returns the text that was held back."""
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
    """Returns the number of first tokens that stay when `overflow` drops tokens.

    Args:
        least: 1 for a prompt with a BOS, else 0.
    """
    n_keep = params.n_keep or 0
    wanted = num_prompt if n_keep < 0 else min(n_keep, num_prompt)
    return max(least, min(wanted, n_ctx // 2))
