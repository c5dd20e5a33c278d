"""Every command has help, and bad usage ends with a sentence and an exit code."""

import importlib.util

import pytest
from click.testing import CliRunner

from llamabatch.cli import COMMANDS, cli
from llamabatch.cli.options import ScaledFile


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_has_help(name):
    command = cli.get_command(None, name)
    assert command.help
    for param in command.params:
        if param.param_type_name == "option":
            assert param.help, param.name


def test_help_lists_all_commands():
    result = CliRunner().invoke(cli, ["--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "-m", "/no/such.gguf", "x"], "does not exist"),
        (["generate", "-m", "/", "x"], "is a directory"),
        (["generate", "-m", __file__, "x"], "is not a GGUF file"),
        (["generate", "--strategy", "quick", "x"], "strategy is 'quick'"),
        (["generate", "--n-slots", "0", "x"], "n_slots is 0; give a whole number from 1 to 256"),
        (["generate", "--n-slots", "257", "x"], "n_slots is 257"),
        (["generate", "--n-slots", "few", "x"], "neither a whole number nor 'auto'"),
        (["generate", "-t", "nan", "x"], "temperature is nan"),
        (["generate", "--tensor-split", "a,b", "x"], "list of numbers"),
        (["generate", ""], "prompt is empty"),
        (["generate", "-P", "typical_p", "x"], "is not a name and a value"),
        (["generate", "-P", "typical=2", "x"], "typical_p is 2"),
        (["generate", "-P", "temprature=2", "x"], "did you mean 'temperature'"),
        (["generate", "-t", "1", "-P", "temperature=2", "x"], "temperature is given twice"),
        (["generate", "--lora", "no-such.gguf=0.5", "x"], "no-such.gguf"),
        (["generate", "--system", "s", "x"], "--system needs --chat"),
        (["generate", "--no-such-option"], "No such option"),
        (["no-such-command"], "No such command"),
    ],
)
def test_bad_usage_exits_with_2_and_a_sentence(arguments, message):
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_optional_packages_are_not_needed_for_help():
    assert importlib.util.find_spec("llamabatch.cli.generate") is not None


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("a.gguf", ("a.gguf", 1.0)), ("a.gguf=0.5", ("a.gguf", 0.5)), ("a=b.gguf", ("a=b.gguf", 1.0))],
)
def test_files_with_scales(given, wanted):
    assert ScaledFile().convert(given, None, None) == wanted
