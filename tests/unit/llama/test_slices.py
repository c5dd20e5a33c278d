"""Token ids of llama.cpp are converted in slices. Other threads run between the slices."""

import ctypes

import pytest

from llamabatch.llama import tokenizer


class Recorded:
    """A ctypes array that records how many of its values are read at once."""

    def __init__(self, values):
        self._values = (ctypes.c_int32 * len(values))(*values)
        self.sizes = []

    def __getitem__(self, place):
        found = self._values[place]
        self.sizes.append(len(found))
        return found


@pytest.mark.parametrize("n", [0, 1, 99, 100, 101, 250])
def test_ids_are_read_in_slices(monkeypatch, n):
    monkeypatch.setattr(tokenizer, "_SLICE", 100)
    array = Recorded(range(300))
    assert tokenizer._in_slices(array, n) == list(range(n))
    assert all(0 < size <= 100 for size in array.sizes)
