"""`llamabatch serve`: the options that flags, variables and files pass to the server. The server is not started."""

import importlib.util
from pathlib import Path

import pytest
from click.testing import CliRunner

from llamabatch.cli import cli
from llamabatch.cli.serve import unknown_variables
from llamabatch.errors import MemoryPlanError
from llamabatch.planning.model_facts import ModelFacts
from llamabatch.request.samplers import CHAIN
from llamabatch.utils.paths import bundled_model

serve_runs = pytest.importorskip("llamabatch.cli.serve_runs")
run = pytest.importorskip("llamabatch.server.run")


class Asked:
    """The arguments that the server was started with."""

    config = None
    options = None


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    """Runs the command up to the start of the server. Returns the result and the arguments of that start."""
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("LLAMABATCH_CONFIG", str(tmp_path / "config.toml"))
    for name in ("LLAMABATCH_API_KEY", "LLAMA_API_KEY", "VLLM_API_KEY", "LLAMABATCH_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("llamabatch.server.http.logs.configure", lambda options: None)

    def call(*arguments):
        asked = Asked()

        def served(config, options, started, ready):
            asked.config, asked.options = config, options
            started(["http://127.0.0.1:8080"])
            ready(1.5)

        monkeypatch.setattr(run, "serve", served)
        result = CliRunner().invoke(cli, ["serve", *arguments])
        return result, asked

    monkeypatch.setattr(serve_runs, "_planned", lambda config: Plan())
    return call


class Plan:
    class memory:
        @staticmethod
        def describe():
            return "2 MiB weights = 2 MiB"

    class config:
        n_slots, n_ctx, instances = 4, 1024, 1

    total_bytes = 2**21


def ok(found):
    result, asked = found
    assert result.exit_code == 0, result.output
    return asked


def test_a_start_script_of_llama_server(invoke):
    line = (
        "-m tiny -c 4096 -np 4 --host 127.0.0.1 --port 9 -ngl 99 --api-key a,b --alias mine --jinja -cb --metrics "
        "--temp 0.5 -n 16 --no-mmap -ctk q8_0 -ctv q8_0 -fa on -b 512 -ub 256 -t 3 -tb 4"
    )
    asked = ok(invoke(*line.split()))
    config, options = asked.config, asked.options
    assert (config.n_ctx, config.n_slots, config.n_gpu_layers, config.use_mmap) == (1024, 4, 99, False)
    assert (config.type_k, config.type_v, config.flash_attn) == ("q8_0", "q8_0", "on")
    assert (config.n_batch, config.n_ubatch, config.n_threads, config.n_threads_batch) == (512, 256, 3, 4)
    assert (options.port, options.api_keys, options.served_model_names) == (9, ("a", "b"), ("mine",))
    assert options.sampling == {"temperature": 0.5, "max_tokens": 16}
    assert config.isolate


def test_a_start_script_of_vllm(invoke):
    line = (
        "tiny --max-model-len 512 --max-num-seqs 3 --served-model-name a b --gpu-memory-utilization 0.9 "
        "--dtype auto --tensor-parallel-size 1 --enable-auto-tool-choice --tool-call-parser hermes "
        "--trust-remote-code --uds /tmp/x.s"
    )
    result, asked = invoke(*line.split())
    assert (asked.config.n_ctx, asked.config.n_slots) == (512, 3)
    assert (asked.options.served_model_names, asked.options.sockets) == (("a", "b"), ("/tmp/x.s",))
    assert "--gpu-memory-utilization has no effect" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("line", "n_ctx", "kv", "cells"),
    [
        ("-c 2048", 2048, "auto", "auto"),
        ("-c 2048 -np 2", 1024, "auto", "auto"),
        ("-c 2048 -np 2 -kvu", 2048, "unified", 2048),
        ("-c 0", None, "auto", "auto"),
        ("-c 999999", None, "auto", "auto"),
        ("-c 2048 --n-ctx 64", 64, "auto", "auto"),
    ],
)
def test_the_context_of_llama_server_is_shared_by_its_slots(invoke, line, n_ctx, kv, cells):
    trained = ModelFacts.read(bundled_model()).n_ctx_train
    config = ok(invoke(*line.split())).config
    assert (config.n_ctx, config.kv, config.kv_cells) == (min(n_ctx or trained, trained), kv, cells)


@pytest.mark.parametrize("line", ["-c 0", "-c 32768"])
def test_the_context_of_llama_server_goes_by_what_overrides_say(invoke, line):
    changed = ("--override-kv", "llama.context_length=int:32768")
    assert ok(invoke(*line.split(), *changed)).config.n_ctx == 32768


def test_too_small_a_context_is_refused(invoke):
    result, _ = invoke("-c", "64", "-np", "4")
    assert result.exit_code == 2
    assert "leaves 16 tokens to each slot; at least 32" in result.output


def test_samplers_are_those_of_the_flag_in_their_order(invoke):
    sampling = ok(invoke("--samplers", "temp;top_k", "--top-k", "5")).options.sampling
    assert (sampling["top_k"], sampling["samplers"]) == (5, ("temperature", "top_k"))
    assert ok(invoke("--sampler-seq", "edskypmxt")).options.sampling == {"samplers": CHAIN}
    result, _ = invoke("--samplers", "top_q")
    assert (result.exit_code, "'top_q' of --samplers has no effect" in result.output) == (0, True)


def test_adapters_of_all_requests_and_of_some(invoke, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    asked = ok(invoke("--lora", f"{tmp_path}/a.gguf,{tmp_path}/b.gguf", "--lora-modules", f"mine={tmp_path}/a.gguf"))
    assert [name for name, _ in asked.config.adapters] == ["a", "b", "mine"]
    assert asked.options.default_adapters == {"a": 1.0, "b": 1.0}
    asked = ok(invoke("--lora-scaled", f"{tmp_path}/a.gguf:0.5", "--lora-init-without-apply"))
    assert asked.options.default_adapters == {"a": 0.0}
    result, _ = invoke("--lora-modules", "nothing")
    assert result.exit_code == 2


def test_a_flag_goes_before_our_variable_that_before_theirs_and_that_before_the_file(invoke, monkeypatch, tmp_path):
    (tmp_path / "config.toml").write_text("[serve]\nport = 1\n", encoding="utf-8")
    assert ok(invoke()).options.port == 1
    monkeypatch.setenv("LLAMA_ARG_PORT", "2")
    assert ok(invoke()).options.port == 2
    monkeypatch.setenv("LLAMABATCH_PORT", "3")
    assert ok(invoke()).options.port == 3
    assert ok(invoke("--port", "4")).options.port == 4


def test_params_of_the_line_and_of_variables_join(invoke, monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_CONTEXT_SHIFT", "1")
    monkeypatch.setenv("LLAMA_ARG_THINK_BUDGET", "5")
    sampling = ok(invoke("-P", "thinking_token_budget=9", "-P", "n=2")).options.sampling
    assert sampling == {"overflow": "shift", "thinking_token_budget": 9, "n": 2}


@pytest.mark.parametrize("name", ["LLAMABATCH_API_KEY", "LLAMA_API_KEY", "VLLM_API_KEY"])
def test_keys_come_from_variables(invoke, monkeypatch, name):
    monkeypatch.setenv(name, "one,two")
    assert ok(invoke("--host", "0.0.0.0")).options.api_keys == ("one", "two")


def test_beyond_this_machine_without_a_key_is_refused(invoke):
    result, asked = invoke("--host", "0.0.0.0")
    assert (result.exit_code, asked.config) == (2, None)
    assert "--api-key" in result.output
    assert "--no-key" in result.output
    ok(invoke("--host", "0.0.0.0", "--no-key"))


def test_one_line_with_url_slots_context_and_key(invoke):
    result, _ = invoke("--api-key", "secret")
    assert "is served at http://127.0.0.1:8080: 4 slots of 1,024 tokens, with a key" in result.stderr
    assert "memory: 2 MiB weights" in result.stderr
    assert "secret" not in result.output


def test_the_memory_of_several_engines_is_that_of_each(invoke, monkeypatch):
    assert "2 MiB weights = 2 MiB; 2 MiB with the processes" in invoke()[0].stderr
    monkeypatch.setattr(Plan.config, "instances", 2)
    assert "2 MiB weights = 2 MiB for each of 2 engines; 2 MiB with the processes" in invoke()[0].stderr


def test_too_little_memory_is_a_1_with_the_sum(invoke, monkeypatch):
    def refused(config):
        raise MemoryPlanError("9 GiB are needed, but 1 GiB are free: 8 GiB weights + …")

    monkeypatch.setattr(serve_runs, "_planned", refused)
    result, asked = invoke()
    assert (result.exit_code, asked.config) == (1, None)
    assert "9 GiB are needed" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--port", "99999"], "port is 99999"),
        (["--chat-template-kwargs", "{"], "chat_template_kwargs is '{'; give a JSON object"),
        (["--chat-template-kwargs", "[1]"], "give a JSON object"),
        (["--top-p", "7"], "top_p is 7"),
        (["--temp", "warm"], "'warm' is not a valid float"),
        (["-m", "a.gguf", "b.gguf"], "two models are given"),
        (["--ssl-key-file", "k.pem"], "TLS needs both"),
        (["--n-predict", "0"], "max_tokens is 0"),
    ],
)
def test_bad_values_are_named(invoke, arguments, told):
    result, asked = invoke(*arguments)
    assert (result.exit_code, asked.config) == (2, None), result.output
    assert told in result.output


def test_every_option_has_a_variable_and_a_group(invoke):
    command = cli.command_of("serve")
    for each in command.params:
        if each.param_type_name == "option" and not each.hidden and each.name != "help":
            assert each.envvar, each.name
    shown = CliRunner().invoke(cli, ["serve", "--help-all"], terminal_width=80).output
    assert all(len(line) <= 80 for line in shown.splitlines())
    titles = [line[:-1] for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[:8] == ["Options", "Several models", "Address", "Callers", "Bounds", "Batches", "Log", "Sampling"]


def test_the_page_of_flags_is_current():
    docs = Path(__file__).parents[3] / "docs"
    spec = importlib.util.spec_from_file_location("make_serve_flags", docs / "make_serve_flags.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert maker.page() == (docs / "serve_flags.md").read_text(encoding="utf-8"), "run: python docs/make_serve_flags.py"


def test_variables_that_nothing_reads_are_named():
    known = {"LLAMABATCH_API_KEY", "LLAMABATCH_PAGE", "LLAMABATCH_MODEL"}
    slips = ("LLAMABATCH_API_KEYS", "LLAMABATCH_NO_PAGE", "LLAMABATCH_MODEL", "LLAMABATCH_MODLE")
    of_services = ("LLAMABATCH_SERVICE_HOST", "LLAMABATCH_SERVICE_PORT_HTTP", "LLAMABATCH_PORT_80_TCP_ADDR")
    environ = dict.fromkeys((*slips, *of_services, "LLAMABATCH_PORT", "PATH"), "1")
    keys, model, page = unknown_variables(environ, known)
    assert "LLAMABATCH_API_KEYS has no effect; did you mean 'LLAMABATCH_API_KEY'" in keys
    assert "did you mean 'LLAMABATCH_MODEL'" in model
    assert page == "the variable LLAMABATCH_NO_PAGE has no effect; LLAMABATCH_PAGE=0 turns it off"
