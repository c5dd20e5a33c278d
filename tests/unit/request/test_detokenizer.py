import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamabatch.request.detokenizer import Detokenizer


def feed(pieces: list[bytes], stop: tuple[str, ...] = (), **options) -> tuple[Detokenizer, list[str]]:
    detokenizer = Detokenizer(lambda i: pieces[i], stop, **options)
    shown = []
    for i in range(len(pieces)):
        shown.append(detokenizer.push(i))
        if detokenizer.stopped is not None:
            break
    shown.append(detokenizer.flush())
    return detokenizer, shown


@st.composite
def cut_bytes(draw):
    """Draws a text's bytes, cut anywhere, even inside characters."""
    data = draw(st.text(alphabet="abcé€😀 \n")).encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


STOPS = st.lists(st.text(alphabet="abcé€", min_size=1, max_size=4), min_size=1, max_size=3)


@given(cut_bytes(), STOPS)
def test_stop_strings_across_token_borders(pieces, stop):
    whole = b"".join(pieces).decode()
    detokenizer, shown = feed(pieces, tuple(stop))
    text = detokenizer.text
    assert text == "".join(shown)
    assert not any(s in text for s in stop), "a stop string was shown"
    assert whole.startswith(text), "text was lost or changed"
    assert (detokenizer.stopped is not None) == any(s in whole for s in stop)
    if detokenizer.stopped is not None:
        assert whole[len(text) :].startswith(detokenizer.stopped)
    else:
        assert text == whole


@given(cut_bytes(), STOPS)
def test_a_stop_string_may_stay_in_the_text(pieces, stop):
    whole = b"".join(pieces).decode()
    without, _ = feed(pieces, tuple(stop))
    detokenizer, shown = feed(pieces, tuple(stop), include_stop=True)
    assert detokenizer.text == "".join(shown) == without.text + (without.stopped or "")
    assert detokenizer.stopped == without.stopped
    assert whole.startswith(detokenizer.text)


@given(cut_bytes(), STOPS, st.integers(0, 6))
def test_stop_strings_that_end_within_min_tokens_end_nothing(pieces, stop, min_tokens):
    decoded = [len(b"".join(pieces[: i + 1]).decode(errors="ignore")) for i in range(len(pieces))]
    exempt = ([0, *decoded])[min(min_tokens, len(pieces))]
    whole, wanted, ending = b"".join(pieces).decode(), None, None
    for length in [n for n in decoded if n > exempt]:  # after each token: the earliest whole one, of these the longest
        ends = [(whole.find(s, max(0, exempt + 1 - len(s)), length), -len(s), s) for s in stop]
        ends = [found for found in ends if found[0] >= 0]
        if ends:
            wanted, _, ending = min(ends)
            break
    detokenizer, shown = feed(pieces, tuple(stop), min_tokens=min_tokens)
    assert (detokenizer.stopped, detokenizer.text) == (ending, whole if ending is None else whole[:wanted])
    assert detokenizer.text == "".join(shown)


def test_what_may_become_a_stop_string_is_held_back():
    detokenizer = Detokenizer(lambda i: [b"Hello E", b"N", b"X", b" END more"][i], ("END",))
    assert [detokenizer.push(i) for i in range(3)] == ["Hello ", "", "ENX"]
    assert detokenizer.push(3) == " "
    assert detokenizer.stopped == "END"
    assert detokenizer.text == "Hello ENX "


@pytest.mark.parametrize(
    ("text", "stop", "kept"), [("abcd", ("bc", "bcd"), "a"), ("aab", ("ab",), "a"), ("xyz", ("xyz",), "")]
)
def test_the_earliest_stop_wins(text, stop, kept):
    detokenizer, _ = feed([text.encode()], stop)
    assert detokenizer.text == kept


@pytest.mark.parametrize("errors", ["replace", "ignore", "backslashreplace"])
@given(pieces=st.lists(st.sampled_from([b"", b"a", b"bc", b"\xe2", b"\x82\xac", b"\xff", "ü😀".encode(), b"\xf0\x9f"])))
def test_text_without_stop_strings_is_that_of_the_decoder(pieces, errors):
    detokenizer, decoder = (
        Detokenizer(lambda i: pieces[i], errors=errors),
        codecs.getincrementaldecoder("utf-8")(errors=errors),
    )
    assert [detokenizer.push(i) for i in range(len(pieces))] == [decoder.decode(piece) for piece in pieces]
    assert detokenizer.flush() == decoder.decode(b"", final=True)
    assert detokenizer.text == b"".join(pieces).decode(errors=errors)
