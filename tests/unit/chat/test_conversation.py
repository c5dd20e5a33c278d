"""Conversations to prompts: what is one, and what a template may do."""

import pytest

from llamabatch.chat.conversation import render
from llamabatch.errors import ConfigError, PromptError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_chatml():
    text = render(CHATML, [{"role": "user", "content": "hi"}], "", "")
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "conversation", [[], "hi", [{"role": "user"}], [{"content": "x"}], ["x"], {"role": "user", "content": "x"}, None, 5]
)
def test_what_is_no_conversation_is_refused(conversation):
    with pytest.raises(PromptError):
        render(CHATML, conversation, "", "")


def test_templates_are_sandboxed_and_may_refuse():
    message = [{"role": "user", "content": "x"}]
    with pytest.raises(PromptError, match="refuses"):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}", message, "", "")
    with pytest.raises(PromptError, match="only users"):
        render("{{ raise_exception('only users') }}", message, "", "")
    with pytest.raises(ConfigError, match="cannot be compiled"):
        render("{% if %}", message, "", "")
    with pytest.raises(ConfigError, match="no chat template"):
        render(None, message, "", "")
