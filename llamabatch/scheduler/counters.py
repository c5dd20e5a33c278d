"""Counts the tokens of sequences and measures durations during the steps. Pure Python."""

from __future__ import annotations

from typing import Any

from llamabatch.request.sequence import Sequence
from llamabatch.utils.histogram import Tally


class SequenceCounters:
    """Counts tokens and makes histograms of durations. Only the engine's thread counts. If another thread reads the
    counts during a step, they include only a part of the step.

    Most rows of a step continue a sequence whose last token came in the previous step. All these rows have the same gap
    between tokens, so the histogram is updated once for all of them.

    Attributes:
        prompt_tokens, generated_tokens: as in EngineStats.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._queue = Tally()
        self._ttft = Tally()
        self._inter_token = Tally()
        self._last_step_s: float | None = None  # the time when the last step's tokens were known
        self._n_gaps = 0  # number of sequences with tokens both in this step and in the previous one

    def count_admission(self, sequence: Sequence, now: float) -> None:
        """Counts a sequence that has got its first slot."""
        self.prompt_tokens += sequence.num_prompt
        self._queue.add(now - sequence.request.arrival_s)

    def count_tokens(self, sequence: Sequence, n: int, before: float | None, now: float) -> None:
        """Counts `n` more tokens of a sequence, which all became known at the time `now`.

        Args:
            before: time at which the sequence's previous token was known; None: the sequence had no token.
        """
        self.generated_tokens += n
        if before is None:
            self._ttft.add(now - sequence.request.arrival_s)
        elif before == self._last_step_s:
            self._n_gaps += 1
        else:
            self._inter_token.add(now - before)
        if n > 1:  # with accepted guesses, several tokens come at the same time
            self._inter_token.add(0.0, n - 1)

    def end_step(self, now: float) -> None:
        """Ends a step after all its tokens were counted."""
        if self._n_gaps:
            assert self._last_step_s is not None
            self._inter_token.add(now - self._last_step_s, self._n_gaps)
            self._n_gaps = 0
        self._last_step_s = now

    def stats(self) -> dict[str, Any]:
        """Returns the fields of EngineStats that are counted here."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "queue_s": self._queue.histogram(),
            "ttft_s": self._ttft.histogram(),
            "inter_token_s": self._inter_token.histogram(),
        }
