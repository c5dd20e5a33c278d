"""The end of a sequence and its text, compared with a plain reading of the rules, whatever tokens come."""

import codecs

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamabatch.request.detokenizer import Vocabulary
from llamabatch.request.outputs import FinishReason
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.sequence import Sequence

# two tokens end a generation, two more are special, and the others cut texts anywhere, even inside characters
TEXTS = [
    *(b"", b"", b"", b"", b"a", b"b", b"ab", b"c a", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xf0\x9f\x98", b"\x80"),
    b"\n",
]
NAMES = {0: b"</s>", 1: b"<end>", 2: b"<a>", 3: b"<b>"}
EOG = (0, 1)
VOCABULARY = Vocabulary(len(TEXTS), lambda i: i in EOG, lambda i: TEXTS[i], lambda i: NAMES.get(i, TEXTS[i]))

STOPS = ["a", "ab", "ba", "é", "€\n", "<a>b", "s>"]


def run(tokens: list[int], n_ctx: int, prompt: int, params: SamplingParams):
    """Feeds these tokens to a sequence until it ends. Returns its completion and the text that it showed."""
    sequence = Sequence(Request("r", (4,) * prompt, params), VOCABULARY, n_ctx)
    shown = ""
    for token_id in tokens:
        shown += sequence.accept(token_id, 0.0)
        if sequence.finished:
            break
    else:
        shown += sequence.abort()
    return sequence.output().outputs[0], shown


def plain(tokens: list[int], n_ctx: int, prompt: int, params: SamplingParams):
    """Applies the rules one after another, to the whole text each time."""
    most = min(params.max_tokens or 10**9, n_ctx + 1 - prompt)
    data, exempt = b"", 0
    for count, token_id in enumerate(tokens, 1):
        ends = token_id in params.stop_ids or (token_id in EOG and not params.ignore_eos)
        if not ends or params.include_stop_str_in_output:
            special = token_id in NAMES
            data += (NAMES[token_id] if not params.skip_special_tokens else b"") if special else TEXTS[token_id]
        last = ends or count == most or count == len(tokens)
        text = data.decode(errors="replace") if last else _whole_characters(data)
        if count <= params.min_tokens:
            exempt = len(_whole_characters(data))
        found = [(text.find(s, max(0, exempt + 1 - len(s))), -len(s), s) for s in params.stop_strings]
        found = [each for each in found if each[0] >= 0]
        cut, stop = len(text), None
        if found:
            cut, _, stop = min(found)
            cut += len(stop) if params.include_stop_str_in_output else 0
        used = tuple(tokens[:count])
        if ends:
            return text[:cut], used, FinishReason.STOP, token_id
        if stop is not None:
            return text[:cut], used, FinishReason.STOP, stop
        if count == most:
            return text, used, FinishReason.LENGTH, None
    return data.decode(errors="replace"), tuple(tokens), FinishReason.ABORT, None


def _whole_characters(data: bytes) -> str:
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data)


@settings(max_examples=400)
@given(
    st.lists(st.integers(2, len(TEXTS) - 1) | st.integers(0, len(TEXTS) - 1), min_size=1, max_size=12),
    st.lists(st.sampled_from(STOPS), max_size=3),
    st.sets(st.integers(0, len(TEXTS) - 1), max_size=2),
    st.tuples(st.integers(0, 4), st.integers(4, 12) | st.none(), st.integers(1, 12)),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@example([4, 8], [], set(), (0, 2, 1), (False, False, False))  # the text ends with half a character
@example([5, 6, 4], ["ba"], set(), (2, None, 1), (False, False, False))
def test_text_and_reason_are_those_of_a_plain_reading(tokens, stop, stop_ids, sizes, switches):
    min_tokens, max_tokens, prompt = sizes
    include, ignore, skip = switches
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop,
        stop_token_ids=stop_ids,
        include_stop_str_in_output=include,
        ignore_eos=ignore,
        skip_special_tokens=skip,
    )
    out, shown = run(tokens, 12, prompt, params)
    text, used, reason, stop_reason = plain(tokens, 12, prompt, params)
    assert (out.token_ids, out.finish_reason) == (used, reason)
    if reason is not FinishReason.ABORT:
        assert out.stop_reason == stop_reason
        assert out.text == text
    assert shown == out.text


@pytest.mark.parametrize("prompt", [1, 11, 12])
def test_a_full_context_ends_with_length(prompt):
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    out, _ = run([4] * 99, 12, prompt, params)
    assert (out.finish_reason, out.stop_reason) == (FinishReason.LENGTH, None)
    assert out.text == "a" * (13 - prompt)  # the last token needs no cell


def test_a_stop_token_ends_the_text_and_names_itself():
    out, _ = run([4, 5, 6, 4], 64, 1, SamplingParams(stop_token_ids=[6]))
    assert (out.text, out.token_ids, out.finish_reason, out.stop_reason) == ("ab", (4, 5, 6), FinishReason.STOP, 6)
    out, _ = run([4, 5, 6, 4], 64, 1, SamplingParams(stop_token_ids=[6], include_stop_str_in_output=True))
    assert out.text == "abab"


def test_names_of_special_tokens_are_shown_on_request_only():
    tokens = [4, 2, 5, 0]
    assert run(tokens, 64, 1, SamplingParams())[0].text == "ab"
    assert run(tokens, 64, 1, SamplingParams(skip_special_tokens=False))[0].text == "a<a>b"
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert run(tokens, 64, 1, SamplingParams(**shown))[0].text == "a<a>b</s>"
    assert run(tokens, 64, 1, SamplingParams(**shown, ignore_eos=True))[0].finish_reason is FinishReason.ABORT
