"""Speculative decoding: guesses the next tokens of sequences if guesses save time. Pure Python.

A step that checks n guesses for each sequence computes 1 + n rows of the sequence, and yields 1 to 1 + n tokens. The
times of steps by their number of rows, and the share of accepted guesses, are measured while the engine runs. A fixed
rule would not work: step times rise in stairs, so one more row costs almost nothing or a lot, depending on the machine.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.batch_builder import decode_calls, verify_call
from llamabatch.scheduler.output import Call, Limits, SchedulerOutput, SpanOutput
from llamabatch.scheduler.step_costs import StepTimes

# Drafts are made only if the expected tokens per second are at least this many times those of plain steps. The factor
# is above 1 because estimates are noisy.
LEAST_GAIN = 1.05
# After this many plain steps, drafts are tried again in one step, because texts change.
STEPS_TO_RETRY = 128
# After this many plain steps in a row, only every fourth step looks for guesses, because the search takes 5 us a row.
STEPS_TO_REST = 16
# The acceptance rate of a sequence begins with the rate of the whole engine, which counts as this many guesses.
_PRIOR_WEIGHT = 4.0
_FADE = 0.95  # each new observation multiplies the old ones by this factor, so that the rate follows the text


class Proposer(Protocol):
    """A source of guessed tokens.

    Attributes:
        is_free: True if guesses take almost no time. They are then made before their gain is known.
    """

    is_free: bool

    def propose(self, sequences: abc.Sequence[Sequence], n: int) -> list[list[int]]:
        """Returns up to n guessed tokens that follow each sequence's last token."""

    def close(self) -> None:
        """Frees the resources of the proposer."""


@dataclass
class SpeculationCounts:
    """The counters of speculative decoding since the start.

    Attributes:
        verify_calls: number of calls with guesses.
        drafted_tokens: number of guesses that were computed.
        accepted_tokens: number of guesses that were right, because the sampler drew the same tokens.
        speculating: 1 if drafts save time according to the latest measurements, else 0.
    """

    verify_calls: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    speculating: int = 0


class SpecDecoder:
    """Makes the decode calls of each step, with guesses if guesses save time.

    Args:
        proposer: source of the guesses.
        n_draft: maximum number of guesses for a sequence in a step.
        n_ctx: maximum number of tokens of a sequence.
        always: guess even if guesses save no time.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        proposer: Proposer,
        limits: Limits,
        n_draft: int,
        n_ctx: int,
        always: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.counts = SpeculationCounts()
        self._proposer = proposer
        self._limits = limits
        self._n_draft = n_draft
        self._n_ctx = n_ctx
        self._always = always
        self._clock = clock
        self._draft_states: WeakKeyDictionary[Sequence, DraftState] = WeakKeyDictionary()
        self._acceptance = Acceptance(14, 20)  # optimistic at first, so that drafts are tried
        self._step_times = StepTimes()
        self._draft_times = StepTimes()  # number of rows -> seconds to make one guess for each row
        self._steps_without = 0
        self._began = self._drafting = 0.0

    def close(self) -> None:
        self._proposer.close()

    def calls(self, decoding: abc.Sequence[Sequence], occupied: abc.Set[int]) -> list[Call]:
        """Returns a list with one call, which has guesses if they save time. The list is empty without sequences."""
        self._began, self._drafting = self._clock(), 0.0
        most = self._room_for_guesses(decoding)
        drafts = self._drafts(decoding, most) if most > 0 else []
        if not any(drafts):
            return decode_calls(decoding, occupied, self._limits)
        return [verify_call(decoding, drafts, max(map(len, drafts)), occupied, self._limits)]

    def _room_for_guesses(self, decoding: abc.Sequence[Sequence]) -> int:
        """Returns the maximum number of guesses per row in a call that fits in one pass."""
        if not decoding:
            return 0
        limits, width = self._limits, len(decoding)
        room = self._n_draft
        if not limits.packs_any:
            slots = [s.slot for s in decoding if s.slot is not None]
            width = max(slots) - min(slots) + 1  # holes may get dummy rows
            room = min(room, self._n_ctx - 1 - max(s.num_cells for s in decoding))
        return min(room, limits.n_ubatch // width - 1, limits.n_outputs // len(decoding) - 1)

    def _drafts(self, decoding: abc.Sequence[Sequence], most: int) -> list[list[int]]:
        """Returns the guesses for each row. Some rows, or all, may have none."""
        states = [self._state_of(s) for s in decoding]
        # a step yields the accepted guesses and one more token, so the last token of a text needs no guess
        pairs = zip(decoding, states, strict=True)
        lengths = [min(most, s.most_steps_left - 1) if state.can_draft else 0 for s, state in pairs]
        if not any(lengths) or self._skips_step():
            return []
        if self._proposer.is_free:
            found = self._propose(decoding, lengths, most)
            n = self._best_length(states, [len(draft) for draft in found], costs=False)
            return [draft[:n] for draft in found] if n else []
        n = self._best_length(states, lengths, costs=True)
        if not n:
            return []
        before = self._clock()
        found = self._propose(decoding, lengths, n)
        self._drafting = self._clock() - before
        self._draft_times.add(len(decoding), self._drafting / n)
        return found

    def _skips_step(self) -> bool:
        if self._always or self._steps_without < STEPS_TO_REST or self._steps_without % 4 == 0:
            return False
        self._steps_without += 1
        return True

    def _propose(self, decoding: abc.Sequence[Sequence], lengths: list[int], n: int) -> list[list[int]]:
        guessing = [s for s, length in zip(decoding, lengths, strict=True) if length]
        found = iter(self._proposer.propose(guessing, n))
        return [
            _cut_at_end(s, next(found)[:length]) if length else [] for s, length in zip(decoding, lengths, strict=True)
        ]

    def _best_length(self, states: list[DraftState], lengths: list[int], costs: bool) -> int:
        """Returns the number of guesses for each row that gives the most tokens per second; 0: a plain step."""
        longest = max(lengths)
        if self._always or not longest:
            self.counts.speculating = int(self._always)
            return longest
        rows, plain = len(lengths), self._step_times.seconds(len(lengths))
        if plain is None:
            return 0  # do a plain step first: its time is the reference for steps with guesses
        prior = self._acceptance.rate(0.5)
        rates = [state.acceptance.rate(prior) for state in states]
        best, most_tps = 0, LEAST_GAIN * rows / plain
        fallback, fallback_tps = 1, 0.0
        for n in _candidates(longest):
            guesses = sum(min(n, length) for length in lengths) if self._limits.packs_any else n * rows
            # at least the time of a plain step, because the few samples may all come from a time without other load
            seconds = max(self._step_times.seconds(rows + guesses) or plain, plain)
            if costs:
                seconds += n * (self._draft_times.seconds(rows) or 0.0)
            gain = sum(_expected(rate, min(n, length)) for rate, length in zip(rates, lengths, strict=True) if length)
            tps = (rows + gain) / seconds
            if tps > most_tps:
                best, most_tps = n, tps
            if tps > fallback_tps:
                fallback, fallback_tps = n, tps
        self.counts.speculating = int(best > 0)
        self._steps_without = 0 if best else self._steps_without + 1
        if self._steps_without >= STEPS_TO_RETRY:
            self._steps_without = 0
            return fallback
        return best

    def _state_of(self, sequence: Sequence) -> DraftState:
        state = self._draft_states.get(sequence)
        if state is None:
            state = self._draft_states[sequence] = DraftState(sequence)
        return state

    def observe(self, batch: SchedulerOutput, results: abc.Sequence[SpanOutput]) -> None:
        """Records the time of a step, and the number of its accepted guesses.

        Args:
            results: one result for each span, in the order of `batch.spans`.
        """
        if rows := batch.output_rows:
            self._step_times.add(rows, self._clock() - self._began - self._drafting)
        if not any(call.n_guesses for call in batch.calls):
            return
        self.counts.verify_calls += 1
        for span, result in zip(batch.spans, results, strict=True):
            if span.draft and result.token_ids:
                n_accepted = len(result.token_ids) - 1
                self.counts.drafted_tokens += len(span.draft)
                self.counts.accepted_tokens += n_accepted
                self._acceptance.add(len(span.draft), n_accepted)
                self._state_of(span.sequence).acceptance.add(len(span.draft), n_accepted)


class Acceptance:
    """The share of accepted guesses. A guess counts only if all guesses before it were accepted. Old guesses fade."""

    def __init__(self, accepted: float = 0.0, tried: float = 0.0) -> None:
        self._accepted = accepted
        self._tried = tried

    def add(self, n_drafted: int, n_accepted: int) -> None:
        self._accepted = self._accepted * _FADE + n_accepted
        self._tried = self._tried * _FADE + min(n_drafted, n_accepted + 1)

    def rate(self, prior: float) -> float:
        return (self._accepted + prior * _PRIOR_WEIGHT) / (self._tried + _PRIOR_WEIGHT)


def can_draft(params: SamplingParams) -> bool:
    """True if several tokens of a request can be sampled in one step.

    If the state of a sampler changes with each drawn token, it can sample only one token a step. Its request then gets
    no drafts, but still shares steps with other requests.
    """
    return not (
        params.mirostat
        or params.overflow == "shift"  # guesses must not reach beyond the end of the slot
        or params.logits_processors
        or params.post_sampling_probs  # it would be useless work to compute the probabilities of wrong guesses
        or params.dry_multiplier
        or params.structured_outputs is not None
    )


class DraftState:
    """Says for one sequence whether it can have drafts, and which share of its guesses was accepted."""

    __slots__ = ("acceptance", "can_draft")

    def __init__(self, sequence: Sequence) -> None:
        self.can_draft = can_draft(sequence.request.params)
        self.acceptance = Acceptance()


def _cut_at_end(sequence: Sequence, draft: list[int]) -> list[int]:
    """Cuts a draft after the first token that would end the text."""
    for place, token_id in enumerate(draft, 1):
        if sequence.ends_at(token_id):
            return draft[:place]
    return draft


def _candidates(longest: int) -> list[int]:
    """Returns the possible lengths of drafts: powers of two, and the longest length."""
    return [*(1 << i for i in range((longest - 1).bit_length())), longest]


def _expected(rate: float, n: int) -> float:
    """Returns the expected number of accepted guesses among n guesses.

    Args:
        rate: the probability that a guess is accepted, if all guesses before it were accepted.
    """
    return n if rate >= 1 else rate * (1 - rate**n) / (1 - rate)
