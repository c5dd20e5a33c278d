"""Completion: each shell's protocol offers commands, options and values. bash itself is asked, too."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from llamabatch.cli import COMMANDS, cli
from llamabatch.cli.completion import Bash
from tests.unit.gguf.test_model_cache import NEW, add


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))
    add(tmp_path / "hub", "owner/repo", NEW, {"m-Q4_K_M.gguf": b"GGUF", "m-Q8_0.gguf": b"GGUF8"})
    here = tmp_path / "here"
    (here / "models").mkdir(parents=True)
    for name in ("mine.gguf", "notes.txt", "models/other.gguf"):
        (here / name).write_bytes(b"")
    monkeypatch.chdir(here)
    return here


def completed(line, monkeypatch, breaks=" :="):
    """Returns what bash would be told for a line that ends at the cursor."""
    monkeypatch.setenv("LLAMABATCH_LINE", line)
    monkeypatch.setenv("LLAMABATCH_BREAKS", breaks)
    told = Bash(cli, {}, "llamabatch", "_LLAMABATCH_COMPLETE").complete()
    return [row.partition(",")[2] for row in told.splitlines()]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("llamabatch ", list(COMMANDS)),
        ("llamabatch com", ["compare", "completion"]),
        ("llamabatch serve --max-b", ["--max-body-bytes", "--max-bodies-bytes"]),
        ("llamabatch serve -ngl 99 --log-level d", ["debug"]),
        ("llamabatch generate --kv ", ["auto", "split", "unified"]),
        ("llamabatch generate --kv=sp", ["split"]),
        ("llamabatch generate -m m", ["mine.gguf", "models/"]),
        ("llamabatch generate -m models/", ["models/other.gguf"]),
        ("llamabatch generate -m t", ["tiny"]),
        ("llamabatch generate -m own", ["owner/repo:Q4_K_M", "owner/repo:Q8_0"]),
        ("llamabatch generate -m owner/repo:Q4", ["Q4_K_M"]),
        ("llamabatch generate --model=owner/repo:", ["Q4_K_M", "Q8_0"]),
        ("llamabatch rm owner/repo:Q8", ["Q8_0"]),
        ("llamabatch plan m", ["mine.gguf", "models/"]),
        ("llamabatch chat --n-ctx 512 t", ["tiny"]),
        ("llamabatch plan tiny m", []),
        ("llamabatch plan -m tiny m", []),
        ("llamabatch completion ", ["bash", "zsh", "fish"]),
    ],
)
def test_commands_options_and_values(folder, monkeypatch, line, wanted):
    found = completed(line, monkeypatch)
    assert [value for value in found if value in wanted] == wanted
    assert not [value for value in found if value not in wanted and not value.startswith("-")]


def test_a_shell_that_does_not_break_at_colons_gets_whole_names(folder, monkeypatch):
    assert completed("llamabatch rm owner/repo:Q8", monkeypatch, breaks=" ") == ["owner/repo:Q8_0"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(shell):
    script = CliRunner().invoke(cli, ["completion", shell]).output
    assert f"_LLAMABATCH_COMPLETE={shell}_complete" in script
    assert "llamabatch" in script
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes(folder, tmp_path):
    script = tmp_path / "script"
    script.write_text(CliRunner().invoke(cli, ["completion", "bash"]).output)
    program = tmp_path / "llamabatch"
    code = "import sys; sys.argv[0] = 'llamabatch'; from llamabatch.cli import main; main()"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{code}" "$@"\n')  # a path may have blanks
    program.chmod(0o755)
    line = "llamabatch generate -m owner/repo:Q8"
    asked = (
        f"source {script}; COMP_LINE='{line}'; COMP_POINT={len(line)}; compopt() {{ :; }}; "
        f"_llamabatch_completion {program}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", asked], capture_output=True, text=True, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("Q8_0\n", "")
