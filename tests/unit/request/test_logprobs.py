import copy
import json
import math
import pickle
import random
import tracemalloc
from dataclasses import asdict

import pytest

from llamabatch.request.logprobs import FlatLogprobs, Logprob, TextOffsets, count
from llamabatch.request.outputs import CompletionOutput, FinishReason


def place(rng, n):
    texts = ["", "a", " the", "\ufffd", "é", "\U0001f600x"]
    return {
        i: Logprob(-rng.random() * 9, rng.randrange(1, 200_000), rng.choice(texts)) for i in rng.sample(range(99), n)
    }


def places(seed=1):
    rng = random.Random(seed)
    return [None, *(place(rng, rng.randrange(1, 9)) for _ in range(50)), {7: Logprob(-math.inf, 3, "x")}, None]


def test_flat_logprobs_are_the_list_that_they_are_made_of():
    given = places()
    flat = FlatLogprobs(given)
    assert flat == given
    assert tuple(given) == flat
    assert flat != FlatLogprobs(places(2))
    assert list(flat) == given
    assert [list(each) for each in flat if each] == [list(each) for each in given if each]  # chosen one first
    assert (len(flat), flat[1], flat[-2], flat[-1]) == (53, given[1], given[-2], None)
    assert flat[2:50:7] == tuple(given[2:50:7])
    for outside in (53, -54):
        with pytest.raises(IndexError, match=f"place {outside} of 53"):
            flat[outside]
    assert repr(flat) == repr(tuple(given))
    flat.extend(FlatLogprobs(given))
    flat.append(given[3])
    assert flat == [*given, *given, given[3]]
    assert FlatLogprobs() == ()
    assert not FlatLogprobs()


def test_flat_logprobs_are_copied_pickled_and_sent():
    given = places()
    flat = FlatLogprobs(given)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(flat, protocol)) == given
    other = copy.copy(flat)
    other.append(given[1])
    assert (len(other), len(flat)) == (len(given) + 1, len(given))
    assert (None, *given) == (None,) + flat  # noqa: RUF005
    assert (*given, None) == flat + (None,)  # noqa: RUF005
    assert FlatLogprobs.of_parts(flat.parts()) == given
    assert copy.deepcopy(flat) == tuple(given)
    flat = FlatLogprobs(given[1:3])
    output = CompletionOutput(0, "", (1, 2), FinishReason.STOP, logprobs=flat)
    assert json.dumps(asdict(output)["logprobs"]) == json.dumps(given[1:3])


@pytest.mark.parametrize("form", [list, tuple, FlatLogprobs])
def test_all_logprobs_are_counted(form):
    given = places()
    assert count(form(given)) == sum(len(each) for each in given if each)
    assert count(form()) == count(None) == 0


def test_a_logprob_takes_few_bytes():
    row = {i: Logprob(-0.5, i, " word") for i in range(1000)}
    tracemalloc.start()
    try:
        flat = FlatLogprobs(row for _ in range(100))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 40 * flat.n_logprobs


def test_a_token_within_a_character_stands_where_that_begins():
    places = TextOffsets()
    assert [places.add(each) for each in (b"a", b"\xe6", b"\x97", b"\xa5", b" the", b"!")] == [0, 1, 1, 1, 2, 6]
    assert TextOffsets(7).add(b"x") == 7
