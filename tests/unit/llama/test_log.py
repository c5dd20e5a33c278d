"""The log of llama.cpp, without llama.cpp: levels, pieces of lines, complaints."""

import logging

import pytest

from llamabatch.llama import log


@pytest.fixture
def forwarder(caplog):
    caplog.set_level(logging.DEBUG, "test.forwarder")
    return log.LogForwarder(logging.getLogger("test.forwarder"))


def test_levels_are_those_of_ggml(forwarder, caplog):
    for level in range(1, 5):
        forwarder(level, f"level {level}\n".encode(), None)
    assert [record.levelno for record in caplog.records] == [10, 20, 30, 40]
    assert list(forwarder.complaints) == ["level 3", "level 4"]


def test_pieces_are_joined_until_the_line_ends(forwarder, caplog):
    forwarder(3, b"loading ", None)
    forwarder(5, b"tensors .", None)
    forwarder(5, b".. done\nnext", None)
    forwarder(2, b"other\n", None)
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (30, "loading tensors ... done"),
        (30, "next"),
        (20, "other"),
    ]


def test_strange_text_does_no_harm(forwarder, caplog):
    for text in (b"\xff\xfe\n", b"", None, b"\n\n", b"100 %s %d\n"):
        forwarder(9, text, None)
    assert [record.getMessage() for record in caplog.records] == ["\ufffd\ufffd", "100 %s %d"]


def test_an_error_in_a_handler_stays_out_of_c(monkeypatch):
    def fail(*_):
        raise ValueError("no")

    logger = logging.getLogger("test.broken")
    monkeypatch.setattr(logger, "log", fail)
    log.LogForwarder(logger)(4, b"text\n", None)


def test_complaints_are_handed_over_once(monkeypatch):
    forwarder = log.LogForwarder(logging.getLogger("test.quiet"))
    monkeypatch.setattr(log, "_forwarder", forwarder)
    forwarder(4, b"bad magic\n", None)
    assert log.recent_complaints() == ["bad magic"]
    assert log.recent_complaints() == []
