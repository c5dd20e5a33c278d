"""Speculative decoding: guesses each step's next tokens where guessing pays. Pure Python.

A step that checks n guesses behind each row computes 1 + n rows a sequence, and yields 1 to 1 + n tokens. The times of
steps by their rows, and the share of accepted guesses, are measured while the engine runs. A fixed rule would not do:
depending on the machine, one more row costs almost nothing or a lot, because step times rise in stairs.
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

# Drafts must promise this multiple of a plain step's tokens a second, because estimates are noisy.
LEAST_GAIN = 1.05
# After this many plain steps, drafts are tried again in one step, because texts change.
STEPS_TO_RETRY = 128
# After this many plain steps in a row, only every fourth step looks for guesses: looking takes 5 us a row.
STEPS_TO_REST = 16
# A sequence's rate of acceptance includes the rate of the whole engine, with the weight of this many guesses.
_PRIOR_WEIGHT = 4.0
_FADE = 0.95  # each new observation multiplies the old ones by this, so that the rate follows the text


class Proposer(Protocol):
    """A source of guessed tokens.

    Attributes:
        is_free: guessing takes almost no time, so that guesses are made before it is known if they pay.
    """

    is_free: bool

    def propose(self, sequences: abc.Sequence[Sequence], n: int) -> list[list[int]]:
        """Returns up to n guessed tokens that follow each sequence's last token."""

    def close(self) -> None:
        """Frees the resources of the proposer."""


@dataclass
class SpeculationCounts:
    """Counts of speculative decoding since the start, and whether it pays now.

    Attributes:
        verify_calls: calls with guesses in them.
        drafted_tokens: guesses that were computed. accepted_tokens: guesses that the sampler also drew.
        speculating: 1 if drafts pay by the latest measurements, else 0.
    """

    verify_calls: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    speculating: int = 0


class SpecDecoder:
    """Makes the decode calls of each step, with guesses where guesses pay.

    Args:
        proposer: source of the guesses.
        n_draft: the most guesses for a sequence in a step.
        n_ctx: tokens that one sequence may have.
        always: guess even if guesses do not pay.
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
        self._draft_times = StepTimes()  # seconds of one guess for each row, by number of rows
        self._steps_without = 0
        self._began = self._drafting = 0.0

    def close(self) -> None:
        self._proposer.close()

    def calls(self, decoding: abc.Sequence[Sequence], occupied: abc.Set[int]) -> list[Call]:
        """Returns the calls of batch_builder.decode_calls, or one call that also checks guesses."""
        self._began, self._drafting = self._clock(), 0.0
        most = self._room_for_guesses(decoding)
        drafts = self._drafts(decoding, most) if most > 0 else []
        if not any(drafts):
            return decode_calls(decoding, occupied, self._limits)
        return [verify_call(decoding, drafts, max(map(len, drafts)), occupied, self._limits)]

    def _room_for_guesses(self, decoding: abc.Sequence[Sequence]) -> int:
        """Returns how many guesses behind each row fit into one pass of one call."""
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
        # a step yields one token more than its accepted guesses, so the last token of a text needs no guess
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
        """Returns the number of guesses for each row that brings the most tokens a second; 0: a plain step."""
        longest = max(lengths)
        if self._always or not longest:
            self.counts.speculating = int(self._always)
            return longest
        rows, plain = len(lengths), self._step_times.seconds(len(lengths))
        if plain is None:
            return 0  # a plain step comes first, because steps with guesses are compared with its time
        prior = self._acceptance.rate(0.5)
        rates = [state.acceptance.rate(prior) for state in states]
        best, most_tps = 0, LEAST_GAIN * rows / plain
        fallback, fallback_tps = 1, 0.0
        for n in _candidates(longest):
            guesses = sum(min(n, length) for length in lengths) if self._limits.packs_any else n * rows
            # at least the time of a plain step: the few samples may all come from a time without other load
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
        """Records the time of a step, and how many of its guesses were accepted.

        Args:
            results: one for each span, in the order of `batch.spans`.
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

    A sampler whose state changes with each drawn token can sample only one token a step. Its request runs without
    drafts, beside other requests.
    """
    return not (
        params.mirostat
        or params.overflow == "shift"  # guesses must not cross the end of the slot
        or params.logits_processors
        or params.post_sampling_probs  # the probabilities of wrong guesses would be computed in vain
        or params.dry_multiplier
        or params.structured_outputs is not None
    )


class DraftState:
    """Facts of one sequence: whether it can have drafts, and the share of its accepted guesses."""

    __slots__ = ("acceptance", "can_draft")

    def __init__(self, sequence: Sequence) -> None:
        self.can_draft = can_draft(sequence.request.params)
        self.acceptance = Acceptance()


def _cut_at_end(sequence: Sequence, draft: list[int]) -> list[int]:
    """Cuts a draft behind the first token that would end the text."""
    for place, token_id in enumerate(draft, 1):
        if sequence.ends_at(token_id):
            return draft[:place]
    return draft


def _candidates(longest: int) -> list[int]:
    """Returns the draft lengths to choose from: powers of two, and the longest."""
    return [*(1 << i for i in range((longest - 1).bit_length())), longest]


def _expected(rate: float, n: int) -> float:
    """Returns how many of n guesses are expected to be accepted.

    Args:
        rate: the probability that a guess is accepted, if all guesses before it were accepted.
    """
    return n if rate >= 1 else rate * (1 - rate**n) / (1 - rate)
