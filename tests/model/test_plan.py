"""`llamabatch plan`, and a comparison of its predictions with measurements."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner

from llamabatch import LLM, Engine, EngineConfig
from llamabatch.cli import cli
from llamabatch.engine import resolve_config
from llamabatch.errors import ConfigError, InputError, MemoryPlanError
from llamabatch.gguf.resolve import resolve
from llamabatch.llama import model as model_module
from llamabatch.planning.machine import Machine
from llamabatch.planning.memory import PROCESS_BYTES
from llamabatch.planning.model_facts import ModelFacts
from llamabatch.planning.profile import Profile, ProfileKey, Stair
from llamabatch.tools.plan.advice import strategy
from llamabatch.tools.plan.run import Question, answer, size_in_bytes
from llamabatch.tools.synth import Shape, write_model
from tests.long import address_space, memory_prediction
from tests.long.memory_prediction import MOST_OFF, measure

MIB = 2**20
SMALL = Shape("qwen2", 6, 512, 2048, 8, 2, 64, 32_000, 4096, 1e6, 1e-6, tied=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    return {quant: (folder / f"{quant}.gguf", write_model(SMALL, folder / f"{quant}.gguf", quant))[0] for quant in
            ("Q8_0", "Q4_K_M")}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize(("quant", "n_slots"), [("Q8_0", 8), ("Q4_K_M", 32)])
def test_the_predicted_peak_is_the_measured_one(models, quant, n_slots):
    """tests/long/memory_prediction.py has all cases, with the bundled model and real shapes."""
    found = measure(str(models[quant]), {"n_slots": n_slots, "n_ctx": 1024})
    assert found["ratio"] == pytest.approx(1, abs=MOST_OFF), found
    repacking = {"Q8_0": {"amx", "rows", "neon"}, "Q4_K_M": {"amx", "avx2", "neon"}}[quant]
    assert (found["plan"]["copies"] > 0) == bool(repacking & resolve_config.machine_here(EngineConfig("m")).features)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_predicted_peak_where_the_embedding_is_a_large_part_of_the_file(tied, use_mmap, tmp_path):
    """If the model has an output tensor of its own, it is the first in the file, and is unmapped once it is copied."""
    shape = Shape("llama", 1, 1024, 2816, 16, 4, 64, 48_000, 4096, 1e4, 1e-5, tied=tied)
    write_model(shape, tmp_path / "m.gguf", "Q4_K_M")
    found = measure(str(tmp_path / "m.gguf"), {"n_slots": 8, "n_ctx": 512, "instances": 1, "use_mmap": use_mmap})
    assert found["ratio"] == pytest.approx(1, abs=MOST_OFF), found


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("number", range(memory_prediction.QUICK))
def test_the_prediction_for_the_bundled_model(number, tmp_path):
    memory_prediction.case(number, tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS does not hold elsewhere")
@pytest.mark.parametrize("number", range(address_space.QUICK))
def test_a_limit_on_the_address_space(number, tmp_path):
    address_space.case(number, tmp_path)


def run(*arguments):
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)], catch_exceptions=False)


def test_the_tables():
    done = run("-m", "tiny", "--slots", 8, "--n-ctx", 512, "--memory", "2G")
    assert done.exit_code == 0
    for text in (
        "2,048 MiB given with --memory",
        "It fits: 8 slots of 512 tokens",
        "prefixes beyond the slots",
        "512 ◀",
        "Strategy: batched",
        "sum",
    ):
        assert text in done.output, text


def test_json_says_the_same_as_the_engine():
    found = json.loads(run("--slots", 8, "--n-ctx", 512, "--json", "--no-profile").output)
    with Engine(EngineConfig("tiny", n_slots=8, n_ctx=512, profile=False)) as engine:
        one = answer(Question(engine={"n_slots": 8, "n_ctx": 512, "profile": False, "instances": 1}))
        assert one.memory == engine.plan.memory
    assert found["schema_version"] == 1
    assert found["fits"]
    assert found["memory"]["one_engine"]["total"] == sum(
        found["memory"]["one_engine"][name]
        for name in ("weights", "kv_cache", "compute", "copies", "vocabulary", "draft", "cache_ram")
    )
    assert [row["n_ctx"] for row in found["by_n_ctx"]] == [256, 512, 1024, 2048]
    assert all(row["slots"] <= row["most_slots"] for row in found["by_n_ctx"])


def test_a_refusal_comes_with_changes_that_fit(models):
    asked = ("-m", models["Q8_0"], "--n-ctx", 4096, "--kv", "split", "--memory", "400M", "--strategy", "batched")
    done = run(*asked, "--slots", 64, "--json")
    assert done.exit_code == 1
    found = json.loads(done.output)
    assert not found["fits"]
    assert "64 x 4,096 cells" in found["refusal"]
    changes = found["changes"]
    for start in ("with n_ctx 4,096: ", "with n_ctx 1,024: 64 slots", "--kv unified --kv-cells "):
        assert any(change["what"].startswith(start) for change in changes), start
    assert all(change["total_bytes"] <= 400 * MIB for change in changes)
    few = next(change["slots"] for change in changes if change["what"].startswith("with n_ctx 4,096"))
    assert run(*asked, "--slots", few).exit_code == 0
    more = run(*asked, "--slots", few + 1)
    assert more.exit_code == 1
    assert "It does not fit" in more.output
    assert "What would make it fit" in more.output


def test_a_unified_cache_has_an_answer(models):
    done = run("-m", models["Q8_0"], "--n-ctx", 4096, "--slots", 32, "--memory", "220M")
    assert done.exit_code == 0
    assert "cells shared by" in done.output
    assert "32 slots of 4,096 tokens that share " in done.output
    assert run("-m", models["Q8_0"], "--kv", "unified", "--memory", "220M").exit_code == 0


def test_room_for_one_slot_in_half_is_room_for_more_in_all(models):
    found = answer(
        Question(str(models["Q8_0"]), {"n_ctx": 1024, "instances": 1, "profile": False}, memory_bytes=150 * MIB)
    )
    assert found.requested.config.strategy == "sequential"
    [row] = [row for row in found.rows if row.n_ctx == 1024]
    assert row.slots <= 1 < row.most_slots < 64
    assert row.slot_bytes >= 1024 * 6 * 2 * 128 * 2  # f16 cells of 6 layers with 2 heads of 64
    assert any(change.what.startswith("--slots ") and change.slots > 1 for change in found.changes)
    shown = run("-m", models["Q8_0"], "--n-ctx", 1024, "--memory", "150M", "--instances", 1, "--no-profile").output
    assert "It fits: 1 slot of 1,024 tokens" in shown


def test_memory_that_is_given_holds_the_process_too(models):
    """A plan for this memory fits exactly if an engine with so much free memory would accept it."""
    model = str(models["Q8_0"])
    done = run("-m", model, "--slots", 4, "--instances", 1, "--cache-ram", 0, "--json")
    peak = json.loads(done.output)["memory"]["predicted_peak"]
    asked = {"n_slots": 4, "instances": 1, "kv": "split", "cache_ram": 0}
    assert answer(Question(model, asked, memory_bytes=peak)).fits
    assert not answer(Question(model, asked, memory_bytes=peak - MIB - _reclaimable(model, asked))).fits


def _reclaimable(model, asked):
    return answer(Question(model, asked)).memory.reclaimable


def test_a_strategy_with_one_slot_is_planned_with_one():
    found = answer(Question(engine={"strategy": "sequential", "profile": False}))
    assert {(row.slots, row.most_slots) for row in found.rows} == {(1, 1)}
    assert "It fits: 1 slot of 2,048 tokens" in run("--strategy", "sequential", "--no-profile").output


def test_nothing_is_loaded(monkeypatch):
    def load(*_):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(model_module.Model, "__init__", load)
    assert answer(Question()).fits
    with pytest.raises(MemoryPlanError, match=r"are free: .* weights \+ .* = "):
        LLM("tiny", n_slots=256, n_ctx=2048, kv="split", **_little(monkeypatch))


def _little(monkeypatch):
    monkeypatch.setattr(resolve_config, "machine_here", lambda config, **_: Machine(2, 64 * MIB))
    return {"profile": False}


@pytest.mark.parametrize("arguments", ["plan", "plan --json", "doctor", "generate --max-tokens 400 --ignore-eos Once"])
def test_a_closed_stdout_ends_the_command_in_silence(arguments):
    """The exit code is 141, as for other tools, and stderr is empty."""
    command = [sys.executable, "-m", "llamabatch", *arguments.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == ("", 141)


def test_auto_takes_what_fits(monkeypatch):
    monkeypatch.setattr(resolve_config, "machine_here", lambda config, **_: Machine(1, 64 * MIB, fast_attention=True))
    with LLM("tiny", n_slots="auto", profile=False, kv="split", cache_ram=0) as llm:
        assert 1 <= llm.plan.config.n_slots < 8
        assert llm.plan.total_bytes <= 32 * MIB
        one_more = replace(llm.plan.config, n_slots=llm.plan.config.n_slots + 1)
    from llamabatch.planning.plan import planned

    assert planned(ModelFacts.read(resolve("tiny")), one_more, Machine(1, 64 * MIB)).total_bytes > 32 * MIB
    monkeypatch.setattr(resolve_config, "machine_here", lambda config, **_: Machine(1, 16 * MIB))
    with pytest.raises(MemoryPlanError, match="= "):
        LLM("tiny", n_slots="auto", profile=False)


def test_prompts_decide_the_context(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one two three\n" * 9 + "word " * 200 + "\n")
    found = answer(Question(prompts=file, max_tokens=100))
    assert found.prompts.count == 10
    assert found.requested.config.n_ctx == found.prompts.longest + 100
    assert found.prompts.median < found.prompts.p95 <= found.prompts.longest
    done = run("--prompts", file, "-n", 100)
    assert "10 prompts" in done.output
    assert "counted with the model's vocabulary" in done.output
    with pytest.raises(ConfigError, match="was trained for 2048"):
        answer(Question(prompts=file, max_tokens=2000))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"load": 0}, "load is 0"), ({"latency_ms": -1}, "latency_ms"), ({"max_tokens": 0}, "max_tokens is 0")],
)
def test_bad_questions(options, message):
    with pytest.raises(ConfigError, match=message):
        Question(**options)


def test_sizes():
    assert [size_in_bytes(text) for text in ("8G", "512M", "1.5 GiB", "1000")] == [8 * 2**30, 2**29, 3 * 2**29, 1000]
    for text in ("", "much", "-1G", "8X"):
        with pytest.raises(InputError, match="give a size"):
            size_in_bytes(text)


def test_which_strategy_suits():
    plan = answer(Question(engine={"n_slots": 16, "strategy": "batched"})).plan
    shape = ModelFacts.read(resolve("tiny"))
    assert shape.n_layer > 0
    key = ProfileKey(None, "", "", 2, "", "f16", "f16")
    flat = Profile(key, "2026-01-01", "m", stairs=(Stair(1, 10.0), Stair(8, 12.0), Stair(32, 20.0)))
    steep = Profile(key, "2026-01-01", "m", stairs=(Stair(1, 10.0), Stair(8, 90.0)))
    here_ = Machine(4, 2**33)
    cases = [
        ((here_, None, None, None), "batched"),
        ((here_, None, 1, None), "sequential"),
        ((here_, flat, None, 15.0), "batched"),
        ((here_, flat, None, 5.0), "sequential"),
        ((here_, steep, None, None), "length-sorted"),
        ((here_, steep, None, 50.0), "interleaved"),
        ((Machine(4, 2**33, n_gpus=2), None, None, None), "multi-instance"),
        ((Machine(64, 2**33), None, None, None), "multi-instance"),
    ]
    for (machine, profile, load, latency), wanted in cases:
        assert strategy(plan, machine, profile, load, latency)[0] == wanted, (profile, load, latency)
    assert "with 8 slots a step takes 12 ms" in strategy(plan, here_, flat, None, 15.0)[1]


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from llamabatch.tools.plan.plot import figure

    done = run("--plot", tmp_path / "plan.png", "--slots", 8)
    assert done.exit_code == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    left, right = figure(answer(Question())).axes
    assert len(left.lines) >= 4
    assert len(right.patches) >= 4
    assert run("--plot", tmp_path / "plan.txt").exit_code == 2


def test_the_library_is_not_needed_to_read_a_header():
    """ModelFacts reads a header without importing llama_cpp."""
    code = (
        "import sys\n"
        "from llamabatch.planning.model_facts import ModelFacts\n"
        "from llamabatch.gguf.resolve import resolve\n"
        "assert ModelFacts.read(resolve('tiny')).n_layer == 6\nassert 'llama_cpp' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def kubernetes_patch(*arguments):
    return CliRunner().invoke(cli, ["plan", *arguments, "--kubernetes"], terminal_width=80)


def test_a_pod_of_the_patch_holds_the_plan_that_made_it():
    """With the pod's limit as free memory and the patch's variables as options, the plan is the same. "auto" would use
    only half of the memory."""
    asked = (
        "-m",
        "tiny",
        "--memory",
        "4G",
        "--n-threads",
        "3",
        "--type-k",
        "q8_0",
        "--flash-attn",
        "on",
        "--no-preempt",
    )
    told = kubernetes_patch(*asked, "--json")
    assert told.exit_code == 0
    first, *more = json.loads(told.stdout)
    assert first["path"] == "/spec/template/spec/containers/0/resources"
    assert first["value"]["requests"] == first["value"]["limits"]
    assert first["value"]["limits"]["cpu"] == "3"
    names = {each["value"]["name"]: each["value"]["value"] for each in more}
    assert {each["path"] for each in more} == {"/spec/template/spec/containers/0/env/-"}
    assert names["LLAMABATCH_MODEL"] == "tiny"
    assert names["LLAMABATCH_TYPE_K"] == "q8_0"
    assert names["LLAMABATCH_PREEMPT"] == "false"
    [document] = [
        answer(Question("tiny", {"n_threads": 3, "type_k": "q8_0", "flash_attn": "on"}, memory_bytes=4 * 2**30))
    ]
    memory = size_in_bytes(first["value"]["limits"]["memory"].removesuffix("i"))
    assert document.total_bytes + PROCESS_BYTES < memory < 2 * document.total_bytes + 2**29
    flags = [f"--{name.removeprefix('LLAMABATCH_').lower().replace('_', '-')}={value}" for name, value in names.items()
             if value not in ("true", "false")]  # fmt: skip
    flags = [flag.replace("--n-slots", "--slots") for flag in flags]
    again = CliRunner().invoke(cli, ["plan", "-m", "tiny", "--memory", str(memory), "--json", *flags])
    assert again.exit_code == 0, again.output
    engine = json.loads(again.stdout)["engine"]
    config = document.requested.config
    same = ("strategy", "instances", "n_slots", "n_ctx", "kv", "type_k", "n_threads", "n_threads_batch", "cache_ram")
    for name in same:
        assert engine[name] == getattr(config, name), name


def test_the_patch_as_yaml_is_the_one_as_json_and_narrow():
    yaml = pytest.importorskip("yaml")
    asked = ("-m", "tiny", "--memory", "2G", "--slots", "4")
    told = kubernetes_patch(*asked).stdout
    assert yaml.safe_load(told) == json.loads(kubernetes_patch(*asked, "--json").stdout)
    assert max(map(len, told.splitlines())) <= 80
    assert told.startswith("# tiny: 4 slots")


def test_a_plan_that_does_not_fit_gives_no_patch():
    told = kubernetes_patch("-m", "tiny", "--memory", "52M", "--slots", "32")
    assert told.exit_code == 1
    assert told.stdout == ""
    assert "are needed, but" in told.stderr


def test_variables_of_the_patch_are_read_by_run_and_serve(tmp_path, monkeypatch):
    """tests/unit/project/test_deploy.py tests the variables of `serve`."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "Once", "max_tokens": 2}\n')
    for each in json.loads(kubernetes_patch("-m", "tiny", "--memory", "2G", "--slots", "3", "--json").stdout)[1:]:
        monkeypatch.setenv(each["value"]["name"], each["value"]["value"])
    monkeypatch.setenv("LLAMABATCH_MODEL", "tiny")
    told = CliRunner().invoke(cli, ["run", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--json", "-"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["slots"] == 3
