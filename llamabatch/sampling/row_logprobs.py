"""Logprobs of the rows of a call, from the compiled helper or from numpy. The values are the same to 1e-6.

The runner uses this module only for calls in which a request asks for logprobs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llamabatch.request.logprobs import RowLogprobs
from llamabatch.request.sampling_params import MAX_LOGPROBS
from llamabatch.sampling import native
from llamabatch.sampling.numpy_sampler import top_of
from llamabatch.sampling.sampler import NO_TOKEN, SamplerState, distribution, sample_rows
from llamabatch.scheduler.output import ScheduledSpan

Floats = npt.NDArray[np.float32]

NEVER = -9999.0  # logprob of a token that could not be drawn, as in OpenAI's API: JSON has no -inf
_MANY = 64  # for more tokens, a sort of the row is faster than a comparison for each token


def sample_with_logprobs(
    logits: Floats, spans: Sequence[ScheduledSpan], states: Sequence[SamplerState], n_threads: int
) -> list[tuple[int | None, tuple[RowLogprobs, ...]]]:
    """Samples the last row of each span with an output, and computes the requested logprobs.

    Args:
        logits: the output rows of `spans` in order: for each span its prompt rows, then the row that is sampled.
        states: one for each span, in the state before the token to sample.

    Returns:
        For each span: its token (None without an output), and the logprobs of its rows in order.
    """
    ends = list(itertools.accumulate(span.prompt_rows + span.output for span in spans))
    sampled = {end - 1: state for end, span, state in zip(ends, spans, states, strict=True) if span.output}
    tokens = _sample_some(logits, sampled, n_threads)
    wanted: dict[int, tuple[int, int]] = {}  # row -> (token, number of likeliest tokens)
    for end, span in zip(ends, spans, strict=True):
        record, token = span.logprobs, tokens.get(end - 1)
        if record is None:
            continue
        first = end - span.output - span.prompt_rows
        for row, target in enumerate(record.targets(span.start + span.length, span.prompt_rows), first):
            wanted[row] = target, record.prompt_top
        if token is not None and token != NO_TOKEN and record.top is not None:
            wanted[end - 1] = token, record.top
    drawn = {
        end - 1: drawn_logprobs(logits[end - 1], state, *wanted.pop(end - 1), span.logprobs.others)
        for end, span, state in zip(ends, spans, states, strict=True)
        if span.logprobs is not None and span.logprobs.post_sampling and end - 1 in wanted and span.output
    }
    of_tokens, tops = [token for token, _ in wanted.values()], [top for _, top in wanted.values()]
    logprobs = dict(zip(wanted, row_logprobs(logits, list(wanted), of_tokens, tops, n_threads), strict=True))
    for end, span in zip(ends, spans, strict=True):
        if span.logprobs is not None and span.logprobs.others and span.output and end - 1 in logprobs:
            logprobs[end - 1] = _with_others(logprobs[end - 1], logits[end - 1], span.logprobs.others)
    logprobs |= drawn
    results = []
    for end, span in zip(ends, spans, strict=True):
        rows = range(end - span.output - span.prompt_rows, end)
        results.append((tokens.get(end - 1), tuple(logprobs[row] for row in rows if row in logprobs)))
    return results


def accepted_logprobs(
    logits: Floats,
    spans: Sequence[ScheduledSpan],
    states: Sequence[SamplerState],
    accepted: Sequence[tuple[int, ...]],
    n_threads: int,
) -> list[tuple[RowLogprobs, ...]]:
    """Returns the logprobs of each span's accepted tokens, for a call with guesses. A span has () if its request asks
    for no logprobs.

    Args:
        logits: the rows of all spans in order: for each span the row of its known token, then the rows of its guesses.
        states: one for each span, at its first new token.
    """
    found: list[tuple[RowLogprobs, ...]] = []
    first = 0
    for span, state, tokens in zip(spans, states, accepted, strict=True):
        record = span.logprobs
        if record is None or record.top is None:
            found.append(())
        elif record.post_sampling:  # such a span has no guesses and at most one token
            found.append(tuple(drawn_logprobs(logits[first], state, t, record.top, record.others) for t in tokens))
        else:
            rows = range(first, first + len(tokens))
            of_tokens = row_logprobs(logits, rows, tokens, [record.top] * len(tokens), n_threads)
            if record.others:
                of_tokens = [
                    _with_others(one, logits[row], record.others) for one, row in zip(of_tokens, rows, strict=True)
                ]
            found.append(tuple(of_tokens))
        first += 1 + len(span.draft or ())
    return found


def _sample_some(logits: Floats, states: dict[int, SamplerState], n_threads: int) -> dict[int, int]:
    """Returns the token of each row that has a state. Samples neighbouring rows in one call, without a copy."""
    tokens: dict[int, int] = {}
    for _, run in itertools.groupby(enumerate(states), key=lambda pair: pair[1] - pair[0]):
        rows = [row for _, row in run]
        chosen = sample_rows(logits[rows[0] : rows[-1] + 1], [states[row] for row in rows], n_threads)
        tokens.update(zip(rows, chosen, strict=True))
    return tokens


def row_logprobs(
    logits: Floats, rows: Sequence[int], tokens: Sequence[int], tops: Sequence[int], n_threads: int = 1
) -> list[RowLogprobs]:
    """Returns for each of `rows` the logprobs of one token and of the likeliest tokens. A row has no logprobs if its
    logits are not numbers.

    Args:
        logits: shape (rows of the call, vocabulary), float32, read in place.
        rows: indices of rows, in any order.
        tokens: one token for each row.
        tops: number of likeliest tokens for each row. Tokens of probability 0 are left out. -1: no likeliest tokens;
            the rank is not computed, and is 0.
        n_threads: maximum number of threads of the compiled helper. It uses more than one thread only with OpenMP and
            enough rows.
    """
    if native.available():
        if max(tops, default=0) > MAX_LOGPROBS:  # for the whole vocabulary, one row at a time saves memory
            return [
                RowLogprobs(*found)
                for row, token, top in zip(rows, tokens, tops, strict=True)
                for found in native.row_logprobs(logits, [row], [token], [top], n_threads)
            ]
        return [RowLogprobs(*found) for found in native.row_logprobs(logits, rows, tokens, tops, n_threads)]
    return [_row_logprobs(logits[row], token, top) for row, token, top in zip(rows, tokens, tops, strict=True)]


def drawn_logprobs(row: Floats, state: SamplerState, token: int, top: int, others: tuple[int, ...] = ()) -> RowLogprobs:
    """Returns the logprobs of `token`, of the likeliest tokens and of `others`. They refer to the distribution from
    which tokens are drawn.

    Args:
        state: the sequence's state before `token` is sampled.
        token, top: as in row_logprobs.
        others: ids of further tokens.
    """
    ids, probabilities = distribution(row, state)
    order = np.lexsort((ids, -probabilities))
    order = order[probabilities[order] > 0.0]
    likeliest, values = ids[order], np.log(probabilities[order])

    def of(token_id: int) -> tuple[float, int]:
        places = np.flatnonzero(likeliest == token_id)
        return (float(values[places[0]]), int(places[0]) + 1) if len(places) else (NEVER, len(likeliest) + 1)

    logprob, rank = of(token)
    shown = max(0, top)
    return RowLogprobs(
        [token, *likeliest[:shown].tolist()],
        [logprob, *values[:shown].tolist()],
        rank if top >= 0 else 0,
        tuple((other, *of(other)) for other in others),
    )


def _row_logprobs(row: Floats, token: int, top: int) -> RowLogprobs:
    largest = row.max()
    if not -np.inf < largest <= np.finfo(np.float32).max:  # also true with a NaN, because `max` then returns NaN
        return RowLogprobs((), (), 0)
    ids: list[int] = [token]
    if top > 0:
        ids += top_of(row, top).tolist()
    return RowLogprobs(ids, _logprobs(row, largest, ids), _rank(row, token) if top >= 0 else 0)


def _with_others(found: RowLogprobs, row: Floats, others: tuple[int, ...]) -> RowLogprobs:
    """Adds logprobs and ranks of further tokens to a row's logprobs. Returns `found` unchanged if the logits are not
    numbers."""
    if not found.token_ids:
        return found
    ids = list(others)
    if len(ids) > _MANY:
        places = np.empty(len(row), np.int64)
        places[np.argsort(-row, kind="stable")] = np.arange(1, len(row) + 1)
        ranks = places[ids].tolist()
    else:
        ranks = [_rank(row, token) for token in ids]
    return found._replace(others=tuple(zip(others, _logprobs(row, row.max(), ids), ranks, strict=True)))


def _logprobs(row: Floats, largest: np.float32, ids: list[int]) -> list[float]:
    with np.errstate(over="ignore"):
        whole = np.log(np.exp(row - largest).sum(dtype=np.float64))
    logprobs: list[float] = (row[ids].astype(np.float64) - float(largest) - whole).tolist()
    return logprobs


def _rank(row: Floats, token: int) -> int:
    value = row[token]
    return 1 + int((row > value).sum() + (row[:token] == value).sum())
