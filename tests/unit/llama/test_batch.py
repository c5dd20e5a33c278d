"""The marks that a llama_batch gives its tokens, without llama.cpp."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from llamabatch.llama.batch import Batch
from llamabatch.scheduler.output import Call, ScheduledSpan


class Struct(ctypes.Structure):
    """The fields of llama_batch that are filled."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def span(slot, start, length, *, num_prompt, output=True, **rest):
    sequence = SimpleNamespace(token_ids=list(range(100)), num_prompt=num_prompt)
    return ScheduledSpan(sequence, slot, start, length, output, **rest)


def batch(marks_prompts=True):
    return Batch(SimpleNamespace(llama_batch=Struct), 64, marks_prompts=marks_prompts)


def marks(struct):
    return struct.logits[: struct.n_tokens]


@pytest.mark.parametrize("marked", [True, False])
def test_tokens_of_prompts_are_marked_beside_those_that_are_outputs(marked):
    spans = (
        span(0, 4, 3, num_prompt=7),  # the end of a prompt
        span(1, 2, 4, num_prompt=4, output=False),  # a sequence that is computed again with its generated tokens
        span(2, 9, 1, num_prompt=5),  # a generated token
        span(3, 0, 3, num_prompt=5, prompt_rows=2, output=False),
    )
    struct, outputs = batch(marked).fill(Call(spans))
    of_prompt = 2 * marked
    expected = [0 + of_prompt, 0 + of_prompt, 1 + of_prompt, of_prompt, of_prompt, 0, 0, 1]
    assert marks(struct) == [*expected, of_prompt, 1 + of_prompt, 1 + of_prompt]
    assert outputs == [spans[0], spans[2], spans[3]]


def test_rows_one_by_one_are_marked_too_and_stay_with_their_slots():
    spans = (span(0, 6, 1, num_prompt=7), span(2, 9, 1, num_prompt=5), span(3, 1, 1, num_prompt=9, output=False))
    struct, _ = batch().fill(Call(spans, dummy_slots=(1,), is_padded=True))
    assert marks(struct) == [3, 1, 1, 2]
    struct, _ = batch(False).fill(Call(spans))
    assert marks(struct) == [1, 1, 0]


def test_a_slot_that_has_forgotten_tokens_counts_them():
    struct, _ = batch().fill(Call((span(0, 2, 4, num_prompt=7, shift=3),)))
    assert marks(struct) == [2, 2, 0, 1]


def test_pictures_and_whole_texts_are_of_prompts():
    struct = batch().fill_media(0, np.zeros((3, 8), np.float32), np.zeros(3, np.int32))
    assert marks(struct) == [2, 2, 2]
    assert marks(batch().fill_texts([[1, 2], [3]])) == [3, 3, 3]
    assert marks(batch(False).fill_texts([[1, 2], [3]])) == [1, 1, 1]
