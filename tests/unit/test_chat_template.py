"""What a chat template is given: tools, variables, messages as OpenAI's API writes them."""

import json

import pytest

from llamabatch.chat import TEMPLATE_KWARGS, ChatOptions, render
from llamabatch.errors import PromptError

TEMPLATE = r"""
{%- if tools %}{{ "TOOLS " }}{{ tools | tojson }}{{ "\n" }}{% endif %}
{%- for m in messages %}
{{- m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}
{{- " CALL " + call.function.name + " " }}{{ call.function.arguments | tojson }}
{%- endfor %}
{{- "\n" }}
{%- endfor %}
{%- if enable_thinking %}THINK{% endif %}
{%- if add_generation_prompt %}assistant:{% endif %}"""
HI = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def text(conversation=HI, template=TEMPLATE, **options):
    return render(template, conversation, "", "", ChatOptions(**options))


def test_tools_reach_the_template():
    assert text(tools=[WEATHER]) == f"TOOLS {json.dumps([WEATHER])}\nuser: hi\nassistant:"


@pytest.mark.parametrize("tools", ["weather", {"function": {}}, [5], [{"function": {}}], [{"name": "weather"}]])
def test_what_are_no_tools_is_refused(tools):
    with pytest.raises(PromptError, match="tool"):
        text(tools=tools)


def test_variables_reach_the_template():
    assert text(kwargs={"enable_thinking": True}) == "user: hi\nTHINKassistant:"
    assert text(kwargs={"add_generation_prompt": False}) == "user: hi\n"


def test_variables_that_are_not_on_the_list_are_refused_with_the_nearest():
    with pytest.raises(PromptError, match=r"has 'enable_thinkin'.*did you mean 'enable_thinking'"):
        ChatOptions(kwargs={"enable_thinkin": True})
    for name in ("messages", "bos_token", "raise_exception", "tools"):
        assert name not in TEMPLATE_KWARGS
        with pytest.raises(PromptError, match=name):
            ChatOptions(kwargs={name: 1})
    with pytest.raises(PromptError, match="give a mapping"):
        ChatOptions(kwargs=[1])


def test_what_the_template_does_not_read_is_refused():
    with pytest.raises(PromptError, match="does not know 'documents'"):
        text(kwargs={"documents": []})
    with pytest.raises(PromptError, match="does not know 'tools'"):
        text(template="{{ messages[0].content }}", tools=[WEATHER])


def test_content_in_parts_and_calls_of_tools():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    conversation = [
        {"role": "user", "content": parts},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
    ]
    got = text(conversation)
    assert got == 'user: ab\nassistant: None CALL weather {"city": "Oslo"}\ntool: rain\nassistant:'
    assert call["function"]["arguments"] == '{"city": "Oslo"}', "the caller's message is left as it was"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": 5}, "content is 5"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "type 'image_url'; only text"),
        ({"role": "user", "content": ["a"]}, "type 'str'"),
        ({"role": "assistant", "tool_calls": [{"name": "x"}]}, "a tool call is"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}, "'x' are no JSON"),
    ],
)
def test_bad_messages_say_what_is_wrong(message, says):
    with pytest.raises(PromptError, match=says):
        text([message])
