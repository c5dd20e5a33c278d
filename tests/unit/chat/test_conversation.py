"""The end of a rendered prompt, and chat templates that a caller passes."""

import os
from pathlib import Path

import pytest

from llamabatch.chat.conversation import check_template, render
from llamabatch.chat.messages import dropped_first
from llamabatch.chat.options import ChatOptions, chat_options, template_source
from llamabatch.errors import ConfigError, PromptError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = [{"role": "user", "content": "Name a colour."}]
BEGUN = [*ASKED, {"role": "assistant", "content": "The colour is "}]
HEAD = "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n"


def made(conversation, template=CHATML, **options):
    return render(template, conversation, "<s>", "</s>", ChatOptions(**options))


def test_a_template_that_looks_into_a_missing_content_gets_an_empty_one():
    asks = "{% for m in messages %}{{ 'yes' if '<' in m.content else 'no' }}{% endfor %}{{ tools }}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    told = [{"role": "user", "content": "<"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render(asks, told, "", "") == "yesnoNone"
    assert render("{{ messages[1].content is none }}{{ tools }}", told, "", "") == "TrueNone"


def test_the_prompt_ends_with_the_header_of_the_answer_unless_told_otherwise():
    assert made(ASKED) == made(ASKED, add_generation_prompt=True) == HEAD
    assert made(ASKED, add_generation_prompt=False) == HEAD.removesuffix("<|im_start|>assistant\n")


@pytest.mark.parametrize("content", ["The colour is ", "The colour is\n\n", "", " ", "a <|im_end|> b", "<continue"])
def test_the_last_message_is_continued_behind_its_content(content):
    conversation = [*ASKED, {"role": "assistant", "content": content}]
    assert made(conversation, continue_final_message=True) == HEAD + content
    assert conversation[-1]["content"] == content, "the caller's message is left as it was"


def test_a_message_with_the_same_text_is_not_taken_for_the_last_one():
    twice = [BEGUN[1], *BEGUN]
    assert (
        made(twice, continue_final_message=True)
        == f"<|im_start|>assistant\nThe colour is <|im_end|>\n{HEAD}The colour is "
    )


def test_content_in_parts_is_continued():
    parts = [
        *ASKED,
        {"role": "assistant", "content": [{"type": "text", "text": "Sky "}, {"type": "text", "text": "blue"}]},
    ]
    assert made(parts, continue_final_message=True) == f"{HEAD}Sky \nblue"


@pytest.mark.parametrize("behind", ["", " ", "\n", "</s>", " </s>"])
def test_a_template_that_trims_contents_trims_the_last_one(behind):
    template = CHATML.replace("{{ m.content }}<|im_end|>\n", "{{ m.content | trim }}" + behind)
    wanted = made(BEGUN[:1], template, add_generation_prompt=True) + "The colour is"
    assert made(BEGUN, template, continue_final_message=True) == wanted


def test_what_stands_behind_all_messages_is_cut_off():
    template = CHATML + "{{ eos_token }}{% if continue_final_message is defined %}<told>{% endif %}"
    assert made(BEGUN, template, continue_final_message=True) == HEAD + "The colour is "


@pytest.mark.parametrize(
    ("conversation", "template", "says"),
    [
        (ASKED, CHATML, "the last one is of role 'user'"),
        ([*ASKED, {"role": "assistant", "tool_calls": []}], CHATML, "the last one has no content"),
        (BEGUN, "{{ messages[0].content }}", "changes the last message"),
        (BEGUN, "{{ messages[-1].content | upper }}", "changes the last message"),
    ],
)
def test_what_cannot_be_continued_is_refused(conversation, template, says):
    with pytest.raises(PromptError, match=says):
        made(conversation, template, continue_final_message=True)


def test_options_that_contradict_each_other_or_are_no_booleans():
    with pytest.raises(PromptError, match="are both True"):
        ChatOptions(add_generation_prompt=True, continue_final_message=True)
    assert made(BEGUN, add_generation_prompt=False, continue_final_message=True) == HEAD + "The colour is "
    with pytest.raises(PromptError, match="add_generation_prompt is 'no'; give True or False"):
        ChatOptions(add_generation_prompt="no")
    with pytest.raises(PromptError, match="continue_final_message is 1; give True or False"):
        ChatOptions(continue_final_message=1)


def test_a_template_is_a_text_or_a_file(tmp_path, monkeypatch):
    file = tmp_path / "own.jinja"
    file.write_text("\ufeff" + CHATML, encoding="utf-8")
    assert template_source(None) is None
    assert template_source("{{ 1 }}") == "{{ 1 }}"
    assert template_source("{# nothing #}") == "{# nothing #}"
    monkeypatch.chdir(tmp_path)
    for given in (file, str(file), "own.jinja", Path("own.jinja")):
        assert template_source(given) == CHATML
    options = chat_options(chat_template=file)
    assert render(None, ASKED, "", "", options) == HEAD  # the model has no template
    assert render("{{ wrong }}", ASKED, "", "", options) == HEAD


def test_what_is_no_template_says_so(tmp_path):
    (tmp_path / "latin").write_bytes(b"\xe9 {{ 1 }}")
    (tmp_path / "large").write_bytes(b" " * (2**20 + 1))
    os.mkfifo(tmp_path / "pipe")
    for given, says in (
        ("no such file", "cannot be read: No such file or directory; give the path of a file, a text of jinja2"),
        ("a\0b", "cannot be read"),
        (tmp_path / "latin", "is no text in UTF-8"),
        (tmp_path / "large", "is larger than 1048576 bytes"),
        (tmp_path / "pipe", "is no file"),
        (tmp_path, "is no file"),
        (5, "chat_template is 5; give the text"),
        (b"{{ 1 }}", "give the text of a jinja2 template"),
    ):
        with pytest.raises(ConfigError, match=says):
            template_source(given)
    with pytest.raises(ConfigError, match="the chat template cannot be compiled"):
        made(ASKED, template_source("{% if %}"))
    with pytest.raises(
        ConfigError, match=r"compiled: line 1: unexpected '\.'; it looks like an ollama template in Go's language"
    ):
        made(ASKED, "{{ if .System }}{{ .System }}{{ end }}{{ .Prompt }}")
    for nothing in ("", " \n"):
        with pytest.raises(ConfigError, match="the chat template is empty"):
            check_template(nothing)
    endless = (
        "{% for a in range(999) %}{% for b in range(999) %}{% for c in range(999) %}x{% endfor %}" + "{% endfor %}" * 2
    )
    with pytest.raises(PromptError, match="it takes more than the"):
        render(None, ASKED, "", "", chat_options(chat_template=endless))
    with pytest.raises(ConfigError, match='give chat_template="chatml", or the template of its family, or use gen'):
        made(ASKED, None)


@pytest.mark.parametrize(
    ("roles", "turns"),
    [
        ("suauau", [0, 1, 1, 2, 2, 0]),
        ("u", [0]),
        ("", []),
        ("auau", [1, 2, 2, 0]),
        ("uatatsu", [1, 1, 1, 1, 1, 0, 0]),
        ("uauatatta", [1, 1, 0, 2, 2, 3, 3, 3, 0]),  # each round of an agent's calls is dropped as one turn
        ("uaua", [1, 1, 0, 0]),
        ("ssa", [0, 0, 0]),
    ],
)
def test_the_turns_that_a_long_conversation_loses_first(roles, turns):
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    assert dropped_first([{"role": names[each]} for each in roles]) == turns
