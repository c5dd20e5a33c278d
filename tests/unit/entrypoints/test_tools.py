"""Tools in every verb: the calls that come back, streamed and whole, and what is refused."""

import asyncio
import json

import pytest

from llamabatch import SamplingParams
from llamabatch.chat.options import ChatOptions
from llamabatch.errors import PromptError, PromptWarning, SamplingError
from llamabatch.testing import FakeAsyncLLM, FakeLLM

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
ASKED = [{"role": "user", "content": "What is the weather in Oslo?"}]
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
BOTH = f'[{CALL}, {{"name": "clock", "arguments": {{}}}}]'
HERMES = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
NAMED = {"type": "function", "function": {"name": "clock"}}
GREEDY = SamplingParams(temperature=0, max_tokens=200, seed=1)


def joined(pieces):
    """Returns the text and the calls of a stream's pieces, by continuation."""
    texts, calls = {}, {}
    for piece in pieces:
        texts[piece.index] = texts.get(piece.index, "") + piece.text
        of_one = calls.setdefault(piece.index, [])
        for delta in piece.tool_calls:
            if delta.id is not None:
                of_one.append([delta.id, delta.name, ""])
            of_one[delta.index][2] += delta.arguments
    return texts, calls


def test_an_answer_that_calls_has_calls_and_no_text():
    with FakeLLM(answers=CALL) as llm:
        [out] = llm.chat(ASKED, GREEDY, tools=TOOLS)
    [call] = out.tool_calls
    assert (call.name, call.parsed, out.text, out.finish_reason) == ("weather", {"city": "Oslo"}, "", "stop")
    assert call.id.startswith("call_")
    assert out.outputs[0].tool_calls == out.tool_calls


def test_without_tools_the_same_answer_is_text():
    with FakeLLM(answers=CALL) as llm:
        assert llm.chat(ASKED, GREEDY)[0].text == CALL
        assert llm.generate("x", GREEDY)[0].text == CALL
        [out] = llm.chat(ASKED, GREEDY, tools=TOOLS, tool_choice="none")
        assert (out.text, out.tool_calls) == (CALL, ())
        assert "weather" in llm.requests[-1].prompt, "the tools stay in the prompt"


@pytest.mark.parametrize("n", [1, 3])
def test_the_pieces_of_a_stream_make_up_the_whole(n):
    params = SamplingParams(n=n, temperature=1, max_tokens=200, seed=1)
    with FakeLLM(answers=BOTH) as llm:
        pieces = list(llm.stream(ASKED, params, tools=TOOLS))
        [whole] = llm.chat(ASKED, params, tools=TOOLS)
    texts, calls = joined(pieces)
    assert pieces[-1].finished.outputs == whole.outputs
    for each in whole.outputs:
        assert texts[each.index] == each.text == ""
        assert calls[each.index] == [[call.id, call.name, call.arguments] for call in each.tool_calls]
    ids = [call.id for each in whole.outputs for call in each.tool_calls]
    assert len(set(ids)) == 2 * n
    ends = [piece.to_openai(chat=True)["choices"][0] for piece in pieces]
    assert [end["finish_reason"] for end in ends if end["finish_reason"]] == ["tool_calls"] * n


def test_openais_shapes():
    with FakeLLM(answers=CALL) as llm:
        [out] = llm.chat(ASKED, GREEDY, tools=TOOLS)
        chunks = [piece.to_openai(chat=True) for piece in llm.stream(ASKED, GREEDY, tools=TOOLS)]
    [choice] = json.loads(json.dumps(out.to_openai(chat=True)))["choices"]
    [call] = out.tool_calls
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call.id, "type": "function", "function": function}],
    }
    assert choice["finish_reason"] == "tool_calls"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"][0]["delta"].get("tool_calls")]
    [first, *later] = [delta["tool_calls"][0] for delta in deltas]
    assert (first["index"], first["id"], first["type"], first["function"]["name"]) == (
        0,
        call.id,
        "function",
        "weather",
    )
    assert all(set(delta) == {"index", "function"} for delta in later)
    assert "".join(each["function"]["arguments"] for each in (first, *later)) == function["arguments"]


def test_a_call_that_is_cut_ends_by_length():
    with FakeLLM(answers=CALL) as llm:
        [out] = llm.chat(ASKED, SamplingParams(max_tokens=20), tools=TOOLS)
    [call] = out.tool_calls
    assert call.parsed is None
    assert '{"city": "Oslo"}'.startswith(call.arguments)
    assert out.to_openai(chat=True)["choices"][0]["finish_reason"] == "length"


def test_the_same_seed_and_prompt_give_the_same_ids():
    with FakeLLM(answers=BOTH) as llm:
        ids = [[call.id for call in llm.chat(ASKED, GREEDY, tools=TOOLS)[0].tool_calls] for _ in range(2)]
        later = [*ASKED, {"role": "assistant", "content": "Yes?"}, *ASKED]
        [other] = llm.chat(later, GREEDY, tools=TOOLS)
    assert ids[0] == ids[1]
    assert not set(ids[0]) & {call.id for call in other.tool_calls}


def test_a_conversation_goes_on_after_a_call():
    """The answer of a tool, and the call before it, are in the next prompt, even if the template knows no tools."""
    with FakeLLM(answers=[CALL, "Rain.", CALL, "Rain."]) as llm:
        for template in (None, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"):
            [out] = llm.chat(ASKED, GREEDY, tools=TOOLS, chat_template=template)
            message = out.to_openai(chat=True)["choices"][0]["message"]
            answer = {"role": "tool", "tool_call_id": out.tool_calls[0].id, "content": "wet"}
            [last] = llm.chat([*ASKED, message, answer], GREEDY, tools=TOOLS, chat_template=template)
            assert last.text == "Rain."
            assert last.tool_calls == ()
            assert '"city": "Oslo"' in last.prompt
            assert "wet" in last.prompt
    assert last.prompt.startswith("<system>You may call these functions")
    assert f"<assistant>{CALL}<user>The function returned: wet" in last.prompt


def test_a_template_without_a_system_message_gets_the_tools_in_the_first_one():
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    with FakeLLM(answers=CALL) as llm:
        [out] = llm.chat(ASKED, GREEDY, tools=TOOLS, chat_template=template)
        assert out.prompt.startswith("<user>You may call these functions")
        assert out.prompt.endswith("What is the weather in Oslo?")
        [out] = llm.chat([{"role": "system", "content": "Be kind."}, *ASKED], GREEDY, tools=TOOLS, errors="return")
        assert out.error is None


def test_the_notation_is_that_of_the_template_in_force():
    written = f"Sure. <tool_call>\n{CALL}\n</tool_call>"
    with FakeLLM(answers=written) as llm:
        [out] = llm.chat(ASKED, GREEDY, tools=TOOLS, chat_template=HERMES)
        assert (out.text, out.tool_calls[0].name) == ("Sure. ", "weather")
        assert llm.chat(ASKED, GREEDY, tools=TOOLS)[0].text == written


def test_one_call_at_most_without_parallel_calls():
    with FakeLLM(answers=BOTH) as llm:
        [out] = llm.chat(ASKED, GREEDY, tools=TOOLS, parallel_tool_calls=False)
        assert [call.name for call in out.tool_calls] == ["weather"]
        [pair] = llm.as_completed(ASKED, GREEDY, tools=TOOLS, parallel_tool_calls=True)
        assert [call.name for call in pair[1].tool_calls] == ["weather", "clock"]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_held_by_a_grammar(choice):
    with FakeLLM(answers=CALL) as llm:
        llm.chat(ASKED, GREEDY, tools=TOOLS, tool_choice=choice)
        [request] = llm.requests
    assert request.params.structured_outputs.kind == "tools"
    assert ("weather" in request.params.structured_outputs.text) == (choice == "required")


def test_only_conversations_are_read_for_calls():
    with FakeLLM(answers=CALL) as llm:
        one, other = [out for _, out in sorted(llm.as_completed(["x", ASKED], GREEDY, tools=TOOLS))]
    assert (one.text, one.tool_calls) == (CALL, ())
    assert other.tool_calls[0].name == "weather"


def test_tools_work_for_asyncio():
    async def run():
        async with FakeAsyncLLM(answers=CALL) as llm:
            [out] = await llm.chat(ASKED, GREEDY, tools=TOOLS, tool_choice="required")
            pieces = [piece async for piece in llm.stream(ASKED, GREEDY, tools=TOOLS, tool_choice=NAMED)]
            pairs = [pair async for pair in llm.as_completed(ASKED, GREEDY, tools=TOOLS, tool_choice="none")]
        return out, pieces, pairs

    out, pieces, [(_, silent)] = asyncio.run(run())
    assert out.tool_calls[0].parsed == {"city": "Oslo"}
    assert joined(pieces)[1][0][0][1:] == ["weather", '{"city": "Oslo"}']
    assert silent.text == CALL


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tool_choice": "maybe"}, "tool_choice is 'maybe'; give 'auto', 'none', 'required'"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice is {'type': 'allowed_tools'}; give"),
        ({"tool_choice": {"function": {"name": "clok"}}}, "names 'clok', which is not in tools; did you mean"),
        ({"tool_choice": "required", "tools": None}, "tool_choice is 'required', and there are no tools"),
        ({"tool_choice": "required", "tools": []}, "there are no tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls is 'no'"),
        ({"tools": [CLOCK, CLOCK]}, "two functions of the name 'clock'"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "a function of the name ''"),
        ({"tools": [{**CLOCK, "type": "web_search"}]}, r"tools\[0\] is of type 'web_search'"),
        ({"tools": [{"function": {"name": "f", "parameters": [1]}}]}, r"the parameters of 'f' are \[1\]"),
        ({"tools": [{"function": {"name": "f", "parameters": {"a": {1}}}}]}, "'f' cannot be written as JSON"),
        ({"chat_template_kwargs": {"tool_choice": "auto"}}, "'tool_choice', which is a separate argument"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(options, words):
    with FakeLLM(answers=CALL) as llm, pytest.raises(PromptError, match=words):
        llm.chat(ASKED, GREEDY, **{"tools": TOOLS, **options})


def test_of_some_allowed_tools_no_other_is_called():
    one = {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    with FakeLLM(answers='{"name": "clock", "arguments": {}}') as llm:
        [out] = llm.chat(ASKED, GREEDY, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": one})
    assert [call.name for call in out.tool_calls] == ["clock"]
    for mode, forced in (("required", {"clock": {}}), ("auto", None)):
        options = ChatOptions(TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": one | {"mode": mode}})
        assert options.forced_tools == forced
        assert options.free_schemas == {"clock": {"type": "object"}}
        assert options.allows_some


def test_a_form_beside_tools_is_of_answers_that_do_not_call():
    form = SamplingParams(structured_outputs={"json": {"type": "object", "properties": {"a": {}}}}, max_tokens=50)
    template = f'{{# <tool_call> arguments "name" #}}{HERMES}'
    written = f"<tool_call>\n{CALL}\n</tool_call>"
    with FakeLLM(answers=["{}", written]) as llm:
        answer, call = llm.chat([ASKED, ASKED], form, tools=TOOLS, chat_template=template)
        assert (answer.text, answer.tool_calls) == ("{}", ())
        assert (call.text, [each.name for each in call.tool_calls]) == ("", ["weather"])
    with FakeLLM(answers="{}") as llm:
        assert llm.chat(ASKED, form, tools=TOOLS, tool_choice="none")[0].text == "{}"
    with FakeLLM(answers=CALL) as llm:  # the answer's format does not bind a required call
        [out] = llm.chat(ASKED, form, tools=TOOLS, tool_choice="required")
        assert [each.name for each in out.tool_calls] == ["weather"]


def test_a_grammar_beside_tools_is_refused():
    form = SamplingParams(structured_outputs={"grammar": 'start: "a"'}, max_tokens=50)
    with FakeLLM(answers="a") as llm:
        with pytest.raises(SamplingError, match="grammar of structured_outputs and tools are both given"):
            llm.chat(ASKED, form, tools=TOOLS)
        assert llm.chat(ASKED, form, tools=TOOLS, tool_choice="none")[0].text == "a"
        with pytest.warns(PromptWarning, match="1 of 2 conversations failed"):
            _, fine = llm.chat([ASKED, ASKED], [form, GREEDY], tools=TOOLS)
        assert fine.error is None


@pytest.mark.parametrize("thought", ["<think>\nHm, weather.\n</think>\n\n", "<think>\n\n</think>\n\n"])
def test_calls_come_behind_the_thinking(thought):
    """A call within the thinking does not count. The streamed parts add up to the whole."""
    template = f'{{# <tool_call> arguments "name" </think> #}}{HERMES}'
    written = thought.replace("Hm", f"Hm <tool_call>{CALL}</tool_call>") + f"So:<tool_call>\n{CALL}\n</tool_call>"
    with FakeLLM(answers=written) as llm:
        [out] = llm.chat(ASKED, GREEDY, tools=TOOLS, chat_template=template)
        pieces = list(llm.stream(ASKED, GREEDY, tools=TOOLS, chat_template=template))
    assert (out.text, [call.name for call in out.tool_calls]) == ("So:", ["weather"])
    assert out.reasoning == thought.removeprefix("<think>").partition("</think>")[0].strip().replace(
        "Hm", f"Hm <tool_call>{CALL}</tool_call>"
    )
    assert "".join(piece.reasoning for piece in pieces) == out.reasoning
    texts, calls = joined(pieces)
    assert texts[0] == "So:"
    assert calls[0] == [[call.id, call.name, call.arguments] for call in out.tool_calls]


def test_a_call_of_kimi_ends_its_thinking():
    template = "{# <think> </think> <|im_middle|> <|tool_calls_section_begin|> #}" + HERMES
    written = (
        "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    with FakeLLM(answers=written) as llm:
        [out] = llm.chat(ASKED, GREEDY, tools=TOOLS, chat_template=template)
    assert (out.reasoning, out.text) == ("Hm.", "")
    assert [(call.id, call.parsed) for call in out.tool_calls] == [("functions.weather:0", {"city": "Oslo"})]


def test_a_strict_function_brings_a_grammar_that_waits_for_its_mark():
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    with FakeLLM(answers=CALL) as llm:
        llm.chat(ASKED, GREEDY, tools=[strict, CLOCK], chat_template=HERMES)
        llm.chat(ASKED, GREEDY, tools=[strict, CLOCK])  # calls of the generic notation begin with no mark
        llm.chat(ASKED, GREEDY, tools=TOOLS, chat_template=HERMES)
        forms = [request.params.structured_outputs for request in llm.requests]
    assert forms[0].kind == "tools"
    assert "free[lazy]" in forms[0].text
    assert forms[1:] == [None, None]


def test_gpt_oss_thinks_says_and_calls():
    template = "{# <|channel|>analysis <|message|> <|channel|>commentary functions. #}" + HERMES
    written = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Well.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
        '<|message|>{"city": "Oslo"}<|call|>'
    )
    with FakeLLM(answers=written) as llm:
        [out] = llm.chat(ASKED, GREEDY, tools=TOOLS, chat_template=template)
        texts, calls = joined(llm.stream(ASKED, GREEDY, tools=TOOLS, chat_template=template))
    assert (out.reasoning, out.text) == ("Hm.", "Well.")
    assert [(call.name, call.parsed) for call in out.tool_calls] == [("weather", {"city": "Oslo"})]
    assert (texts[0], calls[0][0][1:]) == ("Well.", ["weather", '{"city": "Oslo"}'])


def test_a_budget_beside_a_call_whose_grammar_holds_the_thinking_is_refused():
    template = (
        "{# <|channel|>analysis<|message|> <|channel|>commentary to=functions. #}"
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}<|start|>assistant"
    )
    budget = SamplingParams(thinking_token_budget=5)
    with FakeLLM(answers=CALL) as llm:
        with pytest.raises(SamplingError, match="thinking_token_budget is 5 beside a call that must come"):
            llm.chat(ASKED, budget, tools=TOOLS, tool_choice="required", chat_template=template)
        llm.chat(ASKED, budget, tools=TOOLS, chat_template=template)
