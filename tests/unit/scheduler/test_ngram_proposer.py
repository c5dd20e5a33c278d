"""Drafts by prompt lookup: each text is indexed once, and the longest match of its last tokens decides."""

import random

from hypothesis import given
from hypothesis import strategies as st

from llamabatch.scheduler.ngram_proposer import LONGEST_RUN, NgramProposer, RunIndex
from tests.unit.fakes import sequence


def test_lookup_finds_what_followed_the_longest_run():
    index = RunIndex()
    assert index.find([1, 2, 3, 4, 9, 3, 5, 2, 3], 3) == [4, 9, 3]  # the match "2 3" is longer than the later match "3"
    assert index.find([1, 2, 3, 4, 9, 3, 5, 2, 3, 7], 3) == []
    assert RunIndex().find([1], 4) == []
    assert RunIndex().find([5, 6, 5, 6, 5], 5) == [6, 5, 6, 5, 6]  # a repetition is continued


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(1, 9))
def test_lookup_by_steps_is_lookup_at_once(tokens, n):
    by_steps = RunIndex()
    for end in range(1, len(tokens) + 1):
        found = by_steps.find(tokens[:end], n)
        assert found == RunIndex().find(tokens[:end], n)
        assert len(found) in (0, n)
        seen = tokens[: end - 1]
        assert bool(found) == (tokens[end - 1] in seen)


def test_lookup_takes_each_token_in_once():
    class Counting(list):
        looked = 0

        def __getitem__(self, at):
            Counting.looked += 1
            return super().__getitem__(at)

    tokens = Counting(random.Random(0).choices(range(50), k=5000))
    index = RunIndex()
    index.find(tokens, 4)
    Counting.looked = 0
    for token in range(100):
        tokens.append(token % 50)
        index.find(tokens, 4)
    assert Counting.looked <= 100 * 3 * (LONGEST_RUN + 1)


def test_lookup_starts_anew_where_a_text_was_cut():
    one = sequence("r", (1, 2, 3, 1))
    lookup = NgramProposer()
    assert lookup.propose([one], 2) == [[2, 3]]
    one.token_ids[:] = [3, 1]
    assert lookup.propose([one], 2) == [[]]
