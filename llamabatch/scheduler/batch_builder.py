"""Packs rows into calls so that llama.cpp needs few passes over the weights. Pure functions.

With a split KV cache, a pass needs consecutive seq ids with equally many tokens each (llama-batch.cpp, split_equal).
With a unified cache, or with the patched build's ragged passes, a pass accepts any tokens up to n_ubatch
(Limits.packs_any).
"""

from __future__ import annotations

import itertools
from collections import abc
from collections.abc import Iterable, Iterator
from types import MappingProxyType

from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.output import Call, Limits, ScheduledSpan

# Dummy rows fill gaps of at most this many idle slots. Without dummy rows, a gap cuts the call in two, and the second
# part needs another pass over the weights. A row costs about a tenth of a pass (0.5B Q8_0: 23 ms with 1 row, 95 ms with
# 32).
MAX_DUMMY_GAP = 8
# Prompt chunks up to this length share a call even if their lengths differ, because a separate pass would cost more.
SHORT_CHUNK = 16
# A sequence moves into a hole in the slot ids if it may still run for this many steps. A move costs as much as 1 to 15
# dummy rows. With 0.5B Q8_0, a move takes 2 ms with slots of 512 cells and 15 to 35 ms with 4,096, and a dummy row
# takes 2.3 ms.
MIN_STEPS_TO_MOVE = 16


def decode_calls(
    sequences: abc.Sequence[Sequence], occupied: abc.Set[int], limits: Limits, max_gap: int = MAX_DUMMY_GAP
) -> list[Call]:
    """Returns a list with one call, which has a row for each sequence. The list is empty if there are no sequences.
    Dummy rows fill holes in the slot ids where they cost less than a separate pass.

    Args:
        occupied: slots that contain cells. A dummy row there would widen the attention of all rows.
        max_gap: maximum number of slots in a hole that is filled.
    """
    spans = decode_spans(sequences)
    return [Call(tuple(spans), _dummies(spans, occupied, limits, max_gap))] if spans else []


def decode_spans(sequences: Iterable[Sequence]) -> list[ScheduledSpan]:
    """Returns spans with the next token of each sequence, in slot order."""
    return sorted((_span(s, 1) for s in sequences), key=lambda span: span.slot)


def verify_call(
    sequences: abc.Sequence[Sequence],
    drafts: abc.Sequence[abc.Sequence[int]],
    n_guesses: int,
    occupied: abc.Set[int],
    limits: Limits,
) -> Call:
    """Returns a decode call with up to `n_guesses` guessed tokens after each row.

    If a pass needs equally many tokens of each sequence, shorter drafts are padded.
    """
    spans = []
    for sequence, draft in zip(sequences, drafts, strict=True):
        guesses = tuple(draft[:n_guesses])
        length = 1 + (len(guesses) if limits.packs_any else n_guesses)
        spans.append(_span(sequence, 1)._replace(length=length, draft=guesses))
    spans.sort(key=lambda span: span.slot)
    return Call(tuple(spans), _dummies(spans, occupied, limits), n_guesses)


def prefill_calls(
    sequences: abc.Sequence[Sequence],
    budget: int,
    limits: Limits,
    stops: abc.Mapping[Sequence, int] = MappingProxyType({}),
) -> list[Call]:
    """Returns calls with prompt chunks of up to `budget` tokens in all, or more if a picture would not fit otherwise.
    Earlier sequences in `sequences` come first.

    Chunks of the same length in neighbouring slots share a call. A chunk with many output rows is cut into several
    chunks, because the number of output rows in a call is limited.

    llama.cpp cuts a call of unequal chunks into many passes of few tokens each. It cuts a call larger than n_ubatch
    into passes with a few tokens of every sequence. Both kinds of call run at half the speed or less. A call has token
    ids or embeddings, never both (llama-batch.cpp), so a chunk ends where a picture begins or ends.

    Args:
        stops: sequence -> the maximum token count at the end of its chunk.
    """
    spans: list[ScheduledSpan] = []
    for sequence in sequences:
        count = min(sequence.num_pending, budget, sequence.num_room)
        if sequence in stops:
            count = min(count, stops[sequence] - sequence.num_computed)
        if count == 0:
            break
        media = None
        if sequence.media_runs:
            count, media = sequence.next_piece(count)
        budget = max(0, budget - count)
        if media is not None:
            spans.append(_span(sequence, count)._replace(media=media))
        else:
            spans += [_span(sequence, count)] if sequence.logprobs is None else _pieces(sequence, count, limits)
    return group_spans(spans, limits)


def group_spans(spans: abc.Sequence[ScheduledSpan], limits: Limits) -> list[Call]:
    """Groups chunks of prompts into calls; see prefill_calls."""
    spans = sorted(spans, key=lambda span: (span.slot, span.start))
    groups: list[list[ScheduledSpan]] = []
    for span in spans:
        if groups and _fits(groups[-1], span, limits):
            groups[-1].append(span)
        else:
            groups.append([span])
    return [Call(tuple(group)) for group in groups]


def joined(calls: list[Call], limits: Limits) -> list[Call]:
    """Joins decode rows and the first prompt chunks into one call if one pass can compute both. Then the weights are
    read only once for both.

    Args:
        calls: the calls of a step; a call with decode rows comes first.
    """
    if not limits.packs_any or len(calls) < 2 or calls[0].n_guesses:
        return calls
    first, second, *rest = calls
    if first.media is not None or second.media is not None:
        return calls
    spans = sorted(first.spans + second.spans, key=lambda span: span.slot)
    if (
        first.adapters != second.adapters
        or sum(span.length for span in spans) > limits.n_ubatch
        or not _rows_fit(spans, limits)
        or len({span.slot for span in spans}) < len(spans)  # a later piece of the same prompt needs a separate call
    ):
        return calls
    return joined([Call(tuple(spans)), *rest], limits)


def moves(
    sequences: Iterable[Sequence], free: Iterable[int], *, up: bool = False, min_steps: int = MIN_STEPS_TO_MOVE
) -> list[tuple[Sequence, int]]:
    """Returns the sequences to move, each with its new slot. The moves bring the sequences into neighbouring slots, so
    that they need only one pass.

    Args:
        up: True: the sequences in the lowest slots move up. False: the sequences in the highest slots move down.
        min_steps: a sequence moves only if it may still run for this many steps.
    """
    at = {s.slot: s for s in sequences if s.slot is not None}
    if not at or max(at) - min(at) < len(at):
        return []
    final = range(max(at), max(at) - len(at), -1) if up else range(min(at), min(at) + len(at))
    free = set(free)
    holes = iter([slot for slot in final if slot not in at and slot in free])
    misplaced = [at[slot] for slot in sorted(at, reverse=not up) if slot not in final]
    movable = [s for s in misplaced if s.num_pending == 1 and s.most_steps_left >= min_steps]
    return list(zip(movable, holes, strict=False))


def _dummies(
    spans: list[ScheduledSpan], occupied: abc.Set[int], limits: Limits, max_gap: int = MAX_DUMMY_GAP
) -> tuple[int, ...]:
    dummies: list[int] = []
    has_holes = spans[-1].slot - spans[0].slot >= len(spans)
    if has_holes and limits.can_pad and not limits.packs_any:
        for left, right in itertools.pairwise(span.slot for span in spans):
            gap = range(left + 1, right)
            if len(gap) <= max_gap and occupied.isdisjoint(gap):
                dummies.extend(gap)
    return tuple(dummies)


def _fits(group: list[ScheduledSpan], span: ScheduledSpan, limits: Limits) -> bool:
    """True if a prompt chunk may share a call with the group before it."""
    if sum(s.length for s in group) + span.length > limits.n_ubatch or span.slot == group[-1].slot:
        return False
    if span.media is not None or group[0].media is not None:
        return False
    if not _rows_fit([*group, span], limits):
        return False
    alike = group[0].length == span.length or max(group[0].length, span.length) <= SHORT_CHUNK
    return limits.packs_any or (alike and span.slot == group[-1].slot + 1)


def _rows_fit(spans: abc.Sequence[ScheduledSpan], limits: Limits) -> bool:
    """True if a call may have the output rows of these spans. The limit is one row for each span, or Limits.prompt_rows
    if that is more."""
    return sum(span.prompt_rows + span.output for span in spans) <= max(limits.prompt_rows, len(spans))


def _span(sequence: Sequence, count: int) -> ScheduledSpan:
    assert sequence.slot is not None
    start = sequence.num_computed
    end, record = start + count, sequence.logprobs
    rows = 0 if record is None else record.rows_of(start, end)
    shift, output = sequence.num_discarded, end == len(sequence.token_ids) and not sequence.scores
    return ScheduledSpan(sequence, sequence.slot, start - shift, count, output, None, rows, shift)


def _pieces(sequence: Sequence, count: int, limits: Limits) -> Iterator[ScheduledSpan]:
    """Yields the next `count` tokens of a sequence in chunks. A chunk has at most Limits.prompt_rows prompt rows."""
    whole, record = _span(sequence, count), sequence.logprobs
    assert record is not None
    start = whole.start + whole.shift
    end = start + count
    while start < end:
        # The prompt rows are read from next_row on. Only the last chunk may also have a sampled row.
        stop = min(end, max(start, record.next_row) + limits.prompt_rows) if record.rows_of(start, end) else end
        output, at = stop == end and whole.output, start - whole.shift
        yield whole._replace(start=at, length=stop - start, output=output, prompt_rows=record.rows_of(start, stop))
        start = stop
