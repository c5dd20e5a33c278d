"""reprs have one line that shows values other than the default, however long texts and lists are."""

from array import array
from dataclasses import replace

import pytest

from llamabatch import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestOutput,
    SamplingParams,
    Score,
    SequenceOutput,
    Timings,
)
from llamabatch.request.logprobs import FlatLogprobs
from llamabatch.testing import FakeAsyncLLM, FakeLLM
from llamabatch.utils.brief import brief_value

LONG = "word\n" * 4000
IDS = tuple(range(4000))
DONE = CompletionOutput(0, LONG, IDS, FinishReason.LENGTH, logprobs=({1: Logprob(-0.5, 1, "a")},) * 3)


def test_parameters_show_what_is_not_default():
    assert repr(SamplingParams()) == "SamplingParams()"
    params = SamplingParams(temperature=0, max_tokens=16, stop=["\n"], allowed_token_ids=IDS, logprobs=0)
    assert repr(params) == (
        "SamplingParams(max_tokens=16, temperature=0, stop=['\\n'], allowed_token_ids=<4,000 items>, logprobs=0)"
    )
    held = repr(SamplingParams(structured_outputs={"json": {"type": "object"}}))
    assert held.startswith("SamplingParams(structured_outputs=Structure(kind='json', ")
    assert repr(SamplingParams(ignore_eos=True, min_tokens=1, n=1)) == "SamplingParams(min_tokens=1, ignore_eos=True)"


def test_outputs_are_one_short_line():
    assert "text='" + "word\\n" * 11 + "word…'" in repr(DONE)
    assert "token_ids=<4,000 items>, finish_reason='length', logprobs=<3 items>" in repr(DONE)
    assert "logprobs=<3 items>" in repr(replace(DONE, logprobs=FlatLogprobs(DONE.logprobs)))
    whole = RequestOutput(
        "r", LONG, IDS, (DONE,) * 5, timings=Timings(0.1, 0.2, 0.3, (0.5,) * 4000), num_cached_tokens=7
    )
    shown = repr(whole)
    assert shown.startswith("RequestOutput(request_id='r', prompt='word\\nword")
    assert shown.endswith("and 2 more], num_cached_tokens=7)")
    pieces = [SequenceOutput("r", (5,), "a"), SequenceOutput("r", (5,), "a", whole, prompt_index=3)]
    assert repr(pieces[0]) == "SequenceOutput(request_id='r', token_ids=[5], text='a')"
    assert repr(pieces[1]) == (
        "SequenceOutput(request_id='r', token_ids=[5], text='a', finished='length', prompt_index=3)"
    )
    request = Request("r", IDS, SamplingParams(max_tokens=3))
    assert (
        repr(request) == "Request(request_id='r', prompt_token_ids=<4,000 items>, params=SamplingParams(max_tokens=3))"
    )
    embedded = RequestOutput(
        "r", None, (1,), (CompletionOutput(0, "", (), FinishReason.STOP),), embedding=array("f", IDS)
    )
    assert "embedding=<4,000 items>" in repr(embedded)
    score = Score(-1.5, True, IDS, (-0.5,) * 4000)
    assert repr(score) == "Score(logprob=-1.5, is_greedy=True, token_ids=<4,000 items>, token_logprobs=<4,000 items>)"
    for each in (whole, DONE, *pieces, request, embedded, score, whole.timings):
        assert "\n" not in repr(each)
        assert len(repr(each)) < 1000


def test_a_repr_of_a_request_takes_no_number_of_a_call():
    before = Request("a", (1,)).group
    repr(Request("b", (1,)))
    assert Request("c", (1,)).group == before + 2


def test_a_failed_output_tells_its_error():
    failed = RequestOutput.failed(Request("r", ()), "the prompt is empty")
    assert "error='the prompt is empty'" in repr(failed)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1 / 3, "0.333333"), ("a\ud800", r"'a\ud800'"), ({}, "{}"), ({"a": (1, None)}, "{'a': [1, None]}"),
        ((), "[]"), ([0.5] * 9, "<9 items>"), ({i: i for i in range(9)}, "<9 items>"), (b"x", "b'x'"),
    ],
)  # fmt: skip
def test_values(value, shown):
    assert brief_value(value) == shown


def test_an_llm_names_its_model_and_its_sizes():
    llm = FakeLLM("some/model.gguf", n_ctx=256, n_slots=3)
    assert repr(llm).endswith("some/model.gguf', strategy='batched', n_ctx=256, n_slots=3)")
    assert repr(llm).startswith("FakeLLM(")
    assert repr(FakeLLM.__new__(FakeLLM)) == "FakeLLM(not loaded)"
    plan = repr(llm.plan)
    assert "\n" not in plan
    assert "n_slots=3, n_ctx=256" in plan
    assert "MiB'" in plan
    several = FakeLLM(n_slots=3, strategy="multi-instance", instances=2)
    assert "instances=2" in repr(several)
    waiting = FakeAsyncLLM("some/model.gguf")
    assert repr(waiting).endswith("some/model.gguf', not loaded)")
    waiting.close()
