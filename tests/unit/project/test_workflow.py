"""The workflow for a public host of the repository, as far as that can be told without the host."""

import re
import subprocess
from pathlib import Path

import pytest

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
