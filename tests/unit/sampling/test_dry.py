"""DRY's runs, grown a token at a time, compared with a plain search through the whole window for each token."""

from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch.sampling.dry import DryPenalty, breaker_tokens


def plain_break(tokens, tails, seen):
    """Returns the number of last tokens after the last breaker. The search goes back from the end."""
    for back in range(seen):
        head = len(tokens) - 1 - back
        ends = [head + len(t) for t in tails.get(tokens[head], ()) if tuple(tokens[head + 1 : head + 1 + len(t)]) == t]
        if ends:
            return len(tokens) - 1 - max(ends)
    return seen


def plain_lengths(tokens, tails, shortest, window):
    seen = len(tokens) if window < 0 else min(len(tokens), window)
    text = tokens[len(tokens) - seen :]
    most = plain_break(tokens, tails, seen)
    if seen <= shortest or most < shortest:
        return {}
    longest = {}
    for end in range(1, seen):  # text[:end] comes before text[end]
        length = 0
        while length < min(end, most) and text[end - 1 - length] == text[seen - 1 - length]:
            length += 1
        if length >= shortest and () not in tails.get(text[end], ()):
            longest[text[end]] = max(longest.get(text[end], 0), length)
    return longest


TAILS = st.dictionaries(
    st.integers(0, 3), st.frozensets(st.lists(st.integers(0, 3), max_size=2).map(tuple), max_size=2), max_size=2
)


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 3), max_size=40), st.integers(0, 40), TAILS, st.integers(1, 3), st.sampled_from([-1, 5, 12])
)
def test_runs_are_those_of_a_plain_search(tokens, n_prompt, tails, shortest, window):
    repeats = DryPenalty(tails, shortest, window)
    repeats.extend(tokens[:n_prompt])
    for count in range(min(n_prompt, len(tokens)), len(tokens) + 1):
        assert repeats.lengths() == plain_lengths(tokens[:count], tails, shortest, window)
        repeats.extend(tokens[count : count + 1])


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(1, 5), max_size=12))
def test_several_tokens_at_once_are_the_same_as_one_by_one(tokens, sizes):
    one, several, at = DryPenalty({}, 1), DryPenalty({}, 1), 0
    for token_id in tokens:
        one.extend([token_id])
    for size in [*sizes, len(tokens)]:
        several.extend(tokens[at : at + size])
        at += size
    assert several.lengths() == one.lengths()


def test_a_long_text_of_one_token_takes_no_time():
    repeats = DryPenalty({}, 2)
    repeats.extend([7] * 100_000)  # a search from each place would take 5 * 10^9 comparisons
    assert repeats.lengths() == {7: 99_999}


def test_breakers_are_found_within_tokens_and_across_them():
    words = [b"a", b"b\n", b"x--", b"-", b"->", b">"]

    def tokenize(data):
        return [words.index(bytes([byte])) for byte in data]

    assert breaker_tokens(["\n"], 6, words.__getitem__, tokenize) == {1: {()}}
    # "->" begins in "x--" and in "-", and ">" must follow; the token "->" contains all of it
    assert breaker_tokens(["->"], 6, words.__getitem__, tokenize) == {2: {(5,)}, 3: {(5,)}, 4: {()}}
