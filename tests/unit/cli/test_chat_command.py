"""`llamabatch chat` in a pipe and on a terminal of its own, with the answers of a FakeLLM."""

import os
import select
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from llamabatch.cli import chat as module
from llamabatch.cli import cli
from llamabatch.testing import FakeLLM
from tests.waiting import until

pty = pytest.importorskip("pty")

# a model that says how many messages there are, or never ends its answer
PROGRAM = """
import sys, time
sys.argv = ["llamabatch", "chat"]
from llamabatch.cli import main
import llamabatch.cli.chat as module
from llamabatch.testing import FakeLLM

def answer(request):
    if "wait" in request.messages[-1]["content"]:
        print("for ever", flush=True)
        time.sleep(600)
    return f"<think>well</think>{len(request.messages)} messages \\x1b[31mred"

tags = ("<think>", "</think>")
module.LLM = lambda model, **engine: FakeLLM("tiny", answers=answer, reasoning_tags=tags, **engine)
main()
"""


@pytest.fixture
def fake(monkeypatch):
    made = []

    def make(model, **engine):
        made.append(FakeLLM(model, answers="Paris", **engine))
        return made[-1]

    monkeypatch.setattr(module, "LLM", make)
    return made


def test_a_pipe_is_one_message_and_its_answer(fake):
    result = CliRunner().invoke(
        cli, ["chat", "--system", "Be brief.", "-t", "0", "--seed", "3"], input="Capital of\nFrance?\n"
    )
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Paris\n", "")
    [request] = fake[0].requests
    assert list(request.messages) == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital of\nFrance?"},
    ]  # fmt: skip
    assert (request.params.temperature, request.params.seed, request.params.max_tokens) == (0, 3, None)


def test_thinking_goes_to_stderr_in_a_pipe(monkeypatch):
    tags = ("<think>", "</think>")
    monkeypatch.setattr(
        module, "LLM", lambda model, **engine: FakeLLM(answers="<think>hm</think>\n\n4", reasoning_tags=tags)
    )
    result = CliRunner().invoke(cli, ["chat"], input="2 + 2?")
    assert (result.exit_code, result.stdout, result.stderr.strip()) == (0, "4\n", "hm")


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        ([], " \n", "the message is empty"),
        (["-P", "n=2"], "x", "one answer at a time"),
        (["-t", "-1"], "x", "temperature"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_a_model_is_loaded(fake, arguments, text, message):
    result = CliRunner().invoke(cli, ["chat", *arguments], input=text)
    assert (result.exit_code, message in result.output, fake) == (2, True, [])


class Terminal:
    def __init__(self, folder):
        ours, theirs = pty.openpty()
        self.ours = ours
        environment = {**os.environ, "TERM": "vt100", "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def write(self, text):
        os.write(self.ours, text.encode())

    def wait_for(self, text):
        """Reads until the text has appeared since the last call. Returns what came before it."""
        until(lambda: text in self.seen or self._read(), lambda: self.seen)
        before, _, self.seen = self.seen.partition(text)
        return before

    def _read(self):
        if select.select([self.ours], [], [], 0)[0]:
            try:
                self.seen += os.read(self.ours, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"it ended: {self.seen}") from None

    def end(self):
        code = self.process.wait(timeout=60)
        os.close(self.ours)
        return code


@pytest.fixture
def terminal(tmp_path):
    terminal = Terminal(tmp_path)
    yield terminal
    if terminal.process.poll() is None:
        terminal.process.kill()
        terminal.process.wait()


def test_on_a_terminal(terminal, tmp_path):
    terminal.wait_for("/help lists the commands.")
    terminal.wait_for("> ")
    terminal.write("Hello \\\n")
    terminal.wait_for(". ")
    terminal.write("there\n")
    assert "\x1b[2mwell\x1b[0m" in terminal.wait_for("1 messages ")  # dimmed
    assert "\x1b" not in terminal.wait_for("red")  # a model's text cannot change colours
    terminal.wait_for("> ")
    terminal.write("/sytem x\n")
    terminal.wait_for("did you mean '/system'")
    terminal.wait_for("> ")
    terminal.write("please wait\n")
    terminal.wait_for("for ever")
    os.kill(terminal.process.pid, signal.SIGINT)  # ends the answer
    terminal.wait_for("> ")
    terminal.write("Again\n")
    terminal.wait_for("3 messages ")
    terminal.wait_for("> ")
    os.kill(terminal.process.pid, signal.SIGINT)  # at the prompt
    terminal.wait_for("> ")
    terminal.write(f"/save {tmp_path}/chat.json\n")
    terminal.wait_for("4 messages are in")
    terminal.wait_for("> ")  # before the prompt, the terminal's own line editing would take the key
    terminal.write("\x04")
    assert terminal.end() == 0


LOST = """
import os, signal, time
from llamabatch.utils import interrupts

interrupts.guard()
interrupts.careful()
# the handler of the first signal does nothing, as where one comes before the wait for a key begins
signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, interrupts._interrupt))


def read():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


try:
    interrupts.read_line(read)
except KeyboardInterrupt:
    print("ended")
"""


def test_a_signal_that_the_wait_for_a_line_has_missed_is_sent_again(tmp_path):
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=30, cwd=tmp_path)
    assert done.stdout == "ended\n", done.stderr


@pytest.mark.parametrize(("how", "code"), [("/exit\n", 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_end(terminal, how, code):
    terminal.wait_for("> ")
    if isinstance(how, str):
        terminal.write(how)
    else:
        os.kill(terminal.process.pid, how)
    assert terminal.end() == code
