"""Decides how many prompt tokens a step computes while other sequences wait for their next token. Pure Python.

A step with prompt tokens takes longer than a step without, and every decoding sequence waits for the step. Both kinds
of step are timed. The size of each chunk is chosen so that prompts get their share of the time. All chunks take about
the same time, so that no gap between two tokens is much longer than another.
"""

from __future__ import annotations

import statistics
from collections import deque

from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.output import Limits
from llamabatch.scheduler.step_costs import StepCosts

# FIRST_CHUNK is the number of tokens in the first chunk, when the cost of a token is not known yet. LEAST_CHUNK is the
# minimum number of tokens in a chunk on a CPU, because a pass over the weights costs the same for one token as for a
# few. On a GPU the minimum is the number of tokens that cost half a pass. If the saved time is not enough for the
# minimum, long prompts wait, and the time is kept for a later step. MOST_SAVED allows enough saved time for the
# minimum.
FIRST_CHUNK = 16
LEAST_CHUNK = 16
# The time that is saved for prompts is at most this many times the time of a plain step. With a prefill_share of at
# most two thirds, a gap between two tokens is then at most as long as three plain steps.
MOST_SAVED = 2.0
# A chunk is at most this many times as long as the previous chunk, because a single measured time may be wrong.
MOST_GROWTH = 2.0
# A chunk takes the whole rest of a prompt if the rest is at most this many times as long as the chunk.
TAIL = 1.25
# Prompts of at most this many tokens are computed at once, up to prefill_budget tokens a step. On a CPU, 64 prompt
# tokens take 80 ms, and a decode step of 16 rows takes 45 ms (0.5B Q8_0). A longer prompt gets only its share of the
# time, also for its last tokens. On a GPU the limit is the number of prompt tokens that take as long as one decode
# step. A short prompt then lengthens a step by about the same factor as on a CPU.
SHORT = 64
# After this many steps with prompt tokens, one step has none, so that the time of a decode step can be measured. The
# time is also measured again once the number of decoding sequences has changed by the fraction ROWS_CHANGED.
STEPS_BETWEEN_PLAIN = 15
ROWS_CHANGED = 0.25
_LATEST = 5  # the median of this many latest times is used


class PrefillTimes:
    """Measures the time of a step without prompt tokens, and of one prompt token, while a caller waits for a token."""

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_LATEST)  # seconds of steps without prompt tokens
        self._token: deque[float] = deque(maxlen=_LATEST)  # seconds of a prompt token, from steps with prompt tokens
        self._rows = 0  # number of decoding sequences in the last step without prompt tokens
        self.n_since_plain = 0  # steps with prompt tokens since the last step without prompt tokens

    def wants_plain(self, n_rows: int) -> bool:
        """True if the next step should have no prompt tokens, because the time of such a step is unknown or old."""
        if not self._plain or self.n_since_plain >= STEPS_BETWEEN_PLAIN:
            return True
        return self.n_since_plain > 0 and abs(n_rows - self._rows) > ROWS_CHANGED * self._rows

    def observe(self, seconds: float, n_rows: int, n_prompt_tokens: int) -> None:
        """Records the duration of a step with `n_rows` decode rows and `n_prompt_tokens` prompt tokens."""
        if n_prompt_tokens == 0:
            if abs(n_rows - self._rows) > ROWS_CHANGED * self._rows:
                self._plain.clear()
            self._plain.append(seconds)
            self._rows, self.n_since_plain = n_rows, 0
            return
        self.n_since_plain += 1
        if self._plain:
            # prompts count as at least 5 % of the step, because after delayed plain steps they seem to take no time
            cost = max(seconds - statistics.median(self._plain), 0.05 * seconds)
            self._token.append(cost / n_prompt_tokens)

    @property
    def plain_s(self) -> float | None:
        """Duration of a step without prompt tokens, in seconds; None: not known yet."""
        return statistics.median(self._plain) if self._plain else None

    @property
    def token_s(self) -> float | None:
        """Seconds of a prompt token; None: not known yet."""
        return statistics.median(self._token) if self._token else None


class PrefillPacer:
    """Chooses the sequences that compute prompt tokens in a step, and the number of these tokens.

    Args:
        limits: prefill_share and prefill_budget limit a step while a caller waits for a token. Otherwise n_batch limits
            the step.
        costs: measured costs of rows and passes.

    Attributes:
        times: measured times of steps.
    """

    def __init__(self, limits: Limits, costs: StepCosts | None = None) -> None:
        self.times = PrefillTimes()
        self._limits = limits
        self._costs = costs or StepCosts(limits)
        self._chunk = 0  # tokens of the last chunk of a long prompt
        self._n_long = 0  # tokens of long prompts in this step
        self._long: set[Sequence] = set()  # prompts that were long when they began
        self._saved_s = 0.0  # seconds that prompts were given but have not used

    def observe(self, seconds: float, n_rows: int, n_prompt_tokens: int, token_was_awaited: bool) -> None:
        """Records the duration of this step.

        Args:
            n_rows: number of sequences that decoded.
            n_prompt_tokens: number of prompt tokens that were computed.
            token_was_awaited: the `token_is_awaited` that was passed to `choose`.
        """
        if token_was_awaited and n_rows:
            self.times.observe(seconds, n_rows, n_prompt_tokens)
            plain = self.times.plain_s or 0.0
            # _saved_s has a lower limit, because one delayed step must not stop long prompts for many steps
            if self._n_long and n_prompt_tokens:
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
        """Returns the sequences that may compute prompt tokens in this step, in order, and the maximum number of prompt
        tokens.

        Args:
            token_is_awaited: True if this step decodes, and a caller waits for one of its tokens.
            n_rows: number of sequences that decode in this step.
            takes_long: True if long prompts may be computed even while a caller waits for a token.
            is_streamed: True if the caller of a decoding sequence reads the answer token by token. If not,
                gaps between tokens do not matter, and prompts get the whole prefill_budget. More sequences then decode
                together, and answers end earlier.
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
        if self.times.wants_plain(n_rows):  # if the last plain step was long ago, short prompts wait, too
            return [] if self.times.n_since_plain >= 2 * STEPS_BETWEEN_PLAIN else short, most
        chunk = self._affordable_chunk()
        if chunk < self._least_chunk:
            return short, most
        self._chunk = chunk
        if long[0].num_pending <= TAIL * chunk:
            chunk = max(chunk, long[0].num_pending)
        n_short = sum(s.num_pending for s in short)
        self._n_long = chunk
        # if a pass accepts only equal lengths, a second long prompt would need an additional pass
        return [*short, *(long if self._limits.packs_any else long[:1])], min(n_short + chunk, most)

    def _affordable_chunk(self) -> int:
        """Adds this step's share to the saved time. Returns the number of prompt tokens that fit into the saved
        time."""
        plain_s, token_s = self.times.plain_s, self.times.token_s
        assert plain_s is not None
        earned = self._limits.prefill_share / (1 - self._limits.prefill_share)
        self._saved_s = min(self._saved_s + earned * plain_s, max(earned, MOST_SAVED) * plain_s)
        if not token_s:
            return max(FIRST_CHUNK, self._least_chunk)
        return int(min(self._saved_s / token_s, MOST_GROWTH * max(self._chunk, self._least_chunk)))

    @property
    def _least_chunk(self) -> int:
        """The minimum number of tokens in a chunk. On a GPU these tokens cost half a pass, but are at most a quarter of
        prefill_budget."""
        half = self._costs.pass_in_rows(2 * LEAST_CHUNK) // 2
        return max(LEAST_CHUNK, min(half, self._limits.prefill_budget // 4))
