"""Masks and token-level stops in the whole engine: masked tokens never come, and the stop reason is named."""

import random

import pytest

from llamabatch import LLM, FinishReason, SamplingParams

CHAT = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny") as llm:
        yield llm


def one(llm, **params):
    (out,) = llm.chat([CHAT], SamplingParams(**({"temperature": 0, "max_tokens": 48} | params)))
    assert out.error is None
    return out.outputs[0]


def test_min_tokens_keep_the_model_from_ending(llm):
    short = one(llm, max_tokens=400)
    assert short.finish_reason is FinishReason.STOP
    long = one(llm, max_tokens=400, min_tokens=len(short.token_ids) + 20)
    assert len(long.token_ids) > len(short.token_ids) + 20 or long.finish_reason is FinishReason.LENGTH
    assert long.token_ids[: len(short.token_ids) - 1] == short.token_ids[:-1]


def test_a_stop_token_ends_the_text(llm):
    plain = one(llm)
    end = plain.token_ids[5]
    out = one(llm, stop_token_ids=[end])
    at = plain.token_ids.index(end)
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (plain.token_ids[: at + 1], FinishReason.STOP, end)
    assert plain.text.startswith(out.text)
    shown = one(llm, stop_token_ids=[end], include_stop_str_in_output=True)
    assert shown.text == out.text + llm.detokenize([end])
    later = one(llm, stop_token_ids=[end], min_tokens=at + 1)
    assert end not in later.token_ids[: at + 1]


def test_bad_words_do_not_come(llm):
    words = one(llm).text.split()[:6]
    out = one(llm, bad_words=words)
    assert not set(words) & set(out.text.split())


def test_special_tokens_are_named_on_request(llm):
    plain = one(llm, max_tokens=400)
    assert plain.finish_reason is FinishReason.STOP
    named = one(llm, max_tokens=400, skip_special_tokens=False, include_stop_str_in_output=True)
    assert named.token_ids == plain.token_ids
    assert named.text == plain.text + "<|im_end|>"


def test_masks_that_leave_nothing_fail_their_own_request(llm):
    (end,) = one(llm, max_tokens=400).token_ids[-1:]
    good = SamplingParams(max_tokens=3)
    bad = SamplingParams(max_tokens=3, allowed_token_ids=[end], min_tokens=2)
    first, second = llm.chat([CHAT, CHAT], [bad, good], errors="return")
    assert first.finish_reason is FinishReason.ERROR
    assert "no token can be chosen" in first.error
    assert second.error is None


def test_text_of_any_tokens_is_exact_with_stop_strings_anywhere(llm):
    """Random tokens cut characters and stop strings anywhere. The text must still be the decoded tokens."""
    lively = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 60}
    rng, token_bytes = random.Random(0), llm._client.model.token_bytes
    outs = llm.generate([[5]] * 24, [SamplingParams(**lively, seed=seed) for seed in range(24)])
    broken, stopped = 0, 0
    for out in outs:
        assert out.text == b"".join(map(token_bytes, out.token_ids)).decode(errors="replace")
        broken += "\ufffd" in out.text
    assert broken, "no character was cut; the test shows nothing"
    stops = []
    for out in outs:
        at = rng.randrange(max(1, len(out.text) - 6))
        stops.append([out.text[at : at + rng.choice([1, 2, 5])] or "x", "zzz"])
    several = [SamplingParams(**lively, seed=seed, stop=stop) for seed, stop in enumerate(stops)]
    streamed = dict.fromkeys(range(24), "")
    for seed, (params, stop) in enumerate(zip(several, stops, strict=True)):
        for piece in llm.stream([5], params):
            streamed[seed] += piece.text
            if piece.finished is None:
                continue
            out = piece.finished
            whole = b"".join(map(token_bytes, out.token_ids)).decode(errors="replace")
            found = [(whole.find(s), s) for s in stop if s in whole]
            assert streamed[seed] == out.text == (whole[: min(found)[0]] if found else whole)
            stopped += bool(found)
            if found:
                assert (out.finish_reason, out.outputs[0].stop_reason) == (FinishReason.STOP, min(found)[1])
    assert stopped > 12
