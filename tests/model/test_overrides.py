"""Options that change how a model is loaded: positions, metadata, and the devices of tensors."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llamabatch import LLM, ConfigError, InputError, ModelFileError, SamplingParams
from llamabatch.jobs.settings import Settings, identity
from llamabatch.llama import devices, library, log
from tests.model.architectures import write

llama_cpp = pytest.importorskip("llama_cpp")

ONE_THREAD = {"n_threads": 1, "n_threads_batch": 1}
OPTIONS = {"n_slots": 2, "trial": "off", **ONE_THREAD}
PROMPTS = [[(7 * n * n + k) % 2000 + 3 for n in range(600)] for k in range(3)]
PREFIX = "Once upon a time there was a small cat. " * 6
GREEDY = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)


@pytest.fixture
def lines():
    """A list that gets the lines of llama.cpp's log."""
    found = []
    handler, level = logging.Handler(), log.llama_logger.level
    handler.emit = lambda record: found.append(record.getMessage())
    log.llama_logger.addHandler(handler)
    log.llama_logger.setLevel(logging.DEBUG)
    yield found
    log.llama_logger.removeHandler(handler)
    log.llama_logger.setLevel(level)


def likeliest(path, **options):
    """Returns the 20 likeliest next tokens of each prompt, with their log-probabilities."""
    with LLM(path, **OPTIONS | options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [{token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()} for output in outputs]


def theirs(path, **options):
    """Returns the log-probabilities of all tokens after each prompt, by llama_cpp.Llama."""
    llama = llama_cpp.Llama(
        str(path), n_ctx=1024, n_batch=1024, verbose=False, flash_attn=True, **ONE_THREAD, **options
    )
    found = []
    for prompt in PROMPTS:
        llama.reset()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llama.ctx), True)
        llama.eval(prompt)
        logits = np.array(llama_cpp.llama_get_logits_ith(llama.ctx, -1)[: llama.n_vocab()])
        found.append(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
    llama.close()
    return found


def furthest(ours, others):
    """Returns the largest difference of log-probabilities over our likeliest tokens."""
    return max(abs(p - other[token]) for mine, other in zip(ours, others, strict=True) for token, p in mine.items())


YARN, LINEAR, NONE = 2, 1, 0


@pytest.mark.parametrize(
    ("ours", "peers"),
    [
        (
            {"rope_scaling": "yarn", "rope_freq_scale": 0.25, "yarn_beta_fast": 8, "yarn_beta_slow": 4},
            {"rope_scaling_type": YARN, "rope_freq_scale": 0.25, "yarn_beta_fast": 8.0, "yarn_beta_slow": 4.0},
        ),
        (
            {"rope_scaling": "yarn", "rope_freq_scale": 0.5, "yarn_orig_ctx": 512, "yarn_ext_factor": 0.5},
            {"rope_scaling_type": YARN, "rope_freq_scale": 0.5, "yarn_orig_ctx": 512, "yarn_ext_factor": 0.5},
        ),
        ({"rope_scaling": "linear", "rope_freq_scale": 0.25}, {"rope_scaling_type": LINEAR, "rope_freq_scale": 0.25}),
        ({"rope_freq_base": 1e6}, {"rope_freq_base": 1e6}),
        (
            {"rope_scaling": "none", "rope_freq_base": 1e6, "yarn_attn_factor": 0.5},
            {"rope_scaling_type": NONE, "rope_freq_base": 1e6, "yarn_attn_factor": 0.5},
        ),
    ],
)
def test_positions_are_those_of_llama_cpp(ours, peers, tmp_path):
    """The prompts are longer than the model's training context, so RoPE scaling matters."""
    path = write("llama", tmp_path / "m.gguf", context_length=256)
    with pytest.raises(ConfigError, match="takes 32 to 256"):
        LLM(path, n_ctx=1024, **OPTIONS)
    found = likeliest(path, n_ctx=1024, **ours)
    assert furthest(found, theirs(path, **peers)) < 0.02
    assert furthest(found, theirs(path)) > 0.1  # without these options


def test_a_child_computes_with_the_same_positions(tmp_path):
    path = write("llama", tmp_path / "m.gguf", context_length=256)
    scaled = {"n_ctx": 1024, "rope_scaling": "yarn", "rope_freq_scale": 0.25}
    assert likeliest(path, isolate=True, **scaled) == likeliest(path, **scaled)


def test_embeddings_have_the_same_positions(tmp_path):
    path = write("llama", tmp_path / "m.gguf", context_length=256)

    def vector(**options):
        with LLM(path, **OPTIONS, **options) as llm:
            return llm.embed(PROMPTS[:1], normalize=False)[0]

    base = vector(n_ctx=1024, rope_freq_base=1e6)
    written = write("llama", tmp_path / "base.gguf", context_length=1024, rope__freq_base=1e6)
    with LLM(written, n_ctx=1024, **OPTIONS) as llm:
        assert np.allclose(base, llm.embed(PROMPTS[:1], normalize=False)[0], atol=1e-5)
    assert not np.allclose(base, vector(n_ctx=1024, rope_freq_base=1e4), atol=1e-3)


def test_a_scaled_context_refuses_to_shift(tmp_path):
    path = write("llama", tmp_path / "m.gguf")
    params = SamplingParams(max_tokens=4, overflow="shift")
    with LLM(path, n_ctx=256, rope_scaling="yarn", rope_freq_scale=0.5, **OPTIONS) as llm:
        assert "shift" in llm.generate(["Once"], params, errors="return")[0].error
    with LLM(path, n_ctx=256, **OPTIONS) as llm:
        assert llm.generate(["Once"], params)[0].error is None


def test_a_saved_prefix_fits_the_same_positions_and_values_only(tmp_path):
    path = write("llama", tmp_path / "m.gguf", context_length=256)
    scaled = {"n_ctx": 512, "rope_scaling": "linear", "rope_freq_scale": 0.5}
    file = tmp_path / "saved.prefix"
    with LLM(path, **scaled, **OPTIONS) as llm:
        llm.save_prefix(PREFIX, file)
        llm.load_prefix(file)
    for other in ({}, scaled | {"rope_scaling": "yarn"}, {"kv_overrides": {"llama.rope.freq_base": 5.0}}):
        with LLM(path, **other, **OPTIONS) as llm, pytest.raises(InputError, match="is for changes"):
            llm.load_prefix(file)


def test_a_job_with_other_values_is_another_job(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')

    def of(**engine):
        settings = Settings((str(tmp_path / "in.jsonl"),), str(tmp_path / "out.jsonl"), seed=1, engine=engine)
        return json.loads(json.dumps(identity(settings, [])))

    plain = of(n_ctx=64)
    changed = of(n_ctx=64, kv_overrides={"tokenizer.ggml.add_bos_token": True}, rope_freq_base=1e6)
    assert changed == {**plain, "kv_overrides": [["tokenizer.ggml.add_bos_token", True]], "rope_freq_base": 1e6}


def test_a_model_without_rotary_embedding_has_no_use_for_its_options(tmp_path):
    path = write("mamba", tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=r"rope_freq_base is 1000000.0, but m.gguf has no rotary embedding"):
        LLM(path, n_ctx=256, rope_freq_base=1e6, **OPTIONS)
    path = write("bert", tmp_path / "e.gguf")
    with pytest.raises(ConfigError, match="its table of positions ends there"):
        LLM(path, n_ctx=4096, rope_freq_scale=0.25, **OPTIONS)


@pytest.mark.parametrize("isolate", [False, True])
def test_another_value_of_the_metadata_changes_the_tokens(isolate):
    def ids(**options):
        with LLM("tiny", isolate=isolate, **OPTIONS | {"trial": "auto"}, **options) as llm:
            return llm.tokenize("Hello"), llm.generate(["Hello"], SamplingParams(max_tokens=1))[0].prompt_token_ids

    plain, asked = ids()
    assert list(asked) == plain
    first, given = ids(kv_overrides={"tokenizer.ggml.add_bos_token": True})
    assert first[1:] == plain
    assert list(given) == first


def test_fewer_experts_are_as_a_file_that_says_so(tmp_path):
    path = write("qwen2moe", tmp_path / "two.gguf")
    one = write("qwen2moe", tmp_path / "one.gguf", expert_used_count=1)
    changed = {"kv_overrides": {"qwen2moe.expert_used_count": 1}}
    found = likeliest(path, n_ctx=1024, **changed)
    assert found == likeliest(one, n_ctx=1024)
    assert found == likeliest(path, n_ctx=1024, isolate=True, **changed)
    assert found != likeliest(path, n_ctx=1024)
    with LLM(path, n_ctx=1024, **OPTIONS, **changed) as llm, LLM(one, n_ctx=1024, **OPTIONS) as peer:
        assert llm.plan.memory == peer.plan.memory
        with LLM(path, n_ctx=1024, **OPTIONS) as both:
            assert llm.plan.memory.compute < both.plan.memory.compute


def test_another_context_length_reaches_the_plan(tmp_path):
    path = write("llama", tmp_path / "m.gguf")
    with LLM(path, kv_overrides={"llama.context_length": 4096}, **OPTIONS) as llm:
        assert llm.plan.config.n_ctx == 4096
    with pytest.raises(ConfigError, match="takes 32 to 128"):
        LLM(path, n_ctx=256, kv_overrides={"llama.context_length": 128}, **OPTIONS)


@pytest.mark.parametrize(
    ("overrides", "reason", "isolate"),
    [
        ({"llama.contxt_length": 1}, "'llama.contxt_length', which .* does not read .*'llama.context_length'", True),
        ({"tokenizer.chat_template": "x"}, "which llama.cpp does not read", False),
        ({"llama.context_length": 1.0}, "has 2048 there, of type uint32", False),
        ({"llama.rope.scaling.factor": 4}, "'llama.rope.scaling.factor'.* is 4, of type int; .* reads float", False),
        ({"tokenizer.ggml.add_eos_token": 1}, "has False there, of type bool", False),
    ],
)
def test_an_override_without_effect_is_refused(overrides, reason, isolate, tmp_path):
    path = write("llama", tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=reason):
        LLM(path, kv_overrides=overrides, isolate=isolate, **OPTIONS)


def test_an_override_that_would_abort_ends_the_trial_only(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))
    path = write("deepseek2", tmp_path / "m.gguf")
    fatal = {"kv_overrides": {"deepseek2.attention.key_length_mla": 1}}
    with pytest.raises(ModelFileError, match=r"m.gguf crashes the process that loads it: .*GGML_ASSERT"):
        LLM(path, **OPTIONS | {"trial": "auto"}, **fatal)
    with LLM(path, **OPTIONS | {"trial": "auto"}) as llm:
        assert llm.generate(["Once"], SamplingParams(max_tokens=2))[0].error is None


def test_a_pattern_that_std_regex_refuses_ends_the_load_only(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))
    path = write("llama", tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match=r"m.gguf cannot be loaded: .*Invalid range"):
        LLM(path, override_tensor={"f{,3}n": "CPU"}, **OPTIONS | {"trial": "auto"})


def moved(lines):
    return {line.split()[1] for line in lines if line.startswith("tensor ") and "buffer type overridden to" in line}


@pytest.mark.parametrize(
    ("options", "layers"),
    [({"cpu_moe": True}, (0, 1)), ({"n_cpu_moe": 1}, (0,)), ({"override_tensor": r"blk\.1\..*_exps=CPU"}, (1,))],
)
def test_experts_are_placed_by_llama_cpp_as_the_plan_says(options, layers, lines, tmp_path):
    path = write("qwen2moe", tmp_path / "m.gguf")
    has_gpu = bool(library.gpu_names())
    plain = likeliest(path, n_ctx=1024)
    assert moved(lines) == set()
    with LLM(path, n_ctx=1024, **OPTIONS, **options) as llm:
        reason = llm.plan.reasons[next(iter(options))]
    where = "MiB of them in main memory" if has_gpu else "all in main memory anyway: llama.cpp has no GPU here"
    assert reason.startswith(f"{3 * len(layers)} tensors, ")
    assert reason.endswith(where)
    assert moved(lines) == {f"blk.{n}.ffn_{part}_exps.weight" for n in layers for part in ("gate", "up", "down")}
    found = likeliest(path, n_ctx=1024, **options)
    if has_gpu:  # on a GPU, other kernels multiply by these tensors
        for mine, other in zip(found, plain, strict=True):
            both = mine.keys() & other.keys()
            assert len(both) > 15
            assert [mine[token] for token in both] == pytest.approx([other[token] for token in both], abs=0.05)
    else:
        assert found == plain  # on the CPU, the computation is the same


@pytest.mark.parametrize("isolate", [False, True])
def test_places_and_patterns_that_are_not_there(isolate, tmp_path):
    path = write("llama", tmp_path / "m.gguf")
    known = re.escape(", ".join(devices.buffer_types(library.load())))
    for options, reason in (
        ({"override_tensor": "ffn=Q9"}, rf"override_tensor names the place 'Q9' \(known: {known}\)"),
        ({"override_tensor": "exps=CPU"}, "the pattern 'exps', which fits none of the 21 tensors"),
        ({"n_cpu_moe": 2}, "n_cpu_moe is 2, but random llama is no mixture of experts"),
        ({"cpu_moe": True}, "cpu_moe is True, but random llama is no mixture"),
    ):
        with pytest.raises(ConfigError, match=reason):
            LLM(path, isolate=isolate, **OPTIONS, **options)


def locked_bytes():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmLck")]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("options", [{"extra_bufts": "off"}, {"extra_bufts": "off", "use_mmap": False}, {}])
def test_locked_memory_is_what_the_plan_says(options):
    before = locked_bytes()
    with LLM("tiny", use_mlock=True, devices="none", **OPTIONS, **options) as llm:
        assert locked_bytes() - before == pytest.approx(llm.plan.memory.locked, abs=2 * 4096 + 65536)
        assert llm.plan.memory.locked > 2 * 2**20
    if llm.plan.config.use_mmap:  # without mmap, llama.cpp frees the buffer without unlocking it
        assert locked_bytes() == before


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_MEMLOCK")
def test_too_low_a_limit_of_locked_memory_is_an_error_with_the_sum():
    """The test runs a process that may not exceed the limit."""
    done = run(
        "import resource; from llamabatch.planning import machine; machine._CAP_IPC_LOCK = 63\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "from llamabatch import LLM; LLM('tiny', use_mlock=True, extra_bufts='off', devices='none')"
    )
    assert "MemoryPlanError: use_mlock is True and 3 MiB of weights are to be locked, but RLIMIT_MEMLOCK" in done.stderr


def test_the_first_model_of_a_process_decides_on_numa():
    done = run(
        "from llamabatch import LLM, ConfigError\n"
        "from llamabatch.llama import library\n"
        "with LLM('tiny', numa='distribute', n_slots=1) as llm, LLM('tiny', n_slots=1), LLM('tiny', numa=True):\n"
        "    library.load().llama_numa_init(1)\n"  # ggml then reports a second call
        "    try: LLM('tiny', numa='isolate')\n"
        "    except ConfigError as error: print(error)\n"
        "    with LLM('tiny', numa='numactl', isolate=True) as child: print(child.generate('Hi')[0].error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "NUMA already initialized" in done.stderr
    assert "numa is 'isolate', but the first model of this process was loaded with 'distribute'" in done.stdout
    assert done.stdout.endswith("None\n")


def test_places_are_those_of_the_devices():
    types = devices.buffer_types(library.load())
    assert types["CPU"].device is None
    assert set(types) >= {device.name for device in library.library_info().devices if device.kind == "cpu"}
