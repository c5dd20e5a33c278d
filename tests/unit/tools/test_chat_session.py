"""A conversation over several turns with a FakeLLM: messages, commands, files, and the state after an interrupt."""

import json
import re

import pytest

from llamabatch import InputError, SamplingError, UnknownParameterError
from llamabatch.testing import FakeLLM
from llamabatch.tools.chat_session import COMMANDS, NAMES, ChatSession, Leave


@pytest.fixture
def llm():
    with FakeLLM(answers=lambda request: f"{len(request.messages)} messages so far", n_ctx=256) as llm:
        yield llm


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


def roles(session):
    return [message["role"] for message in session.messages]


def test_answers_go_into_the_conversation(llm):
    session = ChatSession(llm, {}, "Be brief.")
    assert text_of(session.answer("Hello")) == "2 messages so far"
    assert text_of(session.answer("And?")) == "4 messages so far"
    assert roles(session) == ["system", "user", "assistant", "user", "assistant"]
    assert session.messages[-1]["content"] == "4 messages so far"
    assert llm.requests[-1].params.max_tokens is None


def test_what_came_before_an_interrupt_stays_and_what_cannot_be_answered_goes(llm):
    session = ChatSession(llm, {})
    pieces = session.answer("Hello")
    first = next(pieces).text
    pieces.close()
    assert session.messages == [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": first}]
    assert session.command("/stats") == "there is no whole answer yet"
    with pytest.raises(InputError, match="n_ctx"):
        text_of(session.answer("word " * 1000))
    assert roles(session) == ["user", "assistant"]


def test_the_system_message_and_a_new_beginning(llm):
    session = ChatSession(llm, {})
    session.command("/system Speak as a pirate.")
    text_of(session.answer("Hello"))
    assert session.messages[0] == {"role": "system", "content": "Speak as a pirate."}
    session.command("/system Be brief.")
    assert [message["content"] for message in session.messages[:2]] == ["Be brief.", "Hello"]
    session.command("/reset")
    assert session.messages == [{"role": "system", "content": "Be brief."}]
    assert session.command("/system") == "there is no system message now"
    assert session.messages == []


def test_parameters_are_set_checked_and_shown(llm):
    session = ChatSession(llm, {"seed": 7})
    assert session.command("/set temperature 0.2") == "temperature = 0.2"
    assert session.command("/set temp = 0.5") == "temperature = 0.5"
    session.command('/set stop ["a", "b"]')
    assert session.command("/set").splitlines() == ["max_tokens = null", "seed = 7", "temp = 0.5", 'stop = ["a", "b"]']
    text_of(session.answer("Hello"))
    params = llm.requests[-1].params
    assert (params.temperature, params.seed, params.stop_strings) == (0.5, 7, ("a", "b"))
    assert session.command("/set temperature default") == "temperature is the default"
    for line, error in (
        ("/set temprature 1", UnknownParameterError), ("/set temperature -1", SamplingError),
        ("/set temperature", InputError), ("/set n 2", InputError), ("/set nonsense default", UnknownParameterError),
    ):  # fmt: skip
        with pytest.raises(error):
            session.command(line)
    assert "temp" not in session.command("/set")


def test_the_last_message_is_answered_again(llm):
    session = ChatSession(llm, {})
    with pytest.raises(InputError, match="no message yet"):
        session.command("/regen")
    text_of(session.answer("Hello"))
    session.messages[-1]["content"] = "changed"
    assert text_of(session.command("/regen")) == "1 messages so far"
    assert session.messages == [
        {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "1 messages so far"},
    ]  # fmt: skip


def test_a_conversation_is_saved_and_loaded(llm, tmp_path):
    session = ChatSession(llm, {"temperature": 0}, "Be brief.")
    text_of(session.answer("Grüße"))
    file = tmp_path / "chat.json"
    assert session.command(f"/save {file}").startswith("3 messages are in ")
    other = ChatSession(llm, {})
    assert other.command(f"/load {file}").startswith("3 messages from ")
    assert other.messages == session.messages
    assert "temperature = 0" in other.command("/set")
    file.write_text(json.dumps([{"role": "user", "content": "x"}]))  # a file with messages only
    other.command(f"/load {file}")
    assert roles(other) == ["user"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"), ("{", "cannot be read"), ("5", "holds no conversation"),
        ('{"messages": [{"role": 1}]}', "holds no conversation"), ('{"messages": [], "sampling": 1}', "sampling is 1"),
        ('{"messages": [{"role": "user", "content": "x"}], "sampling": {"temprature": 1}}', "did you mean"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_conversation_changes_nothing(llm, tmp_path, content, message):
    session = ChatSession(llm, {}, "Be brief.")
    before = list(session.messages)
    if content is not None:
        (tmp_path / "chat.json").write_text(content)
    with pytest.raises(InputError, match=re.escape(message)):
        session.command(f"/load {tmp_path}/chat.json")
    assert session.messages == before
    with pytest.raises(InputError, match="cannot be written"):
        session.command(f"/save {tmp_path}/none/chat.json")


def test_figures_of_an_answer(llm):
    session = ChatSession(llm, {})
    text_of(session.answer("Hello"))
    assert re.match(
        r"prompt \d+ tokens, 0 of them from the cache\nanswer 5 tokens, ended by stop\n", session.command("/stats")
    )
    assert session.command("/stats").endswith("of n_ctx = 256 are used")


def test_each_command_is_in_the_help_and_runs(llm):
    session = ChatSession(llm, {})
    shown = session.command("/help").splitlines()
    assert [line.split()[0] for line in shown[:-1]] == list(NAMES) == [line.split()[0] for line in COMMANDS]
    for name in set(NAMES) - {"/exit"}:
        try:
            session.command(name)
        except InputError as error:
            assert "there is no command" not in str(error)  # noqa: PT017
    with pytest.raises(Leave):
        session.command("/exit")
    with pytest.raises(InputError, match="there is no command '/sytem'; did you mean '/system'"):
        session.command("/sytem x")
