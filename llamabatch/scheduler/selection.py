"""Selection of the running sequences that compute in one step. Pure Python."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from functools import cached_property

from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.background import BackgroundTurn


@dataclass(frozen=True)
class Selection:
    """Running sequences that compute in one step, by the kind of call that computes them.

    Attributes:
        runnable: sequences that the policy lets compute. None of them waits for a prefix; all are of one adapter set.
        foreground: running sequences that are not background; all of them where there are no others.
        background: part of the step that background sequences have beside the foreground ones.
        rotates_adapters: requests in flight use adapters, so that adapter sets take turns.
        packs_rows: one pass computes decode rows and prompt chunks together, so that a row beside prompts costs about
            as much as one more prompt token.
    """

    runnable: abc.Sequence[Sequence]
    foreground: abc.Sequence[Sequence]
    background: BackgroundTurn
    rotates_adapters: bool
    packs_rows: bool

    @cached_property
    def is_background(self) -> bool:
        """True if only background sequences run."""
        return bool(self.foreground) and self.foreground[0].background

    @cached_property
    def token_is_awaited(self) -> bool:
        """True if a caller waits for the next token of a foreground sequence, so that prefill must not block decode.

        Where all sequences belong to one generate() call, its caller sees nothing before the last one ends.
        """
        if not any(s.num_pending == 1 and not s.scores for s in self.foreground):
            return False
        first = self.foreground[0].request.group
        return any(s.request.group != first for s in self.foreground)

    @cached_property
    def is_streamed(self) -> bool:
        """True if the caller of a decoding foreground sequence reads each of its tokens as it comes."""
        return any(s.streamed for s in self.foreground if s.num_pending == 1 and not s.scores)

    @cached_property
    def prompts(self) -> list[Sequence]:
        """Sequences with prompt tokens to compute, but for background ones that share the step."""
        return [s for s in self._prefilling if not self._shares_step(s)]

    @cached_property
    def background_prompts(self) -> list[Sequence]:
        """Sequences with prompt tokens to compute that share the step with foreground ones."""
        computes_prompts = self.background in (BackgroundTurn.SHARE, BackgroundTurn.PREFILL)
        return [s for s in self._prefilling if s.background] if computes_prompts else []

    @cached_property
    def decoding(self) -> list[Sequence]:
        """Sequences that compute one row each.

        While no caller waits for a token and rows would need a pass of their own, foreground sequences pause until all
        prompts are computed, so that each later pass serves as many rows as there are slots.
        """
        decoding = [s for s in self.runnable if s.num_pending == 1 and not s.scores]
        if self.prompts and not self.packs_rows and not self.token_is_awaited:
            return [s for s in decoding if self._shares_step(s)]
        return decoding

    @cached_property
    def n_foreground_rows(self) -> int:
        """Decoding sequences but for background ones that share the step."""
        return sum(not self._shares_step(s) for s in self.decoding)

    @cached_property
    def _prefilling(self) -> list[Sequence]:
        return [s for s in self.runnable if s.num_pending > 1 or s.scores]

    def _shares_step(self, sequence: Sequence) -> bool:
        return sequence.background and self.background is not BackgroundTurn.NONE


NOTHING = Selection((), (), BackgroundTurn.NONE, rotates_adapters=False, packs_rows=False)
