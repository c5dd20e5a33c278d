"""Forced tool calls on the bundled model, in the notation of each family, beside other requests and in children."""

import json

import pytest

from llamabatch import LLM, SamplingParams
from llamabatch.chat.tool_formats import FORMATS, GENERIC
from llamabatch.jobs import Settings, run
from tests.unit.chat.test_tool_formats import EXCERPTS

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "days", "unit"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time"}}
TOOLS = [WEATHER, CLOCK]
NAMED = {"type": "function", "function": {"name": "weather"}}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
CHATML = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
WILD = SamplingParams(temperature=2.0, max_tokens=300, seed=15, n=4)
FAMILIES = sorted({each.name for each in (*FORMATS, GENERIC)})


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", n_slots=8) as llm:
        yield llm


def check(call, names=("weather", "clock")):
    assert call.name in names
    if call.name == "clock":
        assert call.parsed == {}
    else:
        assert set(call.parsed) == {"city", "days", "unit"}
        assert len(call.parsed["city"]) <= 12
        assert 1 <= call.parsed["days"] <= 9
        assert call.parsed["unit"] in ("C", "F")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_call_is_whole_and_fits_its_schema(llm, family):
    """The temperature is so high that the model writes noise."""
    template = f"{{# {EXCERPTS[family]} #}}{CHATML}"
    for choice, parallel in (("required", False), (NAMED, False)):
        [out] = llm.chat(
            ASKED, WILD, tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel, chat_template=template
        )
        whole = [each for each in out.outputs if each.finish_reason == "stop"]
        assert whole == list(out.outputs) or family == "gpt-oss", "noise may think to the end"
        for each in whole:
            assert each.text == ""
            [call] = each.tool_calls
            check(call, ("weather",) if choice is NAMED else ("weather", "clock"))


def test_several_calls_come_if_they_may(llm):
    """A model that cannot end makes call after call. Each is complete, except the one that max_tokens cuts."""
    template = f"{{# {EXCERPTS['hermes']} #}}{CHATML}"
    endless = SamplingParams(temperature=0, max_tokens=300, logit_bias=dict.fromkeys(llm.vocab.eog_token_ids, -100))
    [out] = llm.chat(ASKED, endless, tools=TOOLS, tool_choice="required", chat_template=template)
    assert out.finish_reason == "length"
    assert not out.text or out.text.startswith("\n<tool_call>"), "a call that was cut before it had begun"
    assert len(out.tool_calls) > 2
    for call in out.tool_calls[:-1]:
        check(call)
    one = {"tool_choice": "required", "parallel_tool_calls": False}
    [out] = llm.chat(ASKED, endless, tools=TOOLS, chat_template=template, **one)
    assert (len(out.tool_calls), out.finish_reason) == (1, "stop")


def test_calls_are_the_same_in_other_processes(llm):
    greedy = SamplingParams(temperature=0, max_tokens=200, seed=1)

    def run(llm):
        pieces = list(llm.stream([ASKED, "Once"], greedy, tools=TOOLS, tool_choice="required"))
        outs = {piece.prompt_index: piece.finished for piece in pieces if piece.finished is not None}
        arguments = "".join(call.arguments for piece in pieces for call in piece.tool_calls)
        assert arguments == outs[0].tool_calls[0].arguments
        assert outs[1].tool_calls == ()
        return outs[0].tool_calls

    with LLM("tiny", strategy="multi-instance", instances=2) as other:
        assert run(other) == run(llm)


def test_a_strict_function_leaves_other_text_free(llm):
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    template = f"{{# {EXCERPTS['hermes']} #}}{CHATML}"
    greedy = SamplingParams(temperature=0, max_tokens=40, logit_bias=dict.fromkeys(llm.vocab.eog_token_ids, -100))
    held = llm.chat(ASKED, greedy, tools=[strict], chat_template=template)[0]
    free = llm.generate([held.prompt_token_ids], greedy)[0]
    assert held.text == free.text
    assert len(held.text) > 40
    assert held.tool_calls == free.tool_calls == ()


def test_a_schema_that_cannot_be_a_grammar_ends_its_own_request(llm):
    bad = {"function": {"name": "bad", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}}
    greedy = SamplingParams(temperature=0, max_tokens=60)
    refused = llm.chat(ASKED, greedy, tools=[bad], tool_choice="required", errors="return")[0]
    assert refused.error.startswith("tools are refused: argument 'a' of 'bad': not of a JSON schema is {}")
    beside = llm.chat(ASKED, greedy, tools=[bad, CLOCK], tool_choice="required")[0]
    assert ([call.name for call in beside.tool_calls], beside.not_held) == (["clock"], ("function 'bad'",))
    bad["function"]["parameters"]["properties"]["a"] = {"type": "string", "pattern": "(?=a)"}
    beside = llm.chat(ASKED, greedy, tools=[bad, CLOCK], tool_choice="required")[0]
    assert ([call.name for call in beside.tool_calls], beside.not_held) == (["clock"], ("function 'bad'",))
    assert llm.chat(ASKED, greedy, tools=[bad])[0].error is None


def test_a_job_has_calls_and_a_second_run_writes_the_same_bytes(tmp_path):
    asked = {"messages": ASKED, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "temperature": 1.5}
    lines = [{"id": "a", **asked}, {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": asked}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    written = []
    for name in ("one.jsonl", "two.jsonl"):
        run(Settings(str(tmp_path / "in.jsonl"), str(tmp_path / name), seed=7))
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]
    flat, batch = (json.loads(line) for line in written[0].splitlines())
    [choice] = batch["response"]["body"]["choices"]
    for calls in (flat["tool_calls"], choice["message"]["tool_calls"]):
        assert set(calls[0]) == {"id", "type", "function"}
        assert isinstance(json.loads(calls[0]["function"]["arguments"]), dict)
    assert (flat["text"], flat["finish_reason"], choice["finish_reason"]) == ("", "stop", "tool_calls")
