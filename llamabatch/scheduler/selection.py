"""Selection of the running sequences that compute in one step. Pure Python."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.background import BackgroundTurn


@dataclass(slots=True)
class Selection:
    """Running sequences that compute in one step, by the kind of call that computes them.

    The first five attributes are given. All further attributes are derived from them.

    Attributes:
        runnable: sequences that the policy lets compute. None of them waits for a prefix, and all have the same adapter
            set.
        foreground: running sequences that are not background, or all running sequences if all are background.
        background: part of the step that background sequences get while foreground sequences run.
        rotates_adapters: True if requests in flight use adapters. Adapter sets then take turns.
        packs_rows: True if one pass computes decode rows and prompt chunks together. A row then costs about as much as
            one more prompt token.
        is_background: True if only background sequences run.
        token_is_awaited: True if a caller waits for the next token of a foreground sequence, so that prefill must not
            block decode. False if all sequences belong to one generate() call, because its caller sees no token before
            the last sequence ends.
        is_streamed: True if the caller of a decoding foreground sequence reads each of its tokens as it comes.
        prompts: sequences with prompt tokens to compute, except background sequences that share the step.
        background_prompts: background sequences with prompt tokens to compute, if they share the step with foreground
            sequences.
        decoding: sequences that compute one row each. If no caller waits for a token and rows would need a separate
            pass, foreground sequences pause until all prompts are computed. Later passes then have a row for each slot.
        n_foreground_rows: number of decoding sequences, except background sequences that share the step.
    """

    runnable: abc.Sequence[Sequence]
    foreground: abc.Sequence[Sequence]
    background: BackgroundTurn
    rotates_adapters: bool
    packs_rows: bool
    is_background: bool = field(init=False)
    token_is_awaited: bool = field(init=False, default=False)
    is_streamed: bool = field(init=False, default=False)
    prompts: list[Sequence] = field(init=False, default_factory=list)
    background_prompts: list[Sequence] = field(init=False, default_factory=list)
    decoding: list[Sequence] = field(init=False, default_factory=list)
    n_foreground_rows: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        # these are loops, because properties and comprehensions would cost a Python call for each row of each step
        sequences = self.foreground
        self.is_background = bool(sequences) and sequences[0].background
        decodes = False
        for each in sequences:
            if each.num_pending == 1 and not each.scores:
                decodes = True
                if each.streamed:
                    self.is_streamed = True
                    break
        if decodes:
            first = sequences[0].request.group
            for each in sequences:
                if each.request.group != first:
                    self.token_is_awaited = True
                    break
        shares = self.background is not BackgroundTurn.NONE
        computes_prompts = self.background in (BackgroundTurn.SHARE, BackgroundTurn.PREFILL)
        rows, shared_rows = [], []
        for each in self.runnable:
            pending = each.num_pending
            if pending > 1 or each.scores:
                if not (shares and each.background):
                    self.prompts.append(each)
                elif computes_prompts:
                    self.background_prompts.append(each)
            elif pending == 1:
                rows.append(each)
                if shares and each.background:
                    shared_rows.append(each)
        pauses = bool(self.prompts) and not self.packs_rows and not self.token_is_awaited
        self.decoding = shared_rows if pauses else rows
        self.n_foreground_rows = len(self.decoding) - len(shared_rows)
