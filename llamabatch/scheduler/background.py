"""Decides how much of a step background sequences get while foreground sequences run. Pure Python.

Background work hardly delays foreground work, because a step with background tokens takes only a little longer.
"""

from __future__ import annotations

import statistics
from collections import abc, deque
from enum import Enum, auto

from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.output import Limits

# A step with background tokens takes at most this many times as long as a step without them.
MOST_LONGER = 1.1
# Background sequences pause in every STEPS_WITH-th step, so that the duration of a step without them can be measured.
# If a pass accepts any mixture of rows, background sequences pause in every second step until this duration is known.
STEPS_WITH = 8
# The number of steps between two shared steps, if background rows may need an additional pass. Background work then
# delays fewer than 1 in 100 tokens. The second value applies until the cost is known. It is smaller because background
# rows may turn out to be cheap.
BACKGROUND_STEPS_BETWEEN = 119
BACKGROUND_STEPS_UNTIL_KNOWN = 29
# The maximum number of background prompt tokens in a shared step. The limit also applies to a step with background
# sequences alone, if one of the last STEPS_ALONE steps had a foreground sequence. A request that arrives now should not
# wait for a long pass.
BACKGROUND_CHUNK = 128
STEPS_ALONE = 100
# A background token counts as at least this share of a step's time, even if the measured time is shorter.
_LEAST_COST = 0.001
_MOST_GROWTH = 2  # maximum growth factor of the background tokens from one shared step to the next
_ROWS_CHANGED = 0.25  # if foreground rows change by more than this fraction, old times of steps are dropped
_SAMPLES = 15
_FEWEST_SAMPLES = 5


class BackgroundTurn(Enum):
    """The part of a step that background sequences get while foreground sequences run."""

    NONE = auto()  # background sequences compute nothing, or they run alone
    SHARE = auto()  # a few tokens in the same pass as the foreground; the sequences with the longest wait come first
    DECODE = auto()  # one row of each decoding background sequence
    PREFILL = auto()  # the rows of DECODE, and a chunk of background prompts


class BackgroundPacer:
    """Decides which steps background sequences share with foreground sequences, and how large their part of a step is.

    If a pass accepts any rows, background sequences get a few tokens in nearly all steps, and a step takes at most
    MOST_LONGER times as long as without them. Otherwise background rows may need an additional pass. Background
    sequences then share few steps, or most steps if the measured cost of their rows is low.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._turn = BackgroundTurn.NONE
        self._is_mixed = False
        self._n_steps = 0  # number of steps with both foreground and background sequences
        self._steps_since_turn = BACKGROUND_STEPS_UNTIL_KNOWN
        self._steps_alone = STEPS_ALONE
        self._n_rows = 0  # foreground rows in the last step
        self._n_tokens = 1  # background tokens in a shared step
        self._without: deque[float] = deque(maxlen=_SAMPLES)  # seconds of steps without background tokens
        self._with: deque[float] = deque(maxlen=_SAMPLES)  # seconds of steps with background tokens
        self._costs: deque[float] = deque(maxlen=_SAMPLES)  # seconds for each background token

    def turn(self, n_foreground: int, n_background: int) -> BackgroundTurn:
        """Returns the part of this step that background sequences get. Call it once per step, before the other methods.

        Args:
            n_foreground, n_background: numbers of running sequences.
        """
        self._steps_alone = 0 if n_foreground else self._steps_alone + 1
        self._is_mixed = n_foreground > 0 and n_background > 0
        self._turn = self._next_turn() if self._is_mixed else BackgroundTurn.NONE
        return self._turn

    def _next_turn(self) -> BackgroundTurn:
        self._n_steps += 1
        if self._limits.packs_any:
            every = STEPS_WITH if len(self._without) >= _FEWEST_SAMPLES else 2
            return BackgroundTurn.NONE if self._n_steps % every == 0 else BackgroundTurn.SHARE
        cost_is_known = len(self._with) >= _FEWEST_SAMPLES
        self._steps_since_turn += 1
        if self._steps_since_turn > (BACKGROUND_STEPS_BETWEEN if cost_is_known else BACKGROUND_STEPS_UNTIL_KNOWN):
            self._steps_since_turn = 0
            return BackgroundTurn.PREFILL
        if self._steps_since_turn % STEPS_WITH != 0 and self._rows_are_cheap():
            return BackgroundTurn.DECODE
        return BackgroundTurn.NONE

    def _rows_are_cheap(self) -> bool:
        if min(len(self._with), len(self._without)) < _FEWEST_SAMPLES:
            return False
        return 0 < statistics.median(self._with) <= MOST_LONGER * statistics.median(self._without)

    def sharing(self, behind: abc.Iterable[Sequence]) -> list[Sequence]:
        """Returns the background sequences that share this step. Sequences with the longest wait are taken first, until
        their tokens reach the number of background tokens in a shared step."""
        chosen, left = [], self._n_tokens
        for sequence in sorted(behind, key=lambda s: s.last_step):
            if left <= 0:
                break
            chosen.append(sequence)
            left -= sequence.num_pending
        return chosen

    def chunk(self, n_rows: int, plain_s: float | None, token_s: float | None) -> int:
        """Returns the number of background prompt tokens in a shared step.

        In a turn of PREFILL, these tokens take no longer than a plain step, once `plain_s` and `token_s` are known.

        Args:
            n_rows: number of background sequences that decode in the step.
            plain_s, token_s: seconds of a step without prompt tokens, and of a prompt token; None: not known yet.
        """
        if self._turn is BackgroundTurn.SHARE:
            return max(1, self._n_tokens - n_rows)
        affordable = max(1, int(plain_s / token_s)) if plain_s and token_s else BACKGROUND_CHUNK
        return min(affordable, BACKGROUND_CHUNK, self._limits.n_batch)

    @property
    def alone_chunk(self) -> int:
        """The maximum number of prompt tokens in a step with background sequences only."""
        most = self._limits.prefill_budget
        return most if self._steps_alone >= STEPS_ALONE else min(most, BACKGROUND_CHUNK)

    def observe(self, seconds: float, n_rows: int, n_tokens: int) -> None:
        """Records the duration of this step. Call it only for steps without prompt tokens of foreground sequences.

        Args:
            n_rows: number of foreground sequences that decoded.
            n_tokens: number of background tokens that were computed.
        """
        if not self._is_mixed:
            return
        if self._limits.packs_any and abs(n_rows - self._n_rows) > _ROWS_CHANGED * self._n_rows:
            self._without.clear()
        self._n_rows = n_rows
        if n_tokens == 0:
            self._without.append(seconds)
            return
        self._with.append(seconds)
        if self._turn is BackgroundTurn.SHARE and len(self._without) >= _FEWEST_SAMPLES:
            plain = statistics.median(self._without)
            self._costs.append((seconds - plain) / n_tokens)
            if len(self._costs) >= _FEWEST_SAMPLES:
                cost = max(statistics.median(self._costs), _LEAST_COST * plain)
                affordable = int((MOST_LONGER - 1) * plain / cost)
                self._n_tokens = max(1, min(affordable, _MOST_GROWTH * n_tokens, BACKGROUND_CHUNK))
