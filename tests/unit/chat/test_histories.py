"""Histories with calls of tools, as agents send them again with each turn, in the forms that templates can show."""

import json

import pytest

from llamabatch.chat.conversation import render
from llamabatch.chat.options import ChatOptions
from llamabatch.chat.template import BoundedTemplate
from llamabatch.errors import PromptError


def call(number, arguments, name="look"):
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{number:020d}", "type": "function", "function": function}


def answer(number, text):
    return {"role": "tool", "tool_call_id": f"call_{number:020d}", "name": "look", "content": text}


def history(arguments='{"at": "sea"}', content=None):
    made = {"role": "assistant", "content": content, "tool_calls": [call(1, arguments)]}
    return [{"role": "user", "content": "Look!"}, made, answer(1, "blue")]


def parallel():
    both = {"role": "assistant", "content": None, "tool_calls": [call(1, '{"at": "sea"}'), call(2, '{"at": "sky"}')]}
    return [{"role": "user", "content": "Look!"}, both, answer(2, "grey"), answer(1, "blue")]


HEAD = "{% if tools %}{% endif %}{% for m in messages %}{{ m.role[0] }}:"
TAIL = "{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}"
VALUES = CALLS + "<{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}>"
TEMPLATES = {  # what a template does with a call -> (template, its text of `history`)
    "values": (VALUES + "{% endfor %}{{ m.content or '' }};", "u:Look!;a:<look at=sea>;t:blue;"),
    "values as JSON": (
        CALLS + "<{{ c.function.name }}{{ c.function.arguments | tojson }}>{% endfor %}{{ m.content or '' }};",
        'u:Look!;a:<look{"at": "sea"}>;t:blue;',
    ),
    "content that is written": (VALUES + "{% endfor %}{{ m.content }};", "u:Look!;a:<look at=sea>;t:blue;"),
    "content that must be null": (
        "{% if m.content is none %}" + VALUES + "{% endfor %}{% else %}{{ m.content }}{% endif %};",
        'u:Look!;a:{"name": "look", "arguments": {"at": "sea"}};t:blue;',  # the template shows either content or calls
    ),
    "text that is joined": (
        CALLS + "{{ '<' + c.function.name + c.function.arguments + '>' }}{% endfor %}{{ m.content or '' }};",
        'u:Look!;a:<look{"at": "sea"}>;t:blue;',
    ),
    "text that is written": (
        CALLS + "<{{ c.function.name }}{{ c.function.arguments }}>{% endfor %}{{ m.content or '' }};",
        'u:Look!;a:<look{"at": "sea"}>;t:blue;',
    ),
    "nothing": ("{{ m.content }};", 'u:Look!;a:{"name": "look", "arguments": {"at": "sea"}};t:blue;'),
    "nothing, and no tools": (
        "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ m.content }};",
        'u:Look!;a:{"name": "look", "arguments": {"at": "sea"}};u:The function returned: blue;',
    ),
    "ids of nine": (
        "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
        "<{{ c.function.name }} {{ c.function.arguments.at or c.function.arguments.place }}>{% endfor %}"
        "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
        "{{ m.content or '' }};",
        "u:Look!;a:<look sea>;t:blue;",
    ),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_each_template_is_given_the_form_that_it_shows(kind):
    template, text = TEMPLATES[kind]
    shown = render(HEAD + template + TAIL, history(), "", "", ChatOptions())
    assert shown.replace("<tool_call>\n", "").replace("\n</tool_call>", "") == text


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", ""),
        (" ", ""),
        (None, ""),
        ({"at": "sea"}, " at=sea"),
        ('{"at": "a\nb"}', " at=a\nb"),  # a raw line break
        ('{"path" : ",', ' INVALID_JSON={"path" : ",'),  # a call that max_tokens has cut
        ('{"a":1}{"b":2}', ' INVALID_JSON={"a":1}{"b":2}'),
        ("[1]", " INVALID_JSON=[1]"),
        ("[" * 100_000, f" INVALID_JSON={'[' * 100_000}"),
    ],
)
def test_arguments_that_are_no_object_go_on_as_they_were_written(arguments, shown):
    template = HEAD + TEMPLATES["values"][0] + TAIL
    assert render(template, history(arguments), "", "") == f"u:Look!;a:<look{shown}>;t:blue;"


def test_text_arguments_are_those_that_were_written():
    template = HEAD + TEMPLATES["text that is joined"][0] + TAIL
    assert render(template, history('{"path" : ",'), "", "") == 'u:Look!;a:<look{"path" : ",>;t:blue;'
    assert render(template, history({"at": "sea"}), "", "") == 'u:Look!;a:<look{"at": "sea"}>;t:blue;'
    with pytest.raises(PromptError, match="'look' cannot be written as JSON"):
        render(template, history({"at": {1, 2}}), "", "")


def test_a_template_of_one_call_sees_several_one_after_another():
    first = (
        HEAD
        + "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}<{{ f.name }}{{ f.arguments|tojson }}>{% endif %}"
    )
    refuses = (
        HEAD + "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}" + VALUES
    )
    text = "u:Look!;a:<{0}sea{1}>;t:blue;a:<{0}sky{1}>;t:grey;"
    whole = first + "{{ m.content or '' }};" + TAIL
    assert render(whole, parallel(), "", "") == text.format('look{"at": "', '"}')
    assert render(refuses + "{% endfor %}{{ m.content or '' }};" + TAIL, parallel(), "", "") == text.format(
        "look at=", ""
    )


def test_an_answer_without_text_and_calls_is_empty():
    template = HEAD + "{{ m.content }};" + TAIL
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    assert render(template, messages, "", "") == "u:a;a:;"


def test_turns_of_one_role_are_joined_where_a_template_demands_it():
    alternating = (
        HEAD + "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('turns') }}{% endif %}"
        "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }};" + TAIL
    )
    messages = [
        {"role": "system", "content": "S"},
        *({"role": "user", "content": each} for each in "ab"),
        *({"role": "assistant", "content": each} for each in "cd"),
        {"role": "user", "content": "e"},
    ]
    assert render(alternating, messages, "", "") == "u:S\n\na\n\nb;a:c\n\nd;u:e;"


def test_a_template_without_end_is_tried_once(monkeypatch):
    tried = []
    rendered = BoundedTemplate.render
    monkeypatch.setattr(BoundedTemplate, "render", lambda *args: tried.append(args) or rendered(*args))
    endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
    with pytest.raises(PromptError, match="steps and bytes"):
        render(endless + "{% endfor %}{{ messages }}", history(), "", "")
    assert len(tried) == 2  # one form of the calls, then the conversation itself


def test_the_name_of_a_template_in_its_place():
    asked = [{"role": "user", "content": "hi"}]
    assert render("chatml\n", asked, "", "") == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_no_tools_are_an_empty_list_where_null_has_no_length():
    template = "{% for t in tools %}{{ t }}{% endfor %}{{ messages[0].content }}"
    assert render(template, [{"role": "user", "content": "hi"}], "", "") == "hi"
    assert json.loads(render("{{ tools | tojson }}", [{"role": "user", "content": "hi"}], "", "")) is None


@pytest.mark.parametrize("calls", [[], None, ()])
def test_an_empty_list_of_calls_is_none(calls):
    template = (
        HEAD + "{% if m.tool_calls is defined %}{{ raise_exception('one call') }}{% endif %}{{ m.content }};" + TAIL
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": calls}]
    assert render(template, messages, "", "") == "u:a;a:b;"


@pytest.mark.parametrize("function", [{"arguments": "{}"}, {"name": None, "arguments": "{}"}])
def test_a_call_without_a_name_has_an_empty_one(function):
    messages = history("{}")
    messages[1]["tool_calls"][0]["function"] = function
    assert render(HEAD + TEMPLATES["values"][0] + TAIL, messages, "", "") == "u:Look!;a:<>;t:blue;"


def test_fields_that_a_function_lacks_are_empty_where_a_template_needs_them():
    asked = [{"role": "user", "content": "hi"}]

    def tools(**function):
        return ChatOptions(tools=[{"type": "function", "function": {"name": "look", **function}}])

    needs = (
        "{% for t in tools %}{% set f = t.function %}{{ f.name + f.description }}{{ f.parameters.properties | length }}"
    )
    for given in ({}, {"description": None, "parameters": None}, {"parameters": {"type": "object"}}):
        assert render(needs + "{% endfor %}", asked, "", "", tools(**given)) == "look0"
    assert render("{{ tools | tojson }}", asked, "", "", tools(description=None)) == (
        '[{"type": "function", "function": {"name": "look"}}]'
    )
