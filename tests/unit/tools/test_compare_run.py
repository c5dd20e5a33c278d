"""The order of a comparison, its failures and its options, from invented measurements."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from llamabatch.cli import cli
from llamabatch.errors import ConfigError, EngineError, MemoryPlanError, SamplingError
from llamabatch.scheduler.policies import STRATEGIES
from llamabatch.tools import processes
from llamabatch.tools.compare import run as module
from llamabatch.tools.compare.measure import BASELINE
from llamabatch.tools.compare.run import Settings, run
from llamabatch.tools.processes import PeakMemory, no_child_left
from llamabatch.tools.workload import Workload
from tests.unit.compare_fakes import MACHINE, measurement
from tests.waiting import PATIENCE_S, until


class FakeModel:
    def __init__(self, path, config, vocab_only) -> None:
        self.metadata = {"general.name": "An invented model"}

    def close(self) -> None:
        pass


class Silent:
    def __init__(self) -> None:
        self.labels: list[str] = []

    def start(self, label, total):
        self.labels.append(label)

    def advance(self):
        pass

    def end(self, wall_s, error):
        self.labels[-1] += " failed" if error else ""


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Replaces everything native. Returns the list of measurements that were made."""
    done = []
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF" + b"\3\0\0\0" + bytes(16))
    monkeypatch.setattr(module, "resolve", lambda name: model)
    monkeypatch.setattr(module, "Model", FakeModel)
    monkeypatch.setattr(module, "plan", lambda config, vocabulary: measurement("sequential").plan)
    monkeypatch.setattr(module, "load", lambda path, vocabulary, n_ctx: Workload("bundled", ((1, 2),) * 64))
    monkeypatch.setattr(module, "extra_bufts_safe", lambda: True)
    monkeypatch.setattr(module.MachineFacts, "here", classmethod(lambda cls: MACHINE))

    def measure(config, prompts, max_tokens, on_done, *, baseline):
        name = BASELINE if baseline else config.strategy
        done.append((name, config.n_slots))
        if config.n_ctx == 99 and name == "static":
            raise EngineError("it died")
        return measurement(name, 8 if config.n_slots == "auto" else config.n_slots)

    monkeypatch.setattr(module, "measure", measure)
    return done


def test_baseline_first_then_all_strategies(measured):
    progress = Silent()
    report = run(Settings(), progress)
    assert progress.labels == [BASELINE, *STRATEGIES]
    assert [row.strategy for row in report.rows] == [BASELINE, *STRATEGIES]
    assert dict(measured)["sequential"] == dict(measured)["length-sorted"] == 1
    assert dict(measured)["batched"] == "auto"
    assert all(row.equal == 1.0 for row in report.rows)
    assert report.sweep is None
    assert not report.failed


def test_one_size_is_for_all_and_several_are_measured_one_by_one(measured):
    run(Settings(slots=(4,), strategies=("batched", "sequential", "batched"), baseline=False), Silent())
    assert measured == [("batched", 4), ("sequential", 1)]
    measured.clear()
    report = run(Settings(slots=(8, 1, 2, 2), strategies=("static",), baseline=False), Silent())
    assert measured == [("static", 8), ("batched", 1), ("batched", 2), ("batched", 8)]
    assert [row.n_slots for row in report.sweep.rows] == [1, 2, 8]


def test_a_strategy_that_fails_does_not_stop_the_others(measured):
    progress = Silent()
    report = run(Settings(engine={"n_ctx": 99}, strategies=("static", "batched"), rounds=2), progress)
    assert progress.labels == [BASELINE, "static failed", "batched", BASELINE, "batched"]
    assert [row.error for row in report.rows] == [None, "it died", None]
    assert report.failed
    assert report.advice.strategy == "batched"


def test_rounds_go_through_all_before_they_repeat(measured):
    report = run(Settings(rounds=3, strategies=("sequential", "batched"), baseline=False), Silent())
    assert [name for name, _ in measured] == ["sequential", "batched"] * 3
    assert all(len(row.rounds) == 3 for row in report.rows)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"strategies": ("batchd",)}, ConfigError, "strategies is 'batchd'.*did you mean 'batched'"),
        ({"slots": (0,)}, ConfigError, "slots is 0; give a whole number from 1 to 256"),
        ({"slots": (1, 257)}, ConfigError, "slots is 257"),
        ({"max_tokens": 0}, SamplingError, "max_tokens is 0"),
        ({"rounds": 0}, ConfigError, "rounds is 0; give a whole number from 1 to 100"),
        ({"engine": {"n_ubatch": 4096}}, ConfigError, "n_ubatch is 4096"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(settings, error, message):
    with pytest.raises(error, match=message):
        Settings(**settings)


def invoke(*arguments):
    return CliRunner().invoke(cli, ["compare", *arguments])


def test_the_command_prints_table_and_advice(measured):
    result = invoke("--strategies", "sequential, batched", "--slots", "8")
    assert result.exit_code == 0, result.output
    assert "For work like this use batched" in result.stdout
    assert result.stderr.splitlines()[0].startswith("baseline: 64 requests in ")
    assert measured == [(BASELINE, 1), ("sequential", 1), ("batched", 8)]


def test_json_on_stdout_is_nothing_but_json(measured):
    result = invoke("--json", "-", "--no-baseline", "--slots", "1,2")
    read = json.loads(result.stdout)
    assert read["advice"]["strategy"] in STRATEGIES
    assert len(read["slots"]["rows"]) == 2


def test_files_are_written_beside_the_table(measured, tmp_path):
    pytest.importorskip("matplotlib")
    result = invoke("--json", str(tmp_path / "c.json"), "--plot", str(tmp_path / "c.png"), "--strategies", "all")
    assert result.exit_code == 0, result.output
    assert "multi-instance" in result.stdout
    assert json.loads((tmp_path / "c.json").read_text())["schema_version"] == 1
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_strategy_makes_the_exit_code_1(measured):
    result = invoke("--n-ctx", "99", "--strategies", "static,batched")
    assert result.exit_code == 1
    assert "it died" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "quick"], "strategies is 'quick'"),
        (["--strategies", ","], "names no strategy"),
        (["--slots", "few"], "neither a whole number nor a list such as 1,2,4,8"),
        (["-n", "0"], "max_tokens is 0"),
        (["--json", "/no/such/folder/x.json"], "there is no directory /no/such/folder"),
        (["--plot", "x.bmp"], "no ending of a picture"),
        (["--kv-slots", "4"], "No such option"),
        (["-m", "/no/such.gguf"], "does not exist"),
    ],
)
def test_bad_usage_exits_with_2_and_a_sentence(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_no_child_is_left_after_an_exception():
    children = []

    def interrupted() -> None:
        with no_child_left():
            children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
            raise MemoryPlanError("too large")

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as earlier:
        with pytest.raises(MemoryPlanError):
            interrupted()
        assert children[0].wait(PATIENCE_S) is not None
        assert earlier.poll() is None, "only what was started inside is ended"
        earlier.communicate(b"\n")
    assert earlier.returncode == 0


def test_peak_memory_of_a_process(monkeypatch):
    with PeakMemory([os.getpid()]) as peak:
        known = peak.read()
    assert known is None or known > 10 * 2**20, "Linux keeps it"
    monkeypatch.setattr(processes, "_high_water_mark", lambda pid: None)
    with PeakMemory([os.getpid()]) as peak:
        block = bytes(range(256)) * 2**17  # 32 MiB
        until(peak.read)
    assert (peak.read() or 0) > len(block)
    assert PeakMemory([2**22 + 1]).read() is None
