"""Every command has help, and bad usage ends with a sentence and an exit code."""

import contextlib
import os
import re
import subprocess
import sys
from dataclasses import fields

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from llamabatch.cli import COMMANDS, cli, main
from llamabatch.cli.help_groups import GROUPS, SHORT
from llamabatch.cli.param_types import ScaledFile
from llamabatch.config import EngineConfig
from llamabatch.utils.console import wrapped

if sys.platform != "win32":
    import fcntl
    import pty
    import struct
    import termios


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_has_help(name):
    command = cli.get_command(None, name)
    assert command.help
    for param in command.params:
        if param.param_type_name == "option":
            assert param.help, param.name


def test_no_summary_of_a_command_is_cut_off():
    shown = CliRunner().invoke(cli, ["--help"], terminal_width=80).output
    assert "..." not in shown.split("Commands:")[1]
    for name in COMMANDS:
        summary = cli.command_of(name).short_help
        assert any(line.split(None, 1) == [name, summary] for line in shown.splitlines()), name
    narrow = CliRunner().invoke(cli, ["--help"], terminal_width=40).output
    assert "..." not in narrow.split("Commands:")[1]


def test_options_stand_in_groups():
    shown = CliRunner().invoke(cli, ["generate", "--help-all"]).output
    titles = [line[:-1] for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Options", *GROUPS]
    assert shown.index("Sampling:") < shown.index("--temperature") < shown.index("Strategy and slots:")
    engine = {option.name for name in ("generate", "run") for option in cli.command_of(name).params}
    engine &= {field.name for field in fields(EngineConfig)} - {"model"}
    grouped = [name for names in GROUPS.values() for name in names]
    assert engine <= set(grouped), "say in help_groups.GROUPS where a new option stands"
    assert len(grouped) == len(set(grouped))
    assert CliRunner().invoke(cli, ["doctor", "--help"]).output.count("Options:") == 1


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("width", [40, 80])
def test_help_is_short_and_the_rest_comes_with_help_all(name, width):
    params = {str(each.name) for each in cli.command_of(name).params}
    assert set(SHORT[name]) - params == {"help"}
    shown, whole = (
        CliRunner().invoke(cli, [name, flag], terminal_width=width).output for flag in ("--help", "--help-all")
    )
    options = [line.split()[0] for line in shown.splitlines() if line.startswith("  -")]
    assert 15 <= len(options) <= 20
    assert "--help-all shows all" in " ".join(shown.split())
    assert "--rope-freq-base" not in shown
    assert "--rope-freq-base" in whole
    assert "--help-all shows" not in whole
    assert max(map(len, shown.splitlines())) <= width
    if width == 80:
        assert len(shown.splitlines()) <= 70


def test_help_imports_no_command_and_nothing_slow():
    code = (
        "import sys\n"
        "sys.argv = ['llamabatch', '--help']\n"
        "from llamabatch.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "slow = {'numpy', 'rich', 'asyncio', 'llamabatch.config', 'jinja2', 'llamabatch.cli.generate'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_narrow_terminal_has_help_that_fits(monkeypatch, capsys):
    for columns in (40, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["llamabatch", "--help"])
        with pytest.raises(SystemExit):
            main()
        assert all(len(line) <= columns for line in capsys.readouterr().out.splitlines())


@given(st.lists(st.text("ab:- ", max_size=60), max_size=6).map("\n".join), st.integers(20, 90))
def test_sentences_are_wrapped_between_words(text, width):
    shown = wrapped(text, width)
    assert shown.split() == text.split()
    for line in shown.split("\n"):
        assert len(line.rstrip()) <= width or len(line.split()) == 1


def test_what_follows_a_label_stays_behind_it():
    text = "rows:    1 ok, 0 failed, and many more\nlongest: p50 1 s, p95 2 s, p99 3 s and so on\n  x y z"
    assert wrapped(text, 30).split("\n") == [
        "rows:    1 ok, 0 failed, and", "         many more", "longest: p50 1 s, p95 2 s, p99",
        "         3 s and so on", "  x y z",
    ]  # fmt: skip
    assert wrapped("  a long line that is a point of a list", 20).split("\n")[1].startswith("  ")


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of its own")
@pytest.mark.parametrize(
    ("arguments", "columns"),
    [
        (["run", "in.xlsx", "out.csv"], 40),
        (["generate", "--n-slots", "257", "x"], 80),
        (["generate", "-P", "no-such-parameter=2", "x"], 40),
        (["generate", "--no-such-option"], 80),
        (["top", "no-such-file-or-process"], 40),
    ],
)
def test_errors_on_a_terminal_are_wrapped_between_words(arguments, columns, tmp_path):
    command = [sys.executable, "-m", "llamabatch", *arguments]
    (tmp_path / "in.xlsx").write_text("")
    plain = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path).stderr
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"NO_COLOR": "1"}
    process = subprocess.Popen(command, stderr=theirs, stdout=subprocess.DEVNULL, env=environment, cwd=tmp_path)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux raises this when the other end is closed
        while piece := os.read(ours, 65536):
            shown += piece
    process.wait(timeout=120)
    os.close(ours)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).replace("\r\n", "\n").split("\r")[-1].split("\n")
    assert all(len(line) <= columns or len(line.split()) == 1 for line in lines), lines
    assert " ".join(lines).split()[-8:] == plain.split()[-8:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "-m", "/no/such.gguf", "x"], "does not exist"),
        (["generate", "-m", "/", "x"], "is a directory"),
        (["generate", "-m", __file__, "x"], "is not a GGUF file"),
        (["generate", "--strategy", "quick", "x"], "strategy is 'quick'"),
        (["generate", "--n-slots", "0", "x"], "n_slots is 0; give a whole number from 1 to 256"),
        (["generate", "--n-slots", "few", "x"], "neither a whole number nor 'auto'"),
        (["generate", "-t", "nan", "x"], "temperature is nan"),
        (["generate", "--tensor-split", "a,b", "x"], "list of numbers"),
        (["generate", ""], "prompt is empty"),
        (["generate", "-P", "typical_p", "x"], "is not a name and a value"),
        (["generate", "-P", "typical=2", "x"], "typical (here typical_p) is 2"),
        (["generate", "-P", 'bad_words=["foo"', "x"], "the value of bad_words is no valid JSON"),
        (["generate", "-P", "temprature=2", "x"], "did you mean 'temperature'"),
        (["generate", "-t", "1", "-P", "temperature=2", "x"], "temperature is given twice"),
        (["generate", "--lora", "no-such.gguf=0.5", "x"], "no-such.gguf"),
        (["generate", "--system", "s", "x"], "--system needs --chat"),
        (["generate", "--choice", "a,b", "--regex", "a", "x"], "give one of --json-schema, --choice and --regex"),
        (["generate", "--choice", "a,b", "-P", "guided_regex=a", "x"], "is given twice: by an option and by -P"),
        (["generate", "--json-schema", "no.json", "x"], "no JSON object and no file that can be read"),
        (["generate", "--json-schema", '{"not": {}}', "x"], "leave it out, or give --lenient: outputs list"),
        (["generate", "--lenient", "x"], "--lenient needs --json-schema"),
        (["generate", "-n", "none", "-t", "None", "--system", "s", "x"], "--system needs --chat"),
        (["generate", "-n", "0", "x"], "or None: until the model stops"),
        (["generate", "--no-such-option"], "No such option"),
        (["generate", "--adapters", "a", "x"], "Did you mean '--lora'?"),
        (["generate", "--temp", "1", "x"], "Did you mean '--temperature'?"),
        (["run", "--schema", "{}", "in", "out"], "Did you mean '--json-schema'?"),
        (["no-such-command"], "No such command"),
        (["generat", "x"], "No such command 'generat'; did you mean 'generate'?"),
    ],
)
def test_bad_usage_exits_with_2_and_a_sentence(arguments, message):
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("a.gguf", ("a.gguf", 1.0)), ("a.gguf=0.5", ("a.gguf", 0.5)), ("a=b.gguf", ("a=b.gguf", 1.0))],
)
def test_files_with_scales(given, wanted):
    assert ScaledFile().convert(given, None, None) == wanted


def test_the_model_may_be_the_argument_of_a_command_that_has_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_MODEL", str(tmp_path / "environment.gguf"))
    for name in ("plan", "compare", "tune", "chat"):
        result = CliRunner().invoke(cli, [name, "argument.gguf"])
        assert result.exit_code == 2
        assert "argument.gguf does not exist" in result.output, name
        assert f"{name} [OPTIONS] [MODEL]" in CliRunner().invoke(cli, [name, "--help"]).output
    twice = CliRunner().invoke(cli, ["plan", "-m", "tiny", "argument.gguf"])
    assert "Got unexpected extra argument (argument.gguf)" in twice.output
    message = CliRunner().invoke(cli, ["chat", "-m", "tiny", "hello"])
    assert "(hello); give the message on stdin, or to: llamabatch generate --chat" in message.output
    assert "(a b)" in CliRunner().invoke(cli, ["plan", "a", "b"]).output


def test_a_prompt_that_is_a_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model.gguf").touch()
    result = CliRunner().invoke(cli, ["generate", "my model.gguf"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the prompt is 'my model.gguf', a model; give -m 'my model.gguf' and a prompt" in result.stderr


@pytest.mark.parametrize("name", ["run", "serve"])
def test_a_bad_value_names_the_variable_that_it_came_from(name, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_N_SLOTS", "x")
    shown = " ".join(CliRunner().invoke(cli, [name, "a", "b"]).output.split())
    assert "Invalid value for 'LLAMABATCH_N_SLOTS': 'x' is" in shown
    shown = " ".join(CliRunner().invoke(cli, [name, "a", "b", "--n-slots", "y"]).output.split())
    assert "Invalid value for '--n-slots': 'y' is" in shown
