"""A llama_batch over numpy arrays, so that it can be filled without a Python loop over tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from llamabatch.llama.positions import SlotPositions
from llamabatch.scheduler.output import Call, ScheduledSpan

_OF_PROMPT = 2  # added to the output mark (0 or 1) of a row with a prompt token (llama.h, LLAMA_ROW_PROMPT)


class Batch:
    """A llama_batch with room for n_batch tokens. The C struct from `fill` is valid until the next fill.

    Args:
        positions: converts cells to positions; None if no cells share a position.
        marks_prompts: mark the prompt tokens. llama.cpp may have special kernels for them (library.takes_prompts).
    """

    def __init__(
        self, lib: ModuleType, n_batch: int, positions: SlotPositions | None = None, marks_prompts: bool = False
    ) -> None:
        self._cells = SlotPositions() if positions is None else positions
        self._marks_prompts = marks_prompts
        self._tokens = np.zeros(n_batch, np.int32)
        self._positions = np.zeros(n_batch, np.int32)
        self._slots = np.zeros(n_batch, np.int32)
        self._ones = np.ones(n_batch, np.int32)
        self._outputs = np.zeros(n_batch, np.int8)
        # seq_id is an array with one pointer per token. Each pointer always points to the token's place in _slots.
        start, width = self._slots.ctypes.data, self._slots.itemsize
        self._slot_pointers = start + width * np.arange(n_batch, dtype=np.uintp)
        self._struct = lib.llama_batch(
            token=_pointer(self._tokens, ctypes.c_int32),
            pos=_pointer(self._positions, ctypes.c_int32),
            n_seq_id=_pointer(self._ones, ctypes.c_int32),
            seq_id=ctypes.cast(self._slot_pointers.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=_pointer(self._outputs, ctypes.c_int8),
        )

    def fill(self, call: Call) -> tuple[Any, list[ScheduledSpan]]:
        """Returns the C struct of a call, and the spans that have output rows, in the order of the rows."""
        if call.is_decode and (call.is_padded or not call.dummy_slots):
            return self._fill_rows(call)
        at = 0
        outputs = []
        starts = dict(call.dummies)
        for slot, span in _in_slot_order(call):
            count = 1 + call.n_guesses if span is None else span.length
            end = at + count
            self._slots[at:end] = slot
            self._outputs[at:end] = 0
            if span is None:  # dummy rows have any token; their positions follow the slot's last cell
                self._tokens[at:end] = 0
                self._positions[at:end] = self._cells.of(slot, starts[slot]) + np.arange(count)
            elif span.draft is not None:
                self._fill_draft(at, span, span.draft)
                outputs.append(span)
            else:
                self._tokens[at:end] = span.first_token if count == 1 else span.tokens
                start = self._cells.of(slot, span.start) if self._cells else span.start
                self._positions[at:end] = start if count == 1 else np.arange(start, start + count)
                if span.output or span.prompt_rows:
                    self._outputs[end - span.output - span.prompt_rows : end] = 1
                    outputs.append(span)
            if self._marks_prompts and span is not None:
                self._outputs[at : at + _n_of_prompt(span)] += _OF_PROMPT
            at = end
        self._struct.n_tokens = at
        return self._struct, outputs

    def _fill_draft(self, at: int, span: ScheduledSpan, draft: tuple[int, ...]) -> None:
        """Fills a span with its known token, the guesses, and then dummy tokens without output."""
        known, end = at + 1 + len(draft), at + span.length
        self._tokens[at] = span.first_token
        self._tokens[at + 1 : known] = draft
        self._tokens[known:end] = 0
        start = self._cells.of(span.slot, span.start)
        self._positions[at:end] = np.arange(start, start + span.length)
        self._outputs[at:known] = 1

    def fill_media(self, slot: int, rows: npt.NDArray[np.float32], positions: npt.NDArray[np.int32]) -> Any:
        """Returns the C struct for tokens of a picture. `rows` and `positions` must live until the decode ends.

        Args:
            rows: embeddings of the tokens, of shape (tokens, width of the model).
            positions: one position for each token, or four for models with M-RoPE, of shape (4, tokens).
        """
        n = len(rows)
        self._slots[:n] = slot
        self._outputs[:n] = _OF_PROMPT * self._marks_prompts
        rest = {name: getattr(self._struct, name) for name in ("n_seq_id", "seq_id", "logits")}
        pointers = {"embd": _pointer(rows, ctypes.c_float), "pos": _pointer(positions, ctypes.c_int32)}
        return type(self._struct)(n_tokens=n, **pointers, **rest)

    def fill_texts(self, texts: Sequence[Sequence[int]], start: int = 0) -> Any:
        """Returns the C struct of texts. Text i is sequence i and begins at position `start`. Every token is an
        output."""
        lengths = [len(ids) for ids in texts]
        n = sum(lengths)
        self._tokens[:n] = np.concatenate([np.asarray(ids, np.int32) for ids in texts])
        self._positions[:n] = np.concatenate([np.arange(start, start + length) for length in lengths])
        self._slots[:n] = np.repeat(np.arange(len(texts)), lengths)
        self._outputs[:n] = 1 + _OF_PROMPT * self._marks_prompts
        self._struct.n_tokens = n
        return self._struct

    def _fill_rows(self, call: Call) -> tuple[Any, list[ScheduledSpan]]:
        """Does the work of `fill` for the usual call: one row per sequence, and perhaps dummy rows. Dummy rows are
        marked as output rows."""
        spans = call.spans
        outputs = [span for span in spans if span.output or span.prompt_rows]
        tokens = [span.sequence.token_ids[span.start + span.shift] for span in spans]
        starts = [span.start for span in spans]
        slots = [span.slot for span in spans]
        if self._cells:
            starts = [self._cells.of(span.slot, span.start) for span in spans]
        marks = [1] * len(spans)
        if len(outputs) < len(spans):
            marks = [1 if span.output or span.prompt_rows else 0 for span in spans]
        if self._marks_prompts:
            marks = [mark + _OF_PROMPT * _n_of_prompt(span) for mark, span in zip(marks, spans, strict=True)]
        if call.dummy_slots:
            dummies = ((slot, 0, self._cells.of(slot, at), 1) for slot, at in call.dummies)
            rows = sorted([*zip(slots, tokens, starts, marks, strict=True), *dummies])
            slots, tokens, starts, marks = (list(column) for column in zip(*rows, strict=True))
        self.fill_rows(tokens, starts, slots)
        if len(outputs) < len(spans) or self._marks_prompts:
            self._outputs[: len(slots)] = marks
        return self._struct, outputs

    def fill_rows(self, token_ids: list[int], positions: list[int], slots: list[int]) -> Any:
        """Returns the C struct with one output row for each slot. The slots must be in ascending order."""
        n = len(slots)
        self._tokens[:n] = token_ids
        self._positions[:n] = positions
        self._slots[:n] = slots
        self._outputs[:n] = 1
        self._struct.n_tokens = n
        return self._struct


def _n_of_prompt(span: ScheduledSpan) -> int:
    """Returns the number of prompt tokens in a span. The other tokens were generated, maybe before a preemption."""
    return max(0, min(span.length, span.sequence.num_prompt - span.start - span.shift))


def _in_slot_order(call: Call) -> list[tuple[int, ScheduledSpan | None]]:
    """Returns slots and spans in ascending order of slots, with None for a dummy. In a split cache, the slot ids of a
    pass must be consecutive and ascending, unless passes are ragged."""
    rows: list[tuple[int, ScheduledSpan | None]] = [(span.slot, span) for span in call.spans]
    rows += [(slot, None) for slot in call.dummy_slots]
    return sorted(rows, key=lambda row: row[0])


def count_passes(call: Call, n_ubatch: int, unified: bool = False, ragged: bool = False) -> int:
    """Returns the number of passes over the weights in a call.

    With a unified KV cache, this is the number of tokens divided by n_ubatch, rounded up. With a split cache, each pass
    computes the first slots with remaining tokens, up to the first gap in their ids. The pass computes equally many
    tokens of each slot, up to n_ubatch in all (llama-batch.cpp, split_equal with sequential=true). With `ragged`
    (Limits.is_ragged), a call is counted as with a unified cache if its slot ids are not consecutive, or if its spans
    differ in length (llama-ragged.cpp).
    """
    if unified:
        return -(-sum(span.length for span in call.spans) // n_ubatch)
    if (
        call.is_decode
        and not call.dummy_slots
        and call.spans[-1].slot - call.spans[0].slot < len(call.spans) <= n_ubatch
    ):
        return 1  # the usual case, dense and in order
    left = [(slot, 1 + call.n_guesses if span is None else span.length) for slot, span in _in_slot_order(call)]
    if ragged and (len({n for _, n in left}) > 1 or left[-1][0] - left[0][0] >= len(left)):
        return -(-sum(n for _, n in left) // n_ubatch)
    passes = 0
    while left:
        run = _first_run(left, n_ubatch)
        each = max(1, min(min(count for _, count in left[:run]), n_ubatch // run))
        left = [(s, c - each if i < run else c) for i, (s, c) in enumerate(left) if i >= run or c > each]
        passes += 1
    return passes


def _first_run(left: Sequence[tuple[int, int]], n_ubatch: int) -> int:
    run = 1
    while run < len(left) and left[run][0] == left[run - 1][0] + 1 and run <= n_ubatch:
        run += 1
    return run


def _pointer(array: Any, kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
