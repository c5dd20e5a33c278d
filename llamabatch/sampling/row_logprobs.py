"""Logprobs of rows of a call, for those sequences that asked: compiled, or in numpy with the same values to 1e-6.

Where nobody of a call asked, the runner does not come here.
"""

from __future__ import annotations

import itertools
from collections import abc
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from llamabatch.request.logprobs import RowLogprobs
from llamabatch.request.sequence import Sequence
from llamabatch.sampling import native
from llamabatch.sampling.numpy_sampler import top_of
from llamabatch.sampling.sampler import NO_TOKEN, SamplerState, sample_rows
from llamabatch.scheduler.output import ScheduledSpan

Floats = npt.NDArray[np.float32]


def sample_and_tell(
    logits: Floats, outputs: abc.Sequence[ScheduledSpan], draw_of: Callable[[Sequence], SamplerState], n_threads: int
) -> list[tuple[int | None, tuple[RowLogprobs, ...]]]:
    """Samples the rows of a call that are to be sampled, and reads the logprobs that its sequences ask for.

    Args:
        logits: the output rows of the call, which are those of `outputs` in order: of each its prompt rows, then the
            one that is sampled.

    Returns:
        For each of `outputs` its token, None where it samples none, and what is told of its rows, in their order.
    """
    ends = list(itertools.accumulate(span.prompt_rows + span.output for span in outputs))
    draws = {end - 1: draw_of(span.sequence) for end, span in zip(ends, outputs, strict=True) if span.output}
    tokens = _sample_some(logits, draws, n_threads)
    asked: dict[int, tuple[int, int]] = {}  # row -> token, how many likeliest
    for end, span in zip(ends, outputs, strict=True):
        record, token = span.sequence.logprobs, tokens.get(end - 1)
        if record is None:
            continue
        first = end - span.output - span.prompt_rows
        for row, target in enumerate(record.targets(span.start + span.length, span.prompt_rows), first):
            asked[row] = target, record.prompt_top
        if token is not None and token != NO_TOKEN and record.top is not None:
            asked[end - 1] = token, record.top
    of_tokens, tops = [token for token, _ in asked.values()], [top for _, top in asked.values()]
    told = dict(zip(asked, row_logprobs(logits, list(asked), of_tokens, tops, n_threads), strict=True))
    results = []
    for end, span in zip(ends, outputs, strict=True):
        rows = range(end - span.output - span.prompt_rows, end)
        results.append((tokens.get(end - 1), tuple(told[row] for row in rows if row in told)))
    return results


def tell_accepted(
    logits: Floats, spans: abc.Sequence[ScheduledSpan], accepted: abc.Sequence[tuple[int, ...]], n_threads: int
) -> dict[int, tuple[RowLogprobs, ...]]:
    """Of a call that checked guesses: for each span that asks, by its id(), what is told of its accepted tokens.

    Args:
        logits: the rows of each span one after another: that of its known token, then those of its guesses.
    """
    told: dict[int, tuple[RowLogprobs, ...]] = {}
    first = 0
    for span, tokens in zip(spans, accepted, strict=True):
        record = span.sequence.logprobs
        if record is not None and record.top is not None:
            rows = range(first, first + len(tokens))
            told[id(span)] = tuple(row_logprobs(logits, rows, tokens, [record.top] * len(tokens), n_threads))
        first += 1 + len(span.draft or ())
    return told


def _sample_some(logits: Floats, draws: dict[int, SamplerState], n_threads: int) -> dict[int, int]:
    """The token of each row that has a draw; rows side by side are sampled in one go, where they lie."""
    tokens: dict[int, int] = {}
    for _, run in itertools.groupby(enumerate(draws), key=lambda pair: pair[1] - pair[0]):
        rows = [row for _, row in run]
        chosen = sample_rows(logits[rows[0] : rows[-1] + 1], [draws[row] for row in rows], n_threads)
        tokens.update(zip(rows, chosen, strict=True))
    return tokens


def row_logprobs(
    logits: Floats, rows: abc.Sequence[int], tokens: abc.Sequence[int], tops: abc.Sequence[int], n_threads: int = 1
) -> list[RowLogprobs]:
    """For each wanted row the logprob of one token, and of the likeliest ones; without any where the logits are no
    numbers.

    Args:
        logits: shape (rows of the call, vocabulary), float32, read in place.
        rows: which rows, in any order.
        tokens: the token of each of them that is asked about.
        tops: how many likeliest tokens come after it, at most the vocabulary; tokens of probability 0 do not. With -1
            the rank of the first is not looked for, and 0.
        n_threads: for the compiled helper, where it has OpenMP and the rows are worth it.
    """
    if native.available():
        return [RowLogprobs(*found) for found in native.row_logprobs(logits, rows, tokens, tops, n_threads)]
    return [_row_logprobs(logits[row], token, top) for row, token, top in zip(rows, tokens, tops, strict=True)]


def _row_logprobs(row: Floats, token: int, top: int) -> RowLogprobs:
    largest = row.max()
    if not -np.inf < largest <= np.finfo(np.float32).max:  # a NaN too: `max` hands it on
        return RowLogprobs((), (), 0)
    with np.errstate(over="ignore"):
        whole = np.log(np.exp(row - largest).sum(dtype=np.float64))
    ids: list[int] = [token]
    rank = 0
    if top >= 0:
        value = row[token]
        rank = 1 + int((row > value).sum() + (row[:token] == value).sum())
        ids += top_of(row, top).tolist() if top else []
    return RowLogprobs(ids, (row[ids].astype(np.float64) - float(largest) - whole).tolist(), rank)
