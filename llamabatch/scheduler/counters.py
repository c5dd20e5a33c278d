"""What an engine counts of the continuations that it computes, while it computes them. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llamabatch.request.outputs import FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.sequence import Sequence
from llamabatch.utils.histogram import Tally


class RequestCounts:
    """Requests taken in, and how they ended; the attributes are those of EngineStats."""

    def __init__(self) -> None:
        self.submitted = 0
        self.finished_stop = 0
        self.finished_length = 0
        self.errors = 0
        self.aborted = 0
        self._e2e = Tally()

    def note(self, outputs: Iterable[SequenceOutput]) -> None:
        """Some of these may be the last of their request."""
        for output in outputs:
            if output.finished is not None:
                self._ended(output.finished)

    def _ended(self, output: RequestOutput) -> None:
        """Of several continuations the first decides, unless one failed."""
        reason = output.finish_reason
        if output.error is not None or reason is FinishReason.ERROR:
            self.errors += 1
            return
        if reason is FinishReason.ABORT:
            self.aborted += 1
            return
        if reason is FinishReason.STOP:
            self.finished_stop += 1
        else:
            self.finished_length += 1
        self._e2e.add(output.timings.total_s)

    def figures(self) -> dict[str, Any]:
        """Fields of EngineStats."""
        counts = {name: value for name, value in vars(self).items() if name != "_e2e"}
        return {**counts, "e2e_s": self._e2e.histogram()}


class SequenceCounters:
    """Tokens and durations. The methods are for the engine's thread; whoever reads meanwhile sees a part of a step.

    Most rows of a step continue what had its last token in the step before, so that one gap is that of all of them: it
    is looked up once a step.

    Attributes:
        prompt_tokens, generated_tokens: as in EngineStats.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._queue = Tally()
        self._ttft = Tally()
        self._inter_token = Tally()
        self._last_s: float | None = None  # when the last step's tokens were known
        self._n_alike = 0  # rows of this step that had one then

    def entered(self, sequence: Sequence, now: float) -> None:
        """It has its first slot."""
        self.prompt_tokens += sequence.num_prompt
        self._queue.add(now - sequence.request.arrival_s)

    def took(self, sequence: Sequence, n: int, before: float | None, now: float) -> None:
        """It has `n` more tokens, all known now.

        Args:
            before: when its last token before them was known.
        """
        self.generated_tokens += n
        if before is None:
            self._ttft.add(now - sequence.request.arrival_s)
        elif before == self._last_s:
            self._n_alike += 1
        else:
            self._inter_token.add(now - before)
        if n > 1:  # guesses that held came at once
            self._inter_token.add(0.0, n - 1)

    def stepped(self, now: float) -> None:
        """A step's tokens have all been told."""
        if self._n_alike:
            assert self._last_s is not None
            self._inter_token.add(now - self._last_s, self._n_alike)
            self._n_alike = 0
        self._last_s = now

    def figures(self) -> dict[str, Any]:
        """Fields of EngineStats."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "queue_s": self._queue.histogram(),
            "ttft_s": self._ttft.histogram(),
            "inter_token_s": self._inter_token.histogram(),
        }
