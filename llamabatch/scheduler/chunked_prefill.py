"""Prompt tokens of a step beside sequences that wait for their next token. Pure Python.

A step with prompt tokens in it takes longer than one without, and every decoding sequence waits for it. The times of
both kinds are measured, and each chunk is sized so that prompts have their share of the time: evenly, so that no gap
between two tokens is much longer than another.
"""

from __future__ import annotations

import statistics
from collections import deque

from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.output import Limits
from llamabatch.scheduler.step_costs import StepCosts

# Tokens of the first chunk, whose cost is not known yet, and of any chunk at least: a pass over the weights costs the
# same for one token as for a few. Where a step's share pays for fewer, it is saved up for one of the next steps. On a
# GPU it is as many as cost half a pass: a chunk is affordable as long as two passes.
FIRST_CHUNK = 16
LEAST_CHUNK = 16
# Time that may be saved up, in plain steps: a gap is then at most three of them long, if prefill_share is no more than
# two thirds.
MOST_SAVED = 2.0
# A chunk grows to so many times the one before at most, as one measured time may be off.
MOST_GROWTH = 2.0
# A chunk takes the rest of a prompt in that is up to so many times its length.
TAIL = 1.25
# Prompts up to this length are computed at once, prefill_budget tokens a step: a decode step of 16 rows takes 45 ms, 64
# prompt tokens 80 ms (0.5B Q8_0). Longer ones have their share of the time, to their last token. On a GPU it is as many
# as cost a pass, which with the pass that they need makes as much of a step.
SHORT = 64
# Steps with prompt tokens between two without, which show what a decode step takes; and the change in the number of
# decoding sequences after which it is looked at again.
STEPS_BETWEEN_PLAIN = 15
ROWS_CHANGED = 0.25
_LATEST = 5  # measured times whose median counts


class PrefillTimes:
    """Measured times of steps in which a token is awaited: without prompt tokens, and of a prompt token beside it."""

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_LATEST)  # seconds of steps without prompt tokens
        self._token: deque[float] = deque(maxlen=_LATEST)  # seconds of a prompt token in the steps with some
        self._rows = 0  # decoding sequences of the last step without prompt tokens
        self.n_since_plain = 0  # steps with prompt tokens since the last one without

    def wants_plain(self, n_rows: int) -> bool:
        """True if the next step should have no prompt tokens, as the time of such a step is not known (any more)."""
        if not self._plain or self.n_since_plain >= STEPS_BETWEEN_PLAIN:
            return True
        return self.n_since_plain > 0 and abs(n_rows - self._rows) > ROWS_CHANGED * self._rows

    def observe(self, seconds: float, n_rows: int, n_prompt_tokens: int) -> None:
        """Takes the duration of a step in, by what it computed."""
        if n_prompt_tokens == 0:
            if abs(n_rows - self._rows) > ROWS_CHANGED * self._rows:
                self._plain.clear()
            self._plain.append(seconds)
            self._rows, self.n_since_plain = n_rows, 0
            return
        self.n_since_plain += 1
        if self._plain:  # a chunk that seems to cost nothing was measured beside a plain step that was too slow
            cost = max(seconds - statistics.median(self._plain), 0.05 * seconds)
            self._token.append(cost / n_prompt_tokens)

    @property
    def plain_s(self) -> float | None:
        """Seconds of a step without prompt tokens; None: not known yet."""
        return statistics.median(self._plain) if self._plain else None

    @property
    def token_s(self) -> float | None:
        """Seconds of a prompt token; None: not known yet."""
        return statistics.median(self._token) if self._token else None


class PrefillPacer:
    """Decides how many prompt tokens a step computes, and of which sequences.

    Args:
        limits: n_batch holds while no token is awaited; prefill_share and prefill_budget while one is.
        costs: of rows and passes, where they are measured.

    Attributes:
        times: measured times of steps.
    """

    def __init__(self, limits: Limits, costs: StepCosts | None = None) -> None:
        self.times = PrefillTimes()
        self._limits = limits
        self._costs = costs or StepCosts(limits)
        self._chunk = 0  # tokens of the last chunk of a long prompt
        self._n_long = 0  # of them, tokens in this step
        self._long: set[Sequence] = set()  # prompts that began as long ones
        self._saved_s = 0.0  # time that prompts have earned and not used

    def observe(self, seconds: float, n_rows: int, n_prompt_tokens: int, token_was_awaited: bool) -> None:
        """Takes the duration of this step in.

        Args:
            n_rows: decoding sequences that computed.
            n_prompt_tokens: prompt tokens that were computed.
            token_was_awaited: as `choose` had it.
        """
        if token_was_awaited and n_rows:
            self.times.observe(seconds, n_rows, n_prompt_tokens)
            plain = self.times.plain_s or 0.0
            if self._n_long and n_prompt_tokens:  # a step that something else held up must not stop prompts for long
                cost = max(0.0, seconds - plain) * min(1.0, self._n_long / n_prompt_tokens)
                self._saved_s = max(self._saved_s - cost, -MOST_SAVED * plain)

    def choose(
        self,
        prompts: list[Sequence],
        token_is_awaited: bool,
        n_rows: int = 1,
        *,
        is_streamed: bool = True,
        takes_long: bool = True,
    ) -> tuple[list[Sequence], int]:
        """The sequences that may compute prompt tokens in this step, first those that go first, and how many tokens in
        all.

        Args:
            token_is_awaited: this step decodes, and a caller waits for its next token.
            n_rows: sequences that decode in it.
            takes_long: long prompts may have a chunk while a token is awaited.
            is_streamed: one of these is read token by token. Where all are read whole, a gap between two tokens is not
                seen, and each answer ends earlier if prompts are computed soon: later steps then have more rows.
        """
        self._n_long = 0
        most_short = max(SHORT, self._costs.pass_in_rows(SHORT))
        self._long = {s for s in prompts if s.num_pending > most_short or s in self._long}
        if not token_is_awaited:
            return prompts, self._limits.n_batch
        most = min(self._limits.prefill_budget, self._limits.n_batch)
        short = [s for s in prompts if s not in self._long]
        long = [s for s in prompts if s in self._long]
        if self._limits.prefill_share >= 1 or not is_streamed:
            return [*short, *long], most
        if not long or not takes_long:
            return short, most
        if self.times.wants_plain(n_rows):  # where short ones keep coming, they wait for it a step now and then
            return [] if self.times.n_since_plain >= 2 * STEPS_BETWEEN_PLAIN else short, most
        chunk = self._affordable_chunk()
        if chunk < self._least_chunk:
            return short, most
        self._chunk = chunk
        if long[0].num_pending <= TAIL * chunk:
            chunk = max(chunk, long[0].num_pending)
        n_short = sum(s.num_pending for s in short)
        self._n_long = chunk
        # where a pass takes equal lengths alone, a second long prompt would cost one of its own
        return [*short, *(long if self._limits.packs_any else long[:1])], min(n_short + chunk, most)

    def _affordable_chunk(self) -> int:
        """Prompt tokens that the time of prompts pays for, with what this step adds to it."""
        plain_s, token_s = self.times.plain_s, self.times.token_s
        assert plain_s is not None
        earned = self._limits.prefill_share / (1 - self._limits.prefill_share)
        self._saved_s = min(self._saved_s + earned * plain_s, max(earned, MOST_SAVED) * plain_s)
        if not token_s:
            return max(FIRST_CHUNK, self._least_chunk)
        return int(min(self._saved_s / token_s, MOST_GROWTH * max(self._chunk, self._least_chunk)))

    @property
    def _least_chunk(self) -> int:
        """Tokens of a chunk at least. No more than a quarter of prefill_budget, so that it can always be paid for."""
        half = self._costs.pass_in_rows(2 * LEAST_CHUNK) // 2
        return max(LEAST_CHUNK, min(half, self._limits.prefill_budget // 4))
