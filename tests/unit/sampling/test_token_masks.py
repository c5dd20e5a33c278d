"""Masks of allowed tokens: their sources, alone and together, and the masks that SamplingParams ask for."""

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamabatch import SamplingError, SamplingParams
from llamabatch.request.request import Request
from llamabatch.sampling.defaults import fill
from llamabatch.sampling.prepared_params import PreparedParams, PreparedParamsCache
from llamabatch.sampling.token_masks import BadWords, Masks, NotBefore, all_but

N = 70


def allowed(words) -> set[int]:
    if words is None:
        return set(range(N))
    return {i for i in range(N) if words[i // 32] >> (i % 32) & 1}


class Fixed:
    def __init__(self, words):
        self._words = words

    def mask(self, index, token_ids):
        return self._words


@given(st.lists(st.sets(st.integers(0, N - 1)) | st.none(), max_size=4))
def test_a_token_may_come_if_all_sources_allow_it(forbidden):
    masks = Masks(N)
    given_words = [None if ids is None else all_but(ids, N) for ids in forbidden]
    for words in given_words:
        masks.add(Fixed(words))
    before = [None if words is None else words.copy() for words in given_words]
    together = masks.next(0, [])
    assert allowed(together) == set(range(N)).difference(*(ids or () for ids in forbidden))
    assert (together is None) == all(ids is None for ids in forbidden)
    for words, earlier in zip(given_words, before, strict=True):
        assert words is None or (words == earlier).all(), "a source's own mask was changed"


def test_min_tokens_count_output_tokens():
    source = NotBefore(3, all_but([0], N))
    assert [0 in allowed(source.mask(index, [1] * 9)) for index in range(5)] == [False, False, False, True, True]


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=5), st.data())
def test_the_last_token_of_a_bad_word_is_forbidden_after_the_others(runs, data):
    prompt = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    output = data.draw(st.lists(st.integers(0, 4), max_size=6))
    wanted = set(range(N))
    for *before, last in runs:
        if output[len(output) - len(before) :] == before:
            wanted.discard(last)
    source = BadWords(map(tuple, runs), N)
    for index in range(len(output) + 1):  # asking for earlier masks changes nothing
        source.mask(index, prompt + output[:index])
    assert allowed(source.mask(len(output), prompt + output)) == wanted


class Letters:
    """A vocabulary with one token for each character. As in most, a word's first token includes the space before it."""

    n_vocab = 256
    metadata: ClassVar[dict[str, str]] = {}
    eog_ids = (0, 1)

    def __init__(self, always_a_space: bool = False) -> None:
        self._always_a_space = always_a_space

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        assert not add_special
        assert not parse_special
        text = " " + text if self._always_a_space else text
        return [ord(a) | 128 * (before == " ") for before, a in zip("x" + text, text, strict=False) if a != " "]

    def token_bytes(self, token_id: int) -> bytes:
        return b" " * (token_id >= 128) + bytes([token_id & 127])


def forbidden_after(params, output=(), model=None):
    state = PreparedParams(fill(params), model or Letters()).sampler_state(Request("r", (9,)))
    if state.masks is None:
        return set()
    words = state.masks.next(len(output), [9, *output])
    return set() if words is None else {i for i in range(256) if not words[i // 32] >> (i % 32) & 1}


def test_bad_words_are_looked_for_with_and_without_a_space():
    a, spaced_a, b = ord("a"), ord("a") | 128, ord("b")
    assert forbidden_after(SamplingParams(bad_words="a")) == {a, spaced_a}
    params = SamplingParams(bad_words=["ab"])
    assert forbidden_after(params) == set()
    assert forbidden_after(params, [a]) == {b}
    assert forbidden_after(params, [spaced_a]) == {b}
    assert forbidden_after(params, [b]) == set()
    with_space_always = Letters(always_a_space=True)
    assert forbidden_after(SamplingParams(bad_words="a"), model=with_space_always) == {a, spaced_a}


def test_min_tokens_forbid_whatever_would_end_the_text():
    params = SamplingParams(min_tokens=2, stop_token_ids=[7])
    assert forbidden_after(params, [5]) == {0, 1, 7}
    assert forbidden_after(params, [5, 5]) == set()
    assert forbidden_after(SamplingParams(min_tokens=2, stop_token_ids=[7], ignore_eos=True), [5]) == {7}
    assert forbidden_after(SamplingParams(min_tokens=2, bad_words="a")) == {0, 1, ord("a"), ord("a") | 128}


def test_a_request_that_asks_for_nothing_has_no_masks():
    prepared = PreparedParams(fill(SamplingParams(stop="x", stop_token_ids=[3])), Letters())
    assert prepared.sampler_state(Request("r", (9,))).masks is None


def test_a_word_without_tokens_is_refused():
    with pytest.raises(SamplingError, match="bad_words has ' '"):
        PreparedParams(fill(SamplingParams(bad_words=" ")), Letters())


def test_params_are_prepared_once_and_forgotten():
    cache, params = PreparedParamsCache(Letters()), SamplingParams(bad_words="a")
    first = cache.of(params)
    assert cache.of(params) is first
    for _ in range(100):
        assert cache.of(SamplingParams()).params == fill(SamplingParams())
    assert cache.of(params) is not first
    assert np.array_equal(
        first.sampler_state(Request("r", (9,))).masks.next(0, [9]),
        all_but([ord("a"), ord("a") | 128], 256),
    )
