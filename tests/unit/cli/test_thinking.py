"""Thinking on the command line: it is shown apart from the answer, and its tags are an option."""

import click
import pytest
from click.testing import CliRunner

from llamabatch.cli import cli
from llamabatch.cli import generate as generate_module
from llamabatch.cli.param_types import Tags
from llamabatch.testing import FakeLLM


def generate(monkeypatch, answer, *arguments):
    fake = lambda model, **options: FakeLLM(model, answers=answer, **options)  # noqa: E731
    monkeypatch.setattr(generate_module, "LLM", fake)
    return CliRunner().invoke(cli, ["generate", "--reasoning-tags", "<t>,</t>", *arguments])


def test_the_thinking_goes_to_stderr_and_the_answer_to_stdout(monkeypatch):
    done = generate(monkeypatch, "<t>Let me see.</t>Four.", "--chat", "2 + 2?")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "Four.\n", "Let me see.\n")
    done = generate(monkeypatch, "<t>Let me", "--chat", "2 + 2?")
    assert (done.stdout, done.stderr) == ("\n", "Let me\n")
    done = generate(monkeypatch, "Four.", "--chat", "2 + 2?")
    assert (done.stdout, done.stderr) == ("Four.\n", "")
    done = generate(monkeypatch, "<t>Let me see.</t>Four.", "2 + 2?")
    assert (done.stdout, done.stderr) == ("<t>Let me see.</t>Four.\n", "")


def test_tags_are_two_texts_with_a_comma_between_them():
    assert Tags().convert("<think>,</think>", None, None) == ("<think>", "</think>")
    assert Tags().convert(("a", "b"), None, None) == ("a", "b")
    with pytest.raises(click.BadParameter, match="'<think>' is not a pair of tags"):
        Tags().convert("<think>", None, None)
