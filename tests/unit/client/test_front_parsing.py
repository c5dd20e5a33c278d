"""Thinking in answers, with FakeLLM: every verb but generate() separates it from the answer."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import replace

import pytest

from llamabatch import ConfigError, SamplingError, SamplingParams
from llamabatch.chat.formats import ChatFormat
from llamabatch.chat.options import ChatOptions
from llamabatch.chat.output_parser import OutputParser
from llamabatch.client.front_client import FrontClient
from llamabatch.request.outputs import SequenceOutput
from llamabatch.testing import FakeAsyncLLM, FakeLLM
from tests.unit.client.behind import Behind

HI = [{"role": "user", "content": "hi"}]
RAW = "<think>\nLet me see < 3.\n</think>\n\nIt is <b>4</b>."
TAGS = ("<think>", "</think>")


def fake(answers=RAW, **options):
    return FakeLLM(answers=answers, reasoning_tags=TAGS, **options)


def test_chat_tells_thinking_from_text_and_generate_does_not():
    with fake() as llm:
        [output] = llm.chat(HI)
        assert (output.reasoning, output.text) == ("Let me see < 3.", "It is <b>4</b>.")
        assert output.outputs[0].reasoning == output.reasoning
        [raw] = llm.generate("hi")
        assert (raw.reasoning, raw.text) == (None, RAW)
        assert llm.plan.reasoning == "custom"
        assert "reasoning = custom: reasoning_tags are given" in llm.plan.describe()


def test_without_tags_and_with_reasoning_format_none_the_text_is_raw():
    for options in ({}, {"reasoning_tags": TAGS, "reasoning_format": "none"}):
        with FakeLLM(answers=RAW, **options) as llm:
            [output] = llm.chat(HI)
            assert (output.reasoning, output.text, llm.plan.reasoning) == (None, RAW, None)


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_deltas_join_to_the_whole(n):
    answers = [RAW, "no thought", "<think>cut"][:n]
    with fake(answers) as llm:
        parts = {index: ["", ""] for index in range(n)}
        for piece in llm.stream(HI, {"n": n}):
            parts[piece.index][0] += piece.reasoning
            parts[piece.index][1] += piece.text
            assert "think>" not in "".join(parts[piece.index])
            if piece.finished is not None:
                whole = piece.finished
    assert [(each.reasoning or "", each.text) for each in whole.outputs] == [tuple(parts[i]) for i in range(n)]
    expected = [("Let me see < 3.", "It is <b>4</b>."), (None, "no thought"), ("cut", "")]
    assert [(each.reasoning, each.text) for each in whole.outputs] == expected[:n]


def test_each_continuation_says_why_it_ends_in_its_last_piece():
    with fake(["a", "b c d e", "f g"]) as llm:
        pieces = list(llm.stream(HI, {"n": 3, "max_tokens": 3}))
    ends = {piece.index: piece.finish_reason for piece in pieces if piece.finish_reason is not None}
    assert ends == {0: "stop", 1: "length", 2: "stop"}
    assert [piece.to_openai(chat=True)["choices"][0]["finish_reason"] for piece in pieces].count("stop") == 2


def test_as_completed_async_and_best_of():
    with fake([RAW, "x", RAW, RAW]) as llm:
        outputs = dict(llm.as_completed([HI, "hi"]))
        assert (outputs[0].reasoning, outputs[1].reasoning) == ("Let me see < 3.", None)
        [best] = llm.chat(HI, {"n": 1, "best_of": 2})
        assert best.text == "It is <b>4</b>."

    async def run():
        async with FakeAsyncLLM(answers=RAW, reasoning_tags=TAGS) as llm:
            [output] = await llm.chat(HI)
            assert output.reasoning == "Let me see < 3."

    asyncio.run(run())


def test_a_thinking_that_is_cut_has_no_text():
    with fake() as llm:
        [output] = llm.chat(HI, {"max_tokens": 9})
        assert (output.text, output.finish_reason) == ("", "length")
        assert output.reasoning is not None
        assert "Let me see < 3.".startswith(output.reasoning)


def test_openai_shapes_have_the_thinking_under_both_names():
    with fake() as llm:
        [output] = llm.chat(HI)
        message = output.to_openai(chat=True)["choices"][0]["message"]
        assert message == {
            "role": "assistant",
            "reasoning_content": "Let me see < 3.",
            "reasoning": "Let me see < 3.",
            "content": "It is <b>4</b>.",
        }
        deltas = [piece.to_openai(chat=True)["choices"][0]["delta"] for piece in llm.stream(HI)]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Let me see < 3."
        assert "".join(delta["content"] for delta in deltas) == "It is <b>4</b>."
        assert any("reasoning" not in delta for delta in deltas)


def test_an_error_stays_an_error():
    with fake([ValueError("boom"), RAW]) as llm:
        first, second = llm.chat([HI, HI], errors="return")
        assert (first.error, first.text, first.reasoning) == ("ValueError: boom", "", None)
        assert second.reasoning == "Let me see < 3."


def test_a_template_that_opens_the_thinking_is_followed():
    with fake("so\n</think>\n\nyes") as llm:
        llm._fake.model.chat_template = "{{ messages[0].content }}<think>\n"
        [output] = llm.chat(HI)
        assert (output.reasoning, output.text) == ("so", "yes")


@pytest.mark.parametrize("tags", ["<think>", ("a",), ("a", "a"), ("", "b")])
def test_wrong_tags_are_refused(tags):
    with pytest.raises(ConfigError, match="reasoning_tags"):
        FakeLLM(reasoning_tags=tags)
    with pytest.raises(ConfigError, match="reasoning_format is 'deepseek'"):
        FakeLLM(reasoning_format="deepseek")


def test_a_budget_needs_known_tags():
    with FakeLLM() as llm, pytest.raises(SamplingError, match=r"thinking_token_budget is 5.*reasoning_tags"):
        llm.chat(HI, {"thinking_token_budget": 5})
    with fake() as llm:
        llm.chat(HI, {"thinking_budget": 5})
    assert SamplingParams.from_options(thinking_budget=7).thinking_token_budget == 7
    with pytest.raises(SamplingError, match="thinking_token_budget is -1"):
        SamplingParams(thinking_token_budget=-1)


@pytest.mark.parametrize("stream", [False, True])
def test_the_error_of_a_request_comes_through_though_its_parser_fails(stream):
    def make_parser(request, index):
        raise ValueError("no parser for this")

    with fake(lambda request: "abc") as llm:
        [output] = llm.chat([HI])
        [request] = llm._prepared(
            lambda inputs: inputs.conversations([HI], None, ChatOptions(), errors="raise")
        ).requests
    behind, seen = Behind(), []
    FrontClient(behind).submit([replace(request, make_parser=make_parser)], seen.extend, stream=stream)
    whole = replace(output, request_id=request.request_id)
    with pytest.raises(ValueError, match="no parser for this"):
        behind.sinks[0]([SequenceOutput(request.request_id, (1,), "abc", finished=whole)])
    behind.sinks[0]([SequenceOutput(request.request_id, (), "", finished=replace(whole, error="no parser for this"))])
    assert [each.finished.error for each in seen] == ["no parser for this"]


def test_parsers_are_let_go_as_soon_as_their_request_has_ended():
    """A call may have a million prompts, whose parsers would fill the memory."""
    with fake() as llm:
        outputs = llm.chat([HI] * 3, {"n": 2})
        requests = llm._prepared(
            lambda inputs: inputs.conversations([HI] * 3, {"n": 2}, ChatOptions(), errors="raise")
        ).requests
    made = []

    def make_parser(request, index):
        made.append(weakref.ref(parser := OutputParser(ChatFormat())))
        return parser

    behind, seen = Behind(), []
    FrontClient(behind).submit([replace(each, make_parser=make_parser) for each in requests], seen.extend, stream=True)
    for request, output in zip(requests, outputs, strict=True):
        finished = replace(output, request_id=request.request_id)
        for index in (0, 1):
            behind.sinks[0]([SequenceOutput(request.request_id, (1,), "a", index=index)])
        behind.sinks[0]([SequenceOutput(request.request_id, (1,), "b", index=1, finished=finished)])
        assert [ref() for ref in made] == [None] * len(made)


def test_a_request_that_never_ran_has_no_thinking_also_where_the_prompt_opens_it():
    def refuse(request):
        raise ValueError("no")

    opens = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    with fake(refuse) as llm:
        [output] = llm.chat(HI, chat_template=opens, errors="return")
    assert (output.finish_reason, output.reasoning, output.text) == ("error", None, "")


def test_without_a_stream_no_piece_has_raw_text():
    with fake() as llm:
        [output] = llm.chat(HI)
        [request] = llm._prepared(lambda inputs: inputs.conversations(HI, None, ChatOptions(), errors="raise")).requests
    behind, seen = Behind(), []
    FrontClient(behind).submit([request], seen.extend)
    behind.sinks[0](
        [SequenceOutput(request.request_id, (1,), RAW, finished=replace(output, request_id=request.request_id))]
    )
    assert seen[0].text == ""
