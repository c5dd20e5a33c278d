"""Checks guessed tokens: each position is sampled as without guesses, and the guesses hold while they agree.

So the text is that of one token a step, sampled or greedy: a draw depends on its row, its request and its index alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llamabatch.sampling.sampler import NO_TOKEN, SamplerState, sample_rows
from llamabatch.scheduler.output import ScheduledSpan


def accepted_tokens(
    logits: npt.NDArray[np.float32], spans: Sequence[ScheduledSpan], draws: Sequence[SamplerState], n_threads: int
) -> list[tuple[int, ...]]:
    """The tokens that each span brings: its guesses as far as they hold, and the one that the sampler drew behind them.

    Args:
        logits: the rows of each span one after another: that of its known token, then those of its guesses.
        draws: one for each span, set to the first of its tokens.

    Returns:
        For each span 1 to 1 + len(draft) tokens; none where the first cannot be sampled. An end-of-generation token
        that was guessed does not end the run here: whoever takes the tokens stops at it.
    """
    chosen = _sample_alone(logits, spans, draws, n_threads)
    results, at = [], 0
    for span, draw in zip(spans, draws, strict=True):
        guesses, end = span.draft or (), at + 1 + len(span.draft or ())
        if draw.counts is None and draw.masks is None:
            results.append(_run(guesses, chosen[at:end]))
        else:
            results.append(_sample_in_turn(logits[at:end], guesses, draw, span.sequence.token_ids))
        at = end
    return results


def _sample_alone(
    logits: npt.NDArray[np.float32], spans: Sequence[ScheduledSpan], draws: Sequence[SamplerState], n_threads: int
) -> list[int]:
    """All rows at once, those behind a wrong guess in vain: rows cost microseconds, calls and copies as much."""
    each = []
    for span, draw in zip(spans, draws, strict=True):
        each.append(draw)
        each.extend(draw.later(number) for number in range(1, 1 + len(span.draft or ())))
    return sample_rows(logits, each, n_threads)


def _run(guesses: tuple[int, ...], chosen: list[int]) -> tuple[int, ...]:
    tokens = []
    for number, token in enumerate(chosen):
        if token == NO_TOKEN:
            break
        tokens.append(token)
        if number < len(guesses) and token != guesses[number]:
            break
    return tuple(tokens)


def _sample_in_turn(
    rows: npt.NDArray[np.float32], guesses: tuple[int, ...], draw: SamplerState, token_ids: list[int]
) -> tuple[int, ...]:
    """One position after another, for a request whose penalties count the tokens before, or whose masks depend on them.
    The counts and token_ids, which is prompt and output so far, are left as they were."""
    n_distinct = 0 if draw.counts is None else len(draw.counts.ids)
    first, n_known = draw.index, len(token_ids)
    tokens: list[int] = []
    try:
        for number in range(len(rows)):
            draw.index = first + number
            if number and draw.masks is not None:
                draw.mask = draw.masks.next(draw.index, token_ids)
            [token] = sample_rows(rows[number : number + 1], [draw])
            if token == NO_TOKEN:
                break
            tokens.append(token)
            if number == len(guesses) or token != guesses[number]:
                break
            if draw.counts is not None:
                draw.counts.add(token)
            token_ids.append(token)
    finally:
        if draw.counts is not None:
            draw.counts.take_back(token_ids[n_known:], n_distinct)
        del token_ids[n_known:]
        draw.index = first
    return tuple(tokens)
