"""Defaults of options: flags override the environment, and the environment overrides the file. Errors name the line."""

import json

import click
import pytest
from click.testing import CliRunner

from llamabatch.cli import _WITHOUT_DEFAULTS, COMMANDS, cli
from llamabatch.cli.config_file import VARIABLE, config_path, defaults, options_of, read_settings


@pytest.fixture
def write(monkeypatch, tmp_path):
    path = tmp_path / "config.toml"
    monkeypatch.setenv(VARIABLE, str(path))

    def put(text):
        path.write_text(text, encoding="utf-8")
        return path

    return put


def found(name):
    return defaults(name, cli.command_of(name), COMMANDS, cli.command_of)


def run(*arguments, **environment):
    return CliRunner().invoke(cli, arguments, env=environment)


def test_values_become_those_of_the_options(write):
    write(
        'temperature = 0.2\nn_slots = 4\nmax-tokens = 8\nstop = ["a", "b"]\ntensor_split = [3, 1]\nisolate = true\n'
        '[run]\norder = "finished"\nn_slots = 9\n'
    )
    assert found("generate") == {
        "temperature": "0.2", "n_slots": "4", "max_tokens": "8", "stop": ["a", "b"], "tensor_split": "3,1",
        "isolate": True,
    }  # fmt: skip
    assert (found("run")["order"], found("run")["n_slots"]) == ("finished", "9")
    assert "isolate" not in found("run")  # a job has no option `isolate`; other commands have it
    assert found("doctor") == {}


def test_a_flag_the_environment_and_the_file(write, tmp_path):
    write(f'model = "{tmp_path}/file.gguf"\n')

    def asked(*flags, **environment):
        return run("generate", "x", *flags, **environment).output

    assert f"{tmp_path}/file.gguf does not exist" in asked()
    variable = {"LLAMABATCH_MODEL": f"{tmp_path}/variable.gguf"}
    assert f"{tmp_path}/variable.gguf does not exist" in asked(**variable)
    assert f"{tmp_path}/flag.gguf does not exist" in asked("-m", f"{tmp_path}/flag.gguf", **variable)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\ntempratur = 1\n", "line 2: there is no option 'tempratur'; did you mean 'temperature'?"),
        ("[run]\n\nordr = 1\n", "line 3: [run] has no option 'ordr'; did you mean 'order'?"),
        ("[rum]\norder = 1\n", "line 1: there is no command 'rum'; did you mean"),
        ("n-slots = 'few'\n", "line 1: n-slots is 'few'; 'few' is neither a whole number nor 'auto'"),
        ("preempt = 1\n", "line 1: preempt is 1; give true or false"),
        ("seed = {a = 1}\n", "there is no command 'seed'"),
        ('["("]\norder = 1\n', "there is no command '('"),
        ("model = [[1]]\n", "line 1: model is [[1]]; give a text, a number"),
        ("model = \n", "cannot be read: Invalid value (at line 1, column 9)"),
        ("temperature = 1\ntemperature = 2\n", "cannot be read: Cannot overwrite a value"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "x"], ["config"]])
def test_what_is_wrong_is_named_with_file_and_line(write, command, text, message):
    path = write(text)
    result = run(*command)
    assert result.exit_code == 2, result.output
    assert str(path) in result.output
    assert message in result.output


def test_help_and_completion_work_with_a_broken_file(write):
    write("what is this\n")
    assert run("generate", "--help").exit_code == run("--help").exit_code == 0
    assert run("completion", "bash").exit_code == 0
    assert run("config").exit_code == run("top").exit_code == 2
    assert set(_WITHOUT_DEFAULTS) <= set(COMMANDS)


def test_config_shows_where_each_comes_from(write):
    path = write('temperature = 0.2\nmodel = "a.gguf"\n[run]\norder = "finished"\n')
    shown = run("config", LLAMABATCH_MODEL="b.gguf").output.splitlines()
    assert [line.split() for line in shown] == [
        ["file:", str(path)],
        ["model", "b.gguf", "LLAMABATCH_MODEL"],
        ["temperature", "0.2", "config.toml,", "line", "1"],
        *[["model", "a.gguf", "config.toml,", "line", "2;", "LLAMABATCH_MODEL", "overrides", "it"]],
        ["run.order", "finished", "config.toml,", "line", "4"],
    ]
    document = json.loads(run("config", "--json", LLAMABATCH_MODEL="b.gguf").output)
    assert [row["in_force"] for row in document["defaults"]] == [True, True, False, True]
    assert run("config", "--path").output.strip() == str(path)


def test_config_shows_the_variables_and_who_reads_them(write):
    write("n-slots = 3\n[run]\nn-ctx = 512\n[chat]\nn-ctx = 256\n")
    shown = run("config", LLAMABATCH_N_SLOTS="2", LLAMABATCH_N_CTX="1024", LLAMABATCH_API_KEY="secret").output
    rows = [" ".join(line.split()) for line in shown.splitlines()[1:]]
    assert rows == [
        "n-slots 2 LLAMABATCH_N_SLOTS, for run and serve",
        "n-ctx 1024 LLAMABATCH_N_CTX, for run and serve",
        "api-key (not shown) LLAMABATCH_API_KEY, for serve",
        "n-slots 3 config.toml, line 1; LLAMABATCH_N_SLOTS overrides it for run and serve",
        "run.n-ctx 512 config.toml, line 3; LLAMABATCH_N_CTX overrides it",
        "chat.n-ctx 256 config.toml, line 5",
    ]
    found = json.loads(run("config", "--json", LLAMABATCH_N_SLOTS="2", LLAMABATCH_N_CTX="1024").output)["defaults"]
    assert [each["in_force"] for each in found] == [True, True, True, False, True]  # chat uses the file's n-slots
    refused = run("config", LLAMABATCH_N_SLOTS="x")
    assert (refused.exit_code, "LLAMABATCH_N_SLOTS is 'x'; 'x' is neither" in refused.output) == (2, True)


def test_without_a_file(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.toml"))
    assert read_settings(config_path(), COMMANDS) == []
    assert f"(not there; {VARIABLE} names it, so other commands refuse to start)" in run("config").output
    assert "none.toml, which is not there" in run("plan").output
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert config_path().parts[-2:] == ("llamabatch", "config.toml")


@pytest.mark.parametrize("name", COMMANDS)
def test_any_option_can_have_a_default(name):
    command = cli.command_of(name)
    long = {str(option.name) for option in options_of(command).values()}
    assert long == {str(param.name) for param in command.params if isinstance(param, click.Option)}
