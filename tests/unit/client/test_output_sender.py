"""Outputs of a child: those of fast steps are sent together, first tokens and ends at once, and none is lost."""

import time
from types import SimpleNamespace

import pytest

from llamabatch.client import output_sender
from llamabatch.client.base import emit, emit_last
from llamabatch.client.output_sender import OutputSender
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from tests.waiting import until


class Parent:
    """Stores the texts of each message. Refuses messages that contain the text `refused`."""

    def __init__(self):
        self.messages = []
        self.refused = None

    def send(self, kind, packed):
        texts = [(item[0], item[2]) for item in packed]
        if self.refused is not None and any(self.refused in text for _, text in texts):
            raise ValueError(f"{self.refused!r} cannot be packed")
        self.messages.append(texts)

    def texts(self, name):
        return "".join(text for message in self.messages for each, text in message if each == name)


@pytest.fixture
def parent():
    return Parent()


@pytest.fixture
def sender(parent, monkeypatch):
    """Returns a sender whose pause after a message never ends."""
    monkeypatch.setattr(output_sender, "REST_PER_OUTPUT_S", 60.0)
    monkeypatch.setattr(output_sender, "MOST_REST_S", 60.0)
    return OutputSender(parent)


def piece(text, name="a"):
    return SequenceOutput(name, (len(text),), text)


def last(text="", name="a", error=None):
    completion = CompletionOutput(0, "whole", (1,), FinishReason.ERROR if error else FinishReason.STOP)
    return SequenceOutput(name, (), text, RequestOutput(name, None, (1,), (completion,), error))


def test_first_tokens_and_ends_go_at_once_and_take_along_what_is_held_of_their_request(parent, sender):
    sender([piece("one ")])
    sender([piece("two "), piece("first ", "b")])
    assert parent.messages == [[("a", "one ")], [("b", "first ")]]
    sender([piece("three "), piece("second ", "b")])
    sender([piece("four "), last("end", "b")])
    assert parent.messages[2:] == [[("b", "second end")]]
    sender([last("end")])
    assert parent.messages[3:] == [[("a", "two three four end")]]


def test_held_outputs_go_when_the_rest_is_over_though_no_step_follows(parent, monkeypatch):
    monkeypatch.setattr(output_sender, "REST_PER_OUTPUT_S", 0.05)
    monkeypatch.setattr(output_sender, "MOST_REST_S", 0.05)
    sender = OutputSender(parent)
    for number in range(5):
        sender([piece(f"{number} ")])
    until(lambda: parent.texts("a") == "0 1 2 3 4 ", lambda: parent.messages)
    assert parent.messages[0] == [("a", "0 ")]


def test_steps_that_are_slower_than_the_rest_are_not_held_up(parent, monkeypatch):
    monkeypatch.setattr(output_sender, "REST_PER_OUTPUT_S", 0.0)
    sender = OutputSender(parent)
    for number in range(5):
        sender([piece(f"{number} ")])
    assert parent.messages == [[("a", f"{number} ")] for number in range(5)]


def test_an_output_that_cannot_be_sent_ends_its_request_alone(parent, sender):
    assert emit(sender, [piece("one "), piece("one ", "b")]) == {}
    assert emit(sender, [piece("bad "), piece("two ", "b")]) == {}  # held back
    parent.refused = "bad"
    assert emit(sender, [last("end", "b")]) == {}
    assert parent.texts("b") == "one two end"
    failed = emit(sender, [piece("first ", "c"), last("end")])
    assert list(failed) == ["a"]
    assert "cannot be packed" in failed["a"]
    emit_last(sender, last(error=failed["a"]))
    assert parent.texts("c") == "first "
    assert emit(sender, [piece("new ")]) == {}  # no earlier output of the request is left


def test_a_hole_in_a_text_is_an_error_of_its_request(parent, sender, monkeypatch):
    now = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now, sleep=lambda seconds: time.sleep(0.001))
    monkeypatch.setattr(output_sender, "time", clock)
    sender([piece("one "), piece("one ", "b")])
    parent.refused = "bad"
    sender([piece("bad "), piece("two ", "b")])
    now = 60.0
    until(lambda: parent.texts("b") == "one two ")
    failed = emit(sender, [piece("three "), piece("three ", "b")])
    assert list(failed) == ["a"]
    assert "cannot be packed" in failed["a"]
    emit_last(sender, last(error=failed["a"]))
    assert parent.texts("a") == "one "
    now = 120.0
    until(lambda: parent.texts("b") == "one two three ")
    assert emit(sender, [last("end", "b")]) == {}
