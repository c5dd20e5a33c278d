"""AnswerFormat: the special tokens that a parser must see, and the requests that follow their thinking."""

from pathlib import Path

import pytest

from llamabatch.chat.options import ChatOptions
from llamabatch.entrypoints.answer_format import AnswerFormat
from llamabatch.request.reasoning import Thinking
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.sequence import Sequence
from llamabatch.testing.fake_model import BOS, EOS, START, FakeModel


class Config:
    reasoning_format = "auto"
    reasoning_tags = ("<|im_start|>", "<|bos|>")


@pytest.fixture
def model():
    return FakeModel(Path("fake"))


def request(model, prompt="hi", **params):
    return Request("r", tuple(model.tokenize(prompt)), SamplingParams(**params), prompt)


def test_special_tokens_of_the_marks_are_shown_and_no_others(model):
    made = AnswerFormat(model, Config()).of_chat(request(model))
    assert made.preserved_token_ids == (BOS, START)
    sequence = Sequence(made, model.vocabulary, 64)
    ids = [START, *model.tokenize("so", add_special=False), BOS, *model.tokenize("a", add_special=False), EOS]
    raw = "".join(sequence.accept(token_id, 0.0) for token_id in ids)
    assert raw == "<|im_start|>so<|bos|>a"
    parser = made.make_parser(made, 0)
    delta = parser.finish(raw)
    assert (delta.reasoning, delta.text) == ("so", "a")
    assert made.make_parser(made, 0).finish("x<|im_start|>so<|bos|>a").text == "xa"  # no text can spell a special token


def test_names_of_special_tokens_stay_out_of_texts_that_nothing_takes_apart(model):
    sequence = Sequence(request(model), model.vocabulary, 64)
    ids = [START, *model.tokenize("so", add_special=False), BOS]
    assert "".join(sequence.accept(token_id, 0.0) for token_id in ids) == "so"


@pytest.mark.parametrize(
    ("prompt", "params", "expected"),
    [
        ("hi", {}, None),
        ("hi", {"thinking_token_budget": 3}, Thinking.POSSIBLE),
        ("hi", {"structured_outputs": {"regex": "a"}}, Thinking.OVER),
        ("hi<|im_start|>\n", {"structured_outputs": {"regex": "a"}}, Thinking.INSIDE),
    ],
)
def test_a_raw_prompt_thinks_where_it_ends_within_a_thinking(model, prompt, params, expected):
    ids = tuple(model.tokenize(prompt, parse_special=True))
    made = AnswerFormat(model, Config()).of_prompt(Request("r", ids, SamplingParams(**params)))
    assert (None if made.reasoning is None else made.reasoning.thinking) is expected
    assert made.make_parser is None
    assert made.follows_reasoning is (expected is not None)


def test_a_form_that_binds_in_the_thinking_follows_none(model):
    form = {"regex": "a", "enable_in_reasoning": True}
    assert not AnswerFormat(model, Config()).of_chat(request(model, structured_outputs=form)).follows_reasoning
    assert AnswerFormat(model, Config()).of_chat(request(model, structured_outputs={"regex": "a"})).follows_reasoning


def test_the_template_of_a_call_and_a_continued_message(model):
    class Plain(Config):
        reasoning_tags = None

    assert AnswerFormat(model, Plain()).tags is None
    answers = AnswerFormat(model, Plain(), ChatOptions(template="{# [THINK] [/THINK] #}"))
    assert answers.tags.family == "magistral"
    assert answers.of_chat(request(model)).reasoning.thinking is Thinking.POSSIBLE
    assert answers.of_chat(request(model), "[THINK]so far").reasoning.thinking is Thinking.INSIDE
