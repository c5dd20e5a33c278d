"""The texts that go through the model together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamabatch.engine.embedding import MOST_BESIDE, STEPS_BETWEEN, EmbedQueue
from llamabatch.engine.validation import longest_text
from llamabatch.llama.embedder import MAX_TEXTS
from llamabatch.request.media import MediaRun
from llamabatch.request.request import Request
from tests.unit.configs import resolved

A, A_HALF, B = (("a", 1.0),), (("a", 0.5),), (("b", 1.0),)


def text(name, length, adapters=()):
    return Request(name, (1,) * length, embed=True, adapters=adapters)


def filled(requests, n_pack=128):
    queue = EmbedQueue(n_pack)
    for request in requests:
        queue.add(request)
    return queue


def names(requests):
    return [request.request_id for request in requests]


def test_texts_do_not_wait_for_the_pictures_of_other_requests():
    shown, later = (replace(text(name, 20, A), media_runs=(MediaRun(2, 9, 0, 0, True, 9, 9),)) for name in "xy")
    queue = filled([text("a", 5), shown, later, text("b", 5)])
    assert queue.encoding is None
    assert names(queue.take(False)) == ["a", "b"]
    assert queue.encoding is shown
    queue.add(text("c", 5))
    assert names(queue.take(True)) == ["c"]
    assert (len(queue), "x" in queue, queue.uses("a")) == (2, True, True)
    assert queue.pop_encoded() is shown
    assert queue.take(False) == []
    assert queue.remove("y") is later
    assert (len(queue), queue.encoding, queue.uses("a")) == (0, None, False)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.sampled_from([(), A, A_HALF, B])), max_size=80),
    st.lists(st.booleans(), max_size=200),
)
def test_each_text_goes_once_and_passes_are_no_larger_than_they_may(texts, busy):
    queue = filled([text(str(i), length, adapters) for i, (length, adapters) in enumerate(texts)])
    seen = []
    for generating in [*busy, *[False] * (len(texts) + 1)]:
        oldest = queue._waiting[0].request_id if queue._waiting else None
        taken = queue.take(generating)
        n_tokens = sum(len(request.prompt_token_ids) for request in taken)
        assert len({request.adapters for request in taken}) <= 1
        assert len(taken) <= MAX_TEXTS
        assert n_tokens <= 128 or len(taken) == 1
        if oldest is not None and not generating:
            assert taken[0].request_id == oldest, "nobody is passed over for good"
        seen += names(taken)
        assert len(queue) == len(texts) - len(seen)
    assert sorted(seen) == sorted(str(i) for i in range(len(texts)))


def test_short_texts_fill_what_long_ones_leave():
    queue = filled([text("a", 100), text("b", 90), text("c", 20), text("d", 38), text("e", 8)])
    assert names(queue.take(False)) == ["a", "c", "e"]
    assert names(queue.take(False)) == ["b", "d"]
    assert queue.take(False) == []


def test_beside_generation_a_full_pass_is_rare_and_the_others_are_short():
    queue = filled([text(f"r{i}", 60) for i in range(200)])
    sizes = [sum(len(r.prompt_token_ids) for r in queue.take(True)) for _ in range(2 * (STEPS_BETWEEN + 1))]
    assert [i for i, size in enumerate(sizes) if size > MOST_BESIDE] == [0, STEPS_BETWEEN + 1]
    assert all(size == 60 for size in sizes if size <= MOST_BESIDE)


def test_a_long_text_beside_generation_waits_for_the_full_pass():
    queue = filled([text("a", 10), text("b", 500)])
    queue.take(True)
    taken = [names(queue.take(True)) for _ in range(STEPS_BETWEEN + 1)]
    assert taken == [*[[]] * STEPS_BETWEEN, ["b"]]


def test_taking_back():
    queue = filled([text("a", 10), text("b", 10, A)])
    assert queue.uses("a")
    assert queue.remove("b").request_id == "b"
    assert not queue.uses("a")
    assert "b" not in queue
    assert names(queue.take(False)) == ["a"]
    with pytest.raises(KeyError):
        queue.remove("a")


def test_the_longest_text_fits_a_call_and_a_slot():
    config = resolved("tiny", n_batch=1024)
    assert longest_text(config) == 1024
    assert longest_text(replace(config, n_ctx=512)) == 512
