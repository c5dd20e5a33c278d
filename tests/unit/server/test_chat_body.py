"""The body of a chat completion is read as a ChatBody."""

import datetime
from dataclasses import replace

import pytest

from llamabatch.chat.conversation import render
from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.request.parameter_names import ALIASES
from llamabatch.request.samplers import CHAIN
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.server.http.errors import ApiError
from llamabatch.server.openai.completion_body import COMPLETION, read_completion
from llamabatch.server.request.body import Rules
from llamabatch.server.request.chat_body import CHAT, read_chat
from llamabatch.server.request.prompts import MAX_PROMPTS
from llamabatch.testing import FakeLLM

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(rules=None, **fields):
    return read_chat({"messages": HELLO, **fields}, rules or Rules())


def completion(**fields):
    return read_completion({"prompt": "Hello", **fields})


def refused(read, **fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400, caught.value.message
    return caught.value


def test_a_body_has_the_usual_values_of_its_endpoint():
    body = chat()
    assert (body.params, body.stream, body.ignored, body.model) == (SamplingParams(max_tokens=None), False, (), None)
    assert completion().params == SamplingParams(max_tokens=16)
    rules = Rules(sampling={"max_tokens": 5, "temperature": 0})
    assert chat(rules).params == SamplingParams(max_tokens=5, temperature=0)
    assert chat(rules, temperature=None, max_tokens=7).params == SamplingParams(max_tokens=7, temperature=0)


def test_every_name_of_a_parameter_is_known():
    names = {*vars(SamplingParams())} | set(ALIASES)
    assert names - set(CHAT) == {"logits_processor"}, "functions cannot be sent"
    assert names - set(COMPLETION) == {"logits_processor"}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"n_predict": 3}, {"max_tokens": 3}),
        ({"n_predict": -1}, {}),
        ({"max_completion_tokens": 4, "max_tokens": 4}, {"max_tokens": 4}),
        ({"repeat_penalty": 1.5, "repeat_last_n": -1}, {"repetition_penalty": 1.5, "repeat_last_n": -1}),
        ({"penalty_last_n": 64, "repeat_penalty": 1.5}, {"repeat_last_n": 64, "repetition_penalty": 1.5}),
        ({"stop": ""}, {}),
        ({"stop": ["", "x"]}, {"stop": ["x"]}),
        ({"dry_sequence_breakers": '["a", "b"]'}, {"dry_sequence_breakers": ["a", "b"]}),
        ({"truncate_prompt_tokens": 7, "n_keep": 3}, {"truncate_prompt_tokens": 7, "n_keep": 3}),
        ({"truncate_prompt_tokens": -1}, {"overflow": "truncate"}),
        ({"cache_salt": "red"}, {"cache_salt": "red"}),
        ({"seed": -1}, {}),
        ({"seed": -2}, {"seed": 2**64 - 2}),
        ({"samplers": ["temp", "top_k"]}, {"samplers": ("temperature", "top_k")}),
        ({"samplers": "edskypmxt"}, {"samplers": CHAIN}),
        ({"samplers": []}, {"samplers": ()}),
        ({"logit_bias": {"5": 1, "6": False}}, {"logit_bias": {5: 1, 6: -100}}),
        ({"logit_bias": [[5, 1.5], ["6", -1]]}, {"logit_bias": {5: 1.5, 6: -1}}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": True, "top_logprobs": 1}, {"logprobs": 1}),
        ({"top_logprobs": 1, "logprobs": True}, {"logprobs": 1}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": False}, {}),
        (
            {"response_format": {"type": "text"}, "guided_choice": ["a", "b"]},
            {"structured_outputs": {"choice": ["a", "b"]}},
        ),
        ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}),
        ({"json_schema": {"type": "array"}}, {"structured_outputs": {"json": {"type": "array"}}}),
        ({"grammar": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        ({"grammar": ""}, {}),
        ({"service_tier": "flex"}, {"background": True}),
        ({"service_tier": "priority"}, {"priority": -1}),
        ({"service_tier": "priority", "priority": 5}, {"priority": 5}),
        ({"service_tier": "auto"}, {}),
        ({"deadline_s": 5}, {"deadline_s": 5}),
        ({"thinking_budget_tokens": 5}, {"thinking_token_budget": 5}),
        ({"reasoning_budget_tokens": -1}, {}),
        ({"n_cmpl": 2}, {"n": 2}),
        ({"ignore_eos": True, "stop": ["x"]}, {"ignore_eos": True, "stop": "x"}),
        ({"min_tokens": 2, "stop_token_ids": [3]}, {"min_tokens": 2, "stop_token_ids": [3]}),
        ({"user": "u", "metadata": {}, "store": True, "use_beam_search": False}, {}),
    ],
)
def test_parameters_have_the_names_of_three_servers(given, meant):
    body = chat(**given)
    assert body.params == SamplingParams(**{"max_tokens": None, **meant})
    assert body.ignored == ()


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_predict": 5, "max_tokens": 6}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"n": 2.5}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "best_of": 2}, "best_of"),
        ({"service_tier": "scale"}, "service_tier"),
        ({"repeat_last_n": -2}, "repeat_last_n"),
        ({"samplers": 1}, "samplers"),
        ({"samplers": "q" * 65}, "samplers"),
        ({"dry_sequence_breakers": f'["a",{" " * 5000}"b"]'}, "dry_sequence_breakers"),
        ({"logit_bias": 5}, "logit_bias"),
        ({"logit_bias": {"a": True}}, "logit_bias"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"lora": {}}, "lora"),
        ({"lora": [{"id": 0}, {"id": 0}]}, "lora"),
        ({"lora": [], "adapters": {}}, "adapters"),
        ({"request_id": "a b"}, "request_id"),
        ({"model": 5}, "model"),
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"messages": ["hello"]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL], "functions": []}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"function_call": "required"}, "function_call"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True}, "echo"),
        ({"cache_prompt": "no"}, "cache_prompt"),
        ({"reasoning_format": "deepseek-legacy"}, "reasoning_format"),
        ({"reasoning_budget_message": "Stop."}, "reasoning_budget_message"),
        ({"logit_bias": [[5, 1], [5, 2]]}, "logit_bias"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"logits_processors": ["f"]}, "logits_processors"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_by_name(given, param):
    error = refused(chat, **given)
    assert (error.type, error.param) == ("invalid_request_error", param), error.message


def test_a_limit_of_0_generates_nothing():
    for name in ("n_predict", "max_tokens", "max_completion_tokens"):
        body = chat(**{name: 0})
        assert (body.no_output, body.params.max_tokens) == (True, 1)
    assert not chat(n_predict=1).no_output


def test_null_is_an_empty_text_of_a_message():
    [message] = chat(messages=[{"role": "user", "content": None}]).conversation
    assert message["content"] == ""


def test_thinking_stays_in_the_text_where_the_body_wants_it():
    assert chat(reasoning_format="none").options.reasoning_format == "none"
    assert {chat(reasoning_format=name).options.reasoning_format for name in ("auto", "deepseek", None)} == {None}


def test_cache_prompt_false_computes_the_whole_prompt():
    assert chat(cache_prompt=False).params.skip_reading_prefix_cache
    assert chat(skip_reading_prefix_cache=True).params.skip_reading_prefix_cache
    assert not chat(cache_prompt=True).params.skip_reading_prefix_cache


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_parts_that_are_no_text_are_refused_by_name(kind):
    content = [{"type": "text", "text": "What is it?"}, {"type": kind, kind: {"url": "data:x"}}]
    error = refused(chat, messages=[{"role": "user", "content": content}])
    assert kind in error.message
    assert "only parts of type 'text'" in error.message
    assert error.param == "messages"
    user, answer = {"role": "user", "content": content}, {"role": "assistant", "content": "It is a cat."}
    assert refused(chat, messages=[user, answer, user, *HELLO]).message.startswith("messages[2]")
    assert chat(messages=[user, answer, *HELLO]).ignored == (f"messages[0].content[1]:{kind}",)


def test_answers_are_streamed_with_counts():
    body = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert (body.stream, body.include_usage, body.continuous_usage) == (True, True, True)
    body = chat(stream=True, stream_options={"include_obfuscation": False}, topp=1)
    assert body.ignored == ("topp", "stream_options.include_obfuscation")
    assert not body.include_usage


def test_tools_of_the_old_form_become_tools():
    function = TOOL["function"]
    body = chat(functions=[function], function_call={"name": "f"})
    assert body.functions
    assert body.options.tools == [TOOL]
    assert body.options.tool_choice == {"type": "function", "function": {"name": "f"}}
    call = {"name": "f", "arguments": "{}"}
    told = [
        *HELLO,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "1"},
    ]
    _, asked, answered = chat(messages=told).conversation
    assert asked["tool_calls"] == [{"id": "call_0", "type": "function", "function": call}]
    assert (answered["role"], answered["tool_call_id"]) == ("tool", "call_0")
    assert chat(tools=[], tool_choice="none").options.tools is None


def test_thinking_is_set_by_effort():
    assert chat(reasoning_effort="high").options.kwargs == {"reasoning_effort": "high"}
    assert chat(reasoning_effort="none").options.kwargs == {"enable_thinking": False}
    rules = Rules(template_kwargs={"a": 1, "b": 2})
    assert chat(rules, chat_template_kwargs={"a": 3}).options.kwargs == {"a": 3, "b": 2}
    assert not chat(include_reasoning=False).include_reasoning


def test_thinking_of_the_server_is_for_templates_that_read_it():
    assert "enable_thinking" not in chat().options.usual
    body = chat(Rules(enable_thinking=False))
    assert body.options.usual["enable_thinking"] is False
    assert "chat_template_kwargs" not in body.options.given
    template = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}"
    for rules, end in ((Rules(enable_thinking=True), "<think>"), (Rules(enable_thinking=False), ""), (Rules(), "")):
        assert render(template, HELLO, "", "", chat(rules).options) == f"Hello{end}"
    off = chat(Rules(enable_thinking=True), chat_template_kwargs={"enable_thinking": False})
    assert render(template, HELLO, "", "", off.options) == "Hello"
    assert render("{{ messages[0].content }}", HELLO, "", "", chat(Rules(enable_thinking=True)).options) == "Hello"


def test_a_template_that_reads_the_day_gets_it():
    today = datetime.date.today()
    assert render("{{ date_string }}", HELLO, "", "", chat().options) == today.strftime("%d %b %Y")
    assert render("{{ datetime }}{{ functions }}", HELLO, "", "", chat().options) == today.strftime("%b %d %Y")
    fixed = chat(chat_template_kwargs={"date_string": "1 May 1851"})
    assert render("{{ date_string }}", HELLO, "", "", fixed.options) == "1 May 1851"


def test_a_bias_may_be_said_twice():
    assert chat(logit_bias=[[5, -100], [6, 1], [5, -100]]).params.biases == ((5, -100.0), (6, 1.0))


def test_a_template_needs_trust_and_is_never_a_path():
    rules = Rules(trust_templates=True, template="of the server")
    assert chat(rules, chat_template="/etc/passwd").options.template == "/etc/passwd"
    assert chat(rules).options.template == "of the server"


def test_the_shorter_deadline_holds():
    assert chat(Rules(timeout_s=3.0), deadline_s=5).params.deadline_s == 3.0
    assert chat(Rules(timeout_s=8.0), deadline_s=5).params.deadline_s == 5
    assert chat(Rules(timeout_s=8.0)).params.deadline_s == 8.0


def test_adapters_are_named_or_numbered():
    assert chat(adapters={"a": 0.5}).adapter_scales(()) == {"a": 0.5}
    assert chat().adapter_scales(("a",)) is None
    assert chat(lora=[{"id": 1, "scale": 0.5}, {"id": 0, "scale": 0}]).adapter_scales(("a", "b")) == {"b": 0.5}
    with pytest.raises(ValueError, match="known are 0 to 0"):
        chat(lora=[{"id": 1}]).adapter_scales(("a",))


def test_a_body_becomes_a_submission():
    with FakeLLM() as llm:
        processor = InputProcessor(llm._client)
        [request] = (
            chat(messages=[{"role": "developer", "content": "Hi"}], logit_bias={"a": 2}).submission(processor).requests
        )
        assert "system" in request.prompt
        assert request.params.biases
        assert request.params.biases[0][1] == 2.0
        submission = completion(prompt=["a", [1, 2]], n=2).submission(processor)
        assert [request.prompt_token_ids for request in submission.requests][1] == (1, 2)
        assert submission.n == 2
        with pytest.raises(ValueError, match=r"prompts\[1\]"):
            completion(prompt=["a", [10**6]]).submission(processor)


def test_special_tokens_of_a_prompt_are_tokens():
    with FakeLLM() as llm:
        processor = InputProcessor(llm._client)
        ids = [
            completion(prompt=text, **more).submission(processor).requests[0].prompt_token_ids
            for text, more in (
                ("<|im_start|>user", {}),
                ("<|bos|><|im_start|>user", {}),
                ("<|im_start|>user", {"add_special_tokens": False}),
            )
        ]
        assert ids[0] == ids[1] == (0, *ids[2]), "BOS comes once"
        assert ids[2][0] == 2
        [request] = completion(prompt="<|im_start|>user").submission(processor).requests
        assert request.prompt == "<|im_start|>user"


def test_prompts_are_texts_token_ids_or_lists_of_them():
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert completion(prompt=[[1, 2], "b"]).prompts == ((1, 2), "b")
    for given in ("", [], [[]], {}, 5, [1.5], ["a", 5], [""], ["a"] * (MAX_PROMPTS + 1), [None], [-1], [[True]]):
        error = refused(completion, prompt=given)
        assert error.param in ("prompt", None), error.message


def test_echo_asks_for_the_logprobs_of_the_prompt():
    body = completion(echo=True, logprobs=1, max_tokens=0)
    assert (body.echo, body.no_output, body.prompt_logprobs) == (True, True, False)
    assert (body.params.max_tokens, body.params.logprobs, body.params.prompt_logprobs) == (1, 1, 1)
    body = completion(prompt_logprobs=2)
    assert (body.echo, body.prompt_logprobs, body.params.logprobs) == (False, True, None)
    assert completion(n_predict=0).no_output
    assert not completion(max_tokens=1).no_output
    assert not completion(max_tokens=0, max_completion_tokens=5).no_output
    assert refused(completion, max_tokens=0, n=2).param == "n"


def test_thinking_that_the_model_has_no_use_for_is_ignored_by_name():
    silent = Rules(variables=frozenset({"messages"}), thinks=False)
    for effort, ignored in (("high", ("reasoning_effort",)), ("none", ()), (None, ())):
        body = chat(silent, reasoning_effort=effort)
        assert (dict(body.options.kwargs), body.ignored) == ({}, ignored)
    always = Rules(variables=frozenset(), thinks=True)
    assert chat(always, reasoning_effort="none").ignored == ("reasoning_effort",)
    switched = Rules(variables=frozenset({"enable_thinking"}), thinks=True)
    body = chat(switched, reasoning_effort="none")
    assert (dict(body.options.kwargs), body.ignored) == ({"enable_thinking": False}, ())
    for name, value in (("reasoning_effort", "low"), ("enable_thinking", False), ("thinking", True)):
        body = chat(replace(silent, template_kwargs={name: value}), chat_template_kwargs={name: value})
        assert (dict(body.options.kwargs), body.ignored) == ({}, (f"chat_template_kwargs.{name}",))
        body = chat(replace(silent, variables=frozenset({name})), chat_template_kwargs={name: value})
        assert (dict(body.options.kwargs), body.ignored) == ({name: value}, ())
    # this template must get any other variable
    assert chat(silent, chat_template_kwargs={"persona": "owl"}).options.kwargs == {"persona": "owl"}
    own = Rules(trust_templates=True, variables=frozenset())
    body = chat(own, chat_template="{{ reasoning_effort }}", reasoning_effort="low")
    assert (dict(body.options.kwargs), body.ignored) == ({"reasoning_effort": "low"}, ())
    with pytest.raises(ApiError, match="reasoning_effort is 'high', which has no effect: the chat template"):
        chat(replace(silent, strict=True), reasoning_effort="high")


def test_unknown_samplers_are_ignored_once_each():
    body = chat(samplers="qq" + "edskypmxt")
    assert (body.ignored, body.params.chain) == (("samplers:q",), CHAIN)
