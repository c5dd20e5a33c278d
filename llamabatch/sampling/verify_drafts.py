"""Verifies guessed tokens. Samples each position as if there were no guesses, and accepts guesses while they equal the
samples.

Guesses do not change the text, sampled or greedy, because a token depends only on its row, its request and its index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llamabatch.sampling.sampler import NO_TOKEN, SamplerState, sample_rows
from llamabatch.scheduler.output import ScheduledSpan


def accepted_tokens(
    logits: npt.NDArray[np.float32], spans: Sequence[ScheduledSpan], states: Sequence[SamplerState], n_threads: int
) -> list[tuple[int, ...]]:
    """Returns the new tokens of each span: the accepted guesses, then one sampled token.

    Args:
        logits: the rows of all spans in order: for each span the row of its known token, then the rows of its guesses.
        states: one for each span, at its first new token.

    Returns:
        For each span 1 to 1 + len(draft) tokens; no tokens if the first one cannot be sampled. Tokens after a guessed
        end-of-generation token are included, but the sequence drops them.
    """
    chosen = _sample_at_once(logits, spans, states, n_threads)
    results, at = [], 0
    for span, state in zip(spans, states, strict=True):
        guesses, end = span.draft or (), at + 1 + len(span.draft or ())
        if state.counts is None and state.masks is None and state.reasoning is None:
            results.append(_run(guesses, chosen[at:end]))
        else:
            results.append(_sample_in_turn(logits[at:end], guesses, state, span.token_ids))
        at = end
    return results


def _sample_at_once(
    logits: npt.NDArray[np.float32], spans: Sequence[ScheduledSpan], states: Sequence[SamplerState], n_threads: int
) -> list[int]:
    """Samples all rows in one call, also the rows after a wrong guess, because a second call would cost at least as
    much."""
    each = []
    for span, state in zip(spans, states, strict=True):
        each.append(state)
        each.extend(state.later(number) for number in range(1, 1 + len(span.draft or ())))
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
    rows: npt.NDArray[np.float32], guesses: tuple[int, ...], state: SamplerState, token_ids: list[int]
) -> tuple[int, ...]:
    """Samples one position after another. A request needs this for penalties, masks or a thinking budget, because these
    depend on the previous tokens. `token_ids` contains the prompt and the output so far. The state and `token_ids` are
    restored at the end."""
    counts, first, n_known = state.counts, state.index, len(token_ids)
    n_distinct, n_counted = (0, 0) if counts is None else (len(counts.ids), counts.num_output)
    tokens: list[int] = []
    try:
        for number in range(len(rows)):
            if number:
                state.advance(first + number, token_ids)
            [token] = sample_rows(rows[number : number + 1], [state])
            if token == NO_TOKEN:
                break
            tokens.append(token)
            if number == len(guesses) or token != guesses[number]:
                break
            token_ids.append(token)
    finally:
        if counts is not None:
            counts.take_back(token_ids[n_known : n_known + counts.num_output - n_counted], n_distinct)
        del token_ids[n_known:]
        state.index = first
    return tuple(tokens)
