"""Common beginnings: their length, and the sequence to copy from."""

from hypothesis import given
from hypothesis import strategies as st

from llamabatch.scheduler.common_prefix import MIN_SHARED, best_source, common_length
from tests.unit.fakes import sequence

tokens = st.lists(st.integers(0, 2), max_size=200)


@given(tokens, tokens, tokens)
def test_common_length_is_exact(head, a, b):
    one, other = head + a, head + b
    naive = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    assert common_length(one, other) == naive


def test_the_longest_match_wins_and_the_last_token_is_always_computed():
    head = tuple(range(1, MIN_SHARED + 11))
    near, far = sequence("near", (*head, 200)), sequence("far", (*head[:-5], 201))
    asks = sequence("asks", head)
    assert best_source(asks, [far, near]) == (near, len(head) - 1)


def test_short_matches_are_not_worth_a_copy():
    head = tuple(range(1, MIN_SHARED))
    assert best_source(sequence("a", (*head, 100, 101)), [sequence("b", (*head, 102))]) is None
