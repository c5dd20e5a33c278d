"""`llamabatch compare` on the bundled model, with real processes and figures. It leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter

import psutil
import pytest

from llamabatch import LLM, EngineConfig, SamplingParams
from llamabatch.llama import library
from llamabatch.scheduler.policies import STRATEGIES
from llamabatch.tools.compare.baseline import Loop
from llamabatch.tools.compare.measure import BASELINE
from llamabatch.tools.compare.run import Settings, run
from tests.processes import alive
from tests.waiting import PATIENCE_S, until

QUESTIONS = [
    "What is the capital of France?",
    "Add 12 and 30.",
    "Tell a short story about a fox.",
    "Write this backwards: river stone cloud",
    "What is the capital of Japan?",
    "Make a JSON record of a person.",
]
COMMAND = [sys.executable, "-c", "from llamabatch.cli import main; main()", "compare"]
ONE_ROW = ("sequential", "length-sorted", "interleaved", BASELINE)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    path.write_text("\n".join(map(json.dumps, [*lines, {"prompt": "Once upon a time"}])), encoding="utf-8")
    return path


class Watcher:
    """A Progress that counts, and calls `act` when the first request of a run is done."""

    def __init__(self, at=None, act=lambda: None) -> None:
        self.done = Counter()
        self.walls = {}
        self._at, self._act = at, act

    def start(self, label, total):
        self._label, self._total = label, total

    def advance(self):
        self.done[self._label] += 1
        if self._label == self._at and self.done[self._label] == 1:
            self._act()

    def end(self, wall_s, error):
        self.walls[self._label] = wall_s


def test_every_strategy_end_to_end(prompts, tmp_path):
    target = tmp_path / "compare.json"
    command = [*COMMAND, "--prompts", prompts, "-n", "12", "--n-ctx", "256"]
    command += ["--slots", "1,4", "--json", target]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "For work like this " in done.stdout
    assert all(f"{name}: 7 requests in " in done.stderr for name in (BASELINE, *STRATEGIES))
    read = json.loads(target.read_text(encoding="utf-8"))
    assert [row["strategy"] for row in read["rows"]] == [BASELINE, *STRATEGIES]
    for row in read["rows"]:
        assert row["error"] is None
        assert row["equal_to_sequential"] >= 6 / 7, row["strategy"]
        assert len(row["requests"]) == 7
        assert all(len(r["token_times_s"]) == r["output_tokens"] <= 12 for r in row["requests"])
        assert all(r["queued_s"] <= r["ttft_s"] <= r["total_s"] <= row["wall_s"] for r in row["requests"])
        assert row["passes_per_step"] == 1.0 or row["strategy"] not in ONE_ROW
        assert (row["rows_per_step"] == 1.0) == (row["strategy"] in ONE_ROW), row["strategy"]
        assert row["peak_memory_bytes"] > 20 * 2**20
    by_name = {row["strategy"]: row for row in read["rows"]}
    assert by_name[BASELINE]["speed_up"] == 1.0
    assert by_name["auto"]["chosen"] in STRATEGIES
    assert by_name["multi-instance"]["instances"] >= 2
    assert {row["options"]["n_threads"] for row in read["rows"] if row["instances"] == 1} == {
        by_name[BASELINE]["options"]["n_threads"]
    }
    assert [row["n_slots"] for row in read["slots"]["rows"]] == [1, 4]


def test_the_baseline_gives_what_the_engine_gives(prompts):
    """Prompts, token ids, texts, stops and limits are the same, but for one text that may differ."""
    report = run(Settings(prompts=prompts, strategies=("sequential",), max_tokens=8), Watcher())
    loop, ours = (row.measurement.outputs for row in report.rows)
    with LLM("tiny", strategy="sequential") as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        expected = llm.chat([[{"role": "user", "content": q}] for q in QUESTIONS], params)
        expected += llm.generate(["Once upon a time"], params)
    equal = 0
    for one, other, wanted in zip(loop, ours, expected, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids == wanted.prompt_token_ids
        assert other.token_ids == wanted.token_ids
        if one.token_ids == other.token_ids:
            equal += 1
            assert (one.text, one.finish_reason, one.outputs[0].stop_reason) == (
                other.text, other.finish_reason, other.outputs[0].stop_reason
            )  # fmt: skip
    assert equal >= len(expected) - 1
    assert {o.finish_reason.value for o in ours} == {"stop", "length"}


@pytest.mark.parametrize(("asked", "number"), [("auto", -1), ("on", 1), ("off", 0)])
def test_the_flash_attention_of_the_baseline_is_that_of_the_engines(asked, number, monkeypatch):
    binding = library.load().llama_cpp
    for name in ("LLAMA_FLASH_ATTN_TYPE_ENABLED", "llama_model_default_params"):  # the baseline changes these
        monkeypatch.setattr(binding, name, getattr(binding, name))
    config = EngineConfig(model="tiny", n_ctx=256, n_threads=1, n_threads_batch=1, flash_attn=asked)
    loop = Loop(config)
    assert loop._llama.context_params.flash_attn_type == number
    loop._llama.close()


def test_an_engine_that_dies_costs_its_own_row_only(prompts, begun):
    watcher = Watcher("static", lambda: [child.kill() for child in begun.children()])
    settings = Settings(prompts=prompts, strategies=("static", "batched"), max_tokens=64, baseline=False, slots=(2,))
    report = run(settings, watcher)
    static, batched = report.rows
    assert "SIGKILL" in static.error
    assert batched.error is None
    assert report.failed
    assert not begun.children()


def children_of(process) -> list[int]:
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


def started(prompts, *, strategies: str, baseline: bool) -> tuple[subprocess.Popen, list[int]]:
    """Starts a comparison that takes long. Returns its process, and the pids of its first children."""
    command = [*COMMAND, "--prompts", prompts, "--strategies", strategies]
    command += ["--rounds", "100", "--baseline" if baseline else "--no-baseline"]
    process = subprocess.Popen(
        command, start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    return process, until(lambda: children_of(process))


@pytest.mark.parametrize(
    ("strategies", "baseline", "in_a_later_round"),
    [
        ("sequential", True, False),
        ("multi-instance", False, False),
        ("multi-instance", False, True),
    ],
)
def test_ctrl_c_leaves_no_child_behind(prompts, strategies, baseline, in_a_later_round):
    process, children = started(prompts, strategies=strategies, baseline=baseline)
    if in_a_later_round:
        until(lambda: "requests in" in process.stderr.readline())
    children += children_of(process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert "Interrupted." in err
    assert alive(children) == []


def test_a_parent_that_is_killed_leaves_no_child_behind(prompts):
    process, children = started(prompts, strategies="sequential", baseline=True)
    process.kill()
    process.communicate()
    until(lambda: not alive(children))
