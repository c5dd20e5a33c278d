"""ChatFormat: the family of a template, the text that closes its thinking, the state where its prompts end.

The templates are excerpts: the lines by which the families are told apart. The expected results are those of the
whole templates.
"""

import pytest

from llamabatch.chat.conversation import render
from llamabatch.chat.formats import ChatFormat, check_tags, reasoning_of
from llamabatch.chat.options import ChatOptions
from llamabatch.errors import ConfigError
from llamabatch.request.reasoning import Thinking

MESSAGES = "{% for m in messages %}{{ m.content }}{% if m.reasoning_content %}{% endif %}{% endfor %}"
CHATML = "{# <tool_call> #}" + MESSAGES + "<|im_start|>assistant\n"
ASKED = [{"role": "user", "content": "hi <think> [THINK]"}]
INSIDE, POSSIBLE, OVER = Thinking.INSIDE, Thinking.POSSIBLE, Thinking.OVER

# family, template, text that ends the thinking, (variables, state of the thinking where the answer begins) ...
TABLE = [
    (
        "qwen3",
        CHATML + r"{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}"
        r"{% endif %}{# '<think>\n' + reasoning + '\n</think>\n\n' #}",
        "\n</think>\n\n",
        [({}, POSSIBLE), ({"enable_thinking": True}, POSSIBLE), ({"enable_thinking": False}, OVER)],
    ),
    ("qwen3", CHATML + r"{{ '<think>\n' }}{# '\n</think>\n\n' #}", "\n</think>\n\n", [({}, INSIDE)]),  # Qwen3-2507
    ("think", MESSAGES + r"{{ ' <think>' }}{# '</think>' #}", "</think>", [({}, INSIDE)]),
    (
        "deepseek-r1",
        MESSAGES + r"{# content.split('</think>')[-1] #}{{ '<｜Assistant｜><think>\n' }}",
        "</think>",
        [({}, INSIDE)],
    ),
    (
        "deepseek-r1",
        MESSAGES + "<｜Assistant｜>{{ '<think>' if thinking else '<think></think>' }}",
        "</think>",
        [({}, OVER), ({"thinking": True}, INSIDE)],
    ),
    (
        "gpt-oss",
        MESSAGES + '{# "<|channel|>analysis<|message|>" #}<|start|>assistant',
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        [({}, POSSIBLE)],
    ),
    ("magistral", MESSAGES + "{# [THINK] [/THINK] #}[/INST]", "[/THINK]", [({}, POSSIBLE)]),
    (
        "glm-4.5",
        MESSAGES + r"{# <|observation|> #}<|assistant|>{{ '\n<think></think>' if enable_thinking is false else '' }}",
        "</think>",
        [({}, POSSIBLE), ({"enable_thinking": False}, OVER)],
    ),
    (
        "glm-4.5",
        MESSAGES + "{# <|observation|> #}<|assistant|>{{ '</think>' if enable_thinking is false else '<think>' }}",
        "</think>",
        [({}, INSIDE), ({"enable_thinking": False}, OVER)],
    ),
    ("kimi-k2", MESSAGES + "{# <think></think> #}<|im_assistant|>assistant<|im_middle|>", "</think>", [({}, POSSIBLE)]),
    ("seed-oss", MESSAGES + "{# <seed:think> </seed:think> #}assistant\n", "</seed:think>", [({}, POSSIBLE)]),
    (
        "cohere",
        MESSAGES + "{% if enable_thinking %}{% else %}<|START_THINKING|><|END_THINKING|>{% endif %}",
        "<|END_THINKING|>",
        [({}, OVER), ({"enable_thinking": True}, POSSIBLE)],
    ),
    ("minimax-m2", MESSAGES + r"{{ ']~b]ai' ~ '\n' ~ '<think>' ~ '\n' }}{# '</think>' #}", "</think>", [({}, INSIDE)]),
    ("granite", MESSAGES + "{# </think> #}<|start_of_role|>assistant<|end_of_role|>", "</think>", [({}, POSSIBLE)]),
    (
        "apriel",
        MESSAGES + r"{{ 'Here are my reasoning steps:\n' }}{# '\n[BEGIN FINAL RESPONSE]\n' #}",
        "\n[BEGIN FINAL RESPONSE]\n",
        [({}, INSIDE)],
    ),
    ("apertus", MESSAGES + "{# <|inner_prefix|> #}<|assistant_start|>", "<|inner_suffix|>", [({}, POSSIBLE)]),
    ("minimax-m3", MESSAGES + "{# <mm:think> #}{{ '</mm:think>' }}", "</mm:think>", [({}, OVER)]),
    (
        "hunyuan",
        "{% set H = ':opensource' %}" + MESSAGES + "{{ '<think{}>'.format(H) }}",
        "</think:opensource>",
        [({}, INSIDE)],
    ),
    (
        "gemma-4",
        MESSAGES + r"{% if not enable_thinking %}{{ '<|channel>thought\n<channel|>' }}{% endif %}",
        "\n<channel|>",
        [({}, OVER), ({"enable_thinking": True}, POSSIBLE)],
    ),
]
NAMES = [f"{i}-{family}" for i, (family, *_) in enumerate(TABLE)]


@pytest.mark.parametrize(("family", "template", "closing", "states"), TABLE, ids=NAMES)
def test_the_family_of_a_template(family, template, closing, states):
    tags = ChatFormat.of(template).reasoning
    assert tags is not None
    assert (tags.family, tags.closing) == (family, closing)
    assert tags.end in tags.closing
    for variables, expected in states:
        prompt = render(template, ASKED, "", "", ChatOptions(None, variables))
        assert tags.at_end_of(prompt) is expected, variables


@pytest.mark.parametrize("template", [None, "", CHATML, "{{ 'think' }}", "<|channel|>", "[THINK]"])
def test_templates_without_thinking(template):
    assert ChatFormat.of(template).reasoning is None


def test_tags_given_by_hand_take_the_place_of_the_familys():
    tags = ChatFormat.of(r"{{ '</think>' }} '\n--\n\n'", ("++\n", " --")).reasoning
    assert tags is not None
    assert (tags.family, tags.start, tags.end, tags.closing) == ("custom", "++", "--", "\n--\n\n")
    assert tags.at_end_of("a ++ \n") is INSIDE
    assert tags.at_end_of("a ++ b --\n") is OVER
    assert tags.at_end_of("a ++ b") is POSSIBLE


def test_an_answer_that_goes_on_with_a_message_goes_on_with_its_state():
    tags = ChatFormat.of(TABLE[0][1]).reasoning
    assert tags is not None
    assert tags.at_end_of("x <think>half of it", "<think>half of it") is INSIDE
    assert tags.at_end_of("x <think>a</think>b", "<think>a</think>b") is OVER
    assert tags.at_end_of("x The", "The") is OVER


def test_a_prompt_may_end_within_a_channel():
    tags = ChatFormat.of(TABLE[5][1]).reasoning
    assert tags is not None
    assert tags.at_end_of("<|start|>assistant<|channel|>analysis<|message|>") is INSIDE
    assert tags.at_end_of("<|start|>assistant<|channel|>final<|message|>") is OVER


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("<think>", "give two texts"),
        (("<think>",), "give two texts"),
        (("<think>", " "), "give two texts"),
        (("a", "b", "c"), "give two texts"),
        ((1, 2), "give two texts"),
        (("a", "a "), "must be another one"),
        (("a" * 257, "b"), "allowed are 1 to 256"),
        (None, "give two texts"),
    ],
)
def test_tags_that_are_no_pair_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        check_tags(given)


def test_reasoning_format_none_looks_for_no_thinking():
    tags = reasoning_of(TABLE[0][1], None, "auto")
    assert tags is not None
    assert tags.family == "qwen3"
    assert reasoning_of(TABLE[0][1], ("a", "b"), "none") is None
    custom = reasoning_of(None, ("a", "b"), "auto")
    assert custom is not None
    assert custom.family == "custom"
    assert reasoning_of(None, None, "auto") is None
