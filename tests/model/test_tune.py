"""`llamabatch tune` on the bundled model runs end to end in a few seconds, and engines use its results."""

import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from llamabatch import LLM, EngineConfig, SamplingParams
from llamabatch.errors import EngineError
from llamabatch.gguf.resolve import resolve
from llamabatch.llama import library, log
from llamabatch.planning import profile_store
from llamabatch.planning.profile import Profile, Stair
from llamabatch.tools.plan.run import Question, answer
from llamabatch.tools.tune.children import Children, busy_neighbour
from llamabatch.tools.tune.run import Settings, run
from llamabatch.tools.tune.stages import STAIRS, Job, Setting
from tests.clients import innermost
from tests.processes import Started
from tests.waiting import PATIENCE_S, until

SETTING = Setting("on", 1000, "off", "f16", "f16", 512, 1, 1)
JOB = Job(prompt=24, rows=(1, 4), n_ctx=32, n_slots=4, seconds=0.01)


class Silent:
    def start(self, title, share):
        pass

    def advance(self, share):
        pass

    def end(self, outcome):
        pass


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path))
    return tmp_path


def keep(**values):
    key = profile_store.key_of(resolve("tiny"), EngineConfig("m"))
    profile_store.keep(Profile(key, "2026-01-02", "tiny", **values))


def test_tuned_once_used_from_then_on(cache):
    started = Started()
    report = run(Settings("tiny", seconds=1, p95_inter_token_ms=100_000, beside_load=True), Silent())
    assert [stair.rows for stair in report.stairs] == list(STAIRS)
    assert all(0 < stair.step_ms <= stair.p95_ms for stair in report.stairs)
    assert report.latency.rows == report.best_rows == report.profile.latency_rows
    assert report.latency.prompt_ms > 0
    assert report.file.is_relative_to(cache)
    assert profile_store.find(resolve("tiny"), EngineConfig("m")) == report.profile
    assert started() == []
    with LLM("tiny", strategy="batched", n_ctx=256) as llm:
        assert llm.plan.config.n_slots == report.best_rows
        assert report.profile.source in llm.plan.reasons["n_slots"]
        assert llm.generate("Hello")[0].error is None
    with LLM("tiny", n_ctx=256, profile=False) as llm:
        assert llm.plan.config.n_slots == 32
        assert not any("profile" in why for why in llm.plan.reasons.values())


@pytest.mark.parametrize("isolate", [False, True])
def test_an_engine_runs_as_its_profile_says(cache, isolate):
    keep(
        flash_attn="off", extra_bufts="off", n_threads=2, n_threads_batch=1, n_ubatch=64, stairs=(Stair(3, 1.0),)
    )  # fmt: skip
    with LLM("tiny", strategy="batched", isolate=isolate) as llm:
        config = llm.plan.config
        assert (config.flash_attn, config.extra_bufts, config.n_threads) == ("off", "off", 2)
        assert (config.n_threads_batch, config.n_ubatch, config.n_slots) == (1, 64, 3)
        assert all(output.error is None for output in llm.generate(["Hello " * 200] * 4))
    with LLM("tiny", strategy="batched", isolate=isolate, n_ubatch=128, flash_attn="on") as llm:
        assert (llm.plan.config.n_ubatch, llm.plan.config.flash_attn, llm.plan.config.n_threads) == (128, "on", 2)


@pytest.mark.parametrize("instances", [1, 2])
def test_the_plan_and_the_load_repack_as_the_profile_says(cache, instances):
    lines = []
    handler, level = logging.Handler(), log.llama_logger.level
    handler.emit = lambda record: lines.append(record.getMessage())
    log.llama_logger.addHandler(handler)
    log.llama_logger.setLevel(logging.INFO)
    found = []
    try:
        for kept in (False, True):
            if kept:
                keep(extra_bufts="off")
            lines.clear()
            with LLM("tiny", n_slots=2, n_ctx=256, instances=instances) as llm:
                buffers = {line.split()[1] for line in lines if "model buffer size" in line} - {"CPU_Mapped"}
                found.append((llm.plan.config.extra_bufts, bool(buffers), llm.plan.memory.copies > 0))
            report = answer(Question("tiny", {"n_slots": 2, "n_ctx": 256, "instances": instances}))
            assert report.memory == llm.plan.memory
            assert all((row.memory.copies > 0) == found[-1][2] for row in report.rows)
    finally:
        log.llama_logger.removeHandler(handler)
        log.llama_logger.setLevel(level)
    repacks = bool(library.repack_features()) and library.extra_bufts_safe()
    assert found == [("auto", repacks, repacks), ("off", False, False)]


@pytest.mark.parametrize(("option", "read"), [("True", ["77", "0"]), ("False", ["3000", "None"])])
def test_variables_that_libraries_read_once_are_set_for_the_load(cache, option, read):
    keep(spins=77, amx="off")
    code = (
        "import os, sys\n"
        "from llamabatch.llama import library\n"
        "real = library._import_choice\n"
        "def show():\n"
        "    print(os.environ['GOMP_SPINCOUNT'], os.environ.get('GGML_CPU_AMX'))\n"
        "    return real()\n"
        "library._import_choice = show\n"
        "from llamabatch import Engine, EngineConfig\n"
        "assert 'llama_cpp' not in sys.modules\n"
        f"Engine(EngineConfig('tiny', profile={option})).close()\n"
        "assert not {'GOMP_SPINCOUNT', 'GGML_CPU_AMX'} & os.environ.keys()\n"
        f"assert library._amx_off is {option}\n"
    )
    fixed = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "GGML_CPU_AMX")
    environment = {k: v for k, v in os.environ.items() if k not in fixed}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, read), done.stderr


def test_a_profile_for_other_devices_is_not_believed(cache):
    keep(flash_attn="off", gpus=("A GPU",))
    with LLM("tiny", strategy="batched", n_ctx=256) as llm:
        assert "profile" not in llm.plan.describe()


def test_a_child_that_dies_is_an_error_and_the_next_call_survives():
    started = Started()
    with Children(EngineConfig("tiny"), 2) as children:
        assert set(children.measure(SETTING, JOB)) == {"prompt", "1", "4", "p95 1", "p95 4"}
        (child,) = started()
        child.terminate()  # systemd signals every process of a service; the child must leave its end to the parent
        assert children.measure(SETTING, JOB)
        child.kill()
        child.wait()
        with pytest.raises(EngineError, match="ended"):
            children.measure(SETTING, JOB)
        figures = children.measure(SETTING, replace(JOB, time_prompt=False))
        assert set(figures) == {"1", "4", "p95 1", "p95 4"}
        assert all(ms > 0 for ms in figures.values())


def test_no_more_processes_than_there_is_room_for():
    started = Started()
    with Children(EngineConfig("tiny"), 1) as children, busy_neighbour():
        for spins in (1000, 2000, 1000):
            children.measure(replace(SETTING, spins=spins), JOB)
            assert len(started()) == 2  # the measuring child, and its neighbour
    assert started() == []


def test_ctrl_c_leaves_no_process_and_no_profile(cache):
    command = [sys.executable, "-m", "llamabatch", "tune", "--json", "-"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    children = until(lambda: psutil.Process(process.pid).children(recursive=True))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []
    assert list(cache.glob("profiles/*.json")) == []


def test_the_command_writes_json_and_refuses_bad_input(cache):
    def tune(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "llamabatch", "tune", *arguments], capture_output=True, text=True, timeout=60
        )

    for bad, words in (
        (("-m", "nowhere.gguf"), "nowhere.gguf"),
        (("--plot", "x.doc"), "x.doc"),
        (("--type-k", "q3"), "type_k"),
    ):
        done = tune(*bad)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
    (cache / "profiles").write_text("in the way")
    done = tune("--beside-load")
    assert done.returncode == 3
    assert "LLAMABATCH_CACHE" in done.stderr
    doctor = [sys.executable, "-m", "llamabatch", "doctor", "--json"]
    checks = json.loads(subprocess.run(doctor, capture_output=True, text=True, timeout=60).stdout)["checks"]
    assert [check["status"] for check in checks if check["name"] == "profiles"] == ["ok"]


def test_slots_follow_the_queue():
    """Few requests use few slots, and many use all. The context grows once, and slots with the lowest ids are used."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    with LLM("tiny", strategy="batched", n_slots=16, start_slots=3, n_ctx=256, profile=False) as llm:

        def rows_of(n):
            before = llm.stats()
            outputs = llm.generate([f"{i} Once upon a time" for i in range(n)], params)
            assert all(output.error is None for output in outputs)
            after = llm.stats()
            rows = (after.decode_rows - before.decode_rows) / (after.decode_calls - before.decode_calls)
            return rows, innermost(llm).ask(lambda engine: engine._runner._context.n_slots).result()

        assert rows_of(1) == (1.0, 3)
        rows, slots = rows_of(3)
        assert 2 < rows <= 3
        assert slots == 3
        rows, slots = rows_of(64)
        assert 12 < rows <= 16
        assert slots == 16
        rows, slots = rows_of(2)
        assert 1 <= rows <= 2
        assert slots == 16


def test_more_rows_than_pay_are_not_taken(cache):
    """The profile says that 4 rows give the most tokens/s."""
    stairs = (Stair(1, 1.0), Stair(4, 1.2), Stair(8, 4.0), Stair(16, 9.0))
    keep(stairs=stairs)
    with LLM("tiny", strategy="batched", n_ctx=256) as llm:
        llm.generate([f"{i} Once upon a time" for i in range(24)], SamplingParams(max_tokens=4, ignore_eos=True))
        assert llm.stats().free_slots == llm.plan.config.n_slots == 4
    keep(stairs=stairs, p95_inter_token_ms=1.1, latency_rows=1)
    with LLM("tiny", strategy="batched", n_ctx=256) as llm:
        assert llm.plan.config.n_slots == 1
        assert "1.1 ms between two tokens at p95" in llm.plan.describe()
