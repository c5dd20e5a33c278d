"""Models of `llamabatch synth` load and give finite logits. Their tensors have the types that llama.cpp's quantiser
would choose."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from click.testing import CliRunner

from llamabatch import LLM, SamplingParams
from llamabatch.cli import cli
from llamabatch.errors import InputError
from llamabatch.llama import library
from llamabatch.tools.synth import QUANTS, SHAPES, find_shape, tensors_of, write_model
from llamabatch.tools.synth.architectures import weights_of
from llamabatch.tools.synth.projectors import PROJECTORS, ProjectorShape
from tests.model.near_ties import N_LOGPROBS, NEAR, gap_of
from tests.model.small_shapes import HYBRIDS, WINDOWS

gguf = pytest.importorskip("gguf")

# n_embd is no multiple of 256, as in the real 0.5B model, so that fall-back types also occur
SMALL_QWEN = replace(SHAPES["qwen2.5-0.5b"], n_layer=3, n_embd=448, n_head=7, n_head_kv=1, n_ff=768, n_vocab=2048)
SMALL_LLAMA = replace(
    SHAPES["llama-3.1-8b"], n_layer=9, n_embd=256, n_head=4, n_head_kv=2, head_dim=64, n_ff=512, n_vocab=4096
)
OTHERS = {**HYBRIDS, **WINDOWS}
GPT_OSS = (WINDOWS["gpt-oss"], "MXFP4_MOE")  # the type of gpt-oss files
SMALL = [(shape, quant) for shape in (SMALL_QWEN, SMALL_LLAMA) for quant in QUANTS if quant != "MXFP4_MOE"] + [GPT_OSS]
PARAMETERS = {  # billions of parameters, as their makers say
    "lfm2-350m": 0.354, "lfm2-1.2b": 1.17, "granite-4.0-h-350m": 0.34, "gpt-oss-20b": 20.9, "gemma-3-270m": 0.268,
    "gemma-3-1b": 1.0,
}  # fmt: skip


def name_of(value):
    return value if isinstance(value, str) else value.arch


def decodes(path, *, extra_bufts: bool) -> None:
    """Checks in a child process that the model decodes, since a broken build would crash."""
    code = (
        "import sys; from pathlib import Path; from llamabatch.llama import probe;"
        f"sys.exit(probe.run(Path(sys.argv[1]), use_extra_bufts={extra_bufts}))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("shape", "quant"), SMALL, ids=name_of)
def test_a_model_loads_and_decodes(shape, quant, tmp_path):
    path = tmp_path / "model.gguf"
    assert write_model(shape, path, quant) == path.stat().st_size
    for extra_bufts in (False, True):
        decodes(path, extra_bufts=extra_bufts)


def test_the_same_seed_gives_the_same_file(tmp_path):
    def digest(seed):
        write_model(SMALL_QWEN, tmp_path / "model.gguf", "Q4_K_M", seed)
        return hashlib.sha256((tmp_path / "model.gguf").read_bytes()).hexdigest()

    assert digest(1) == digest(1) != digest(2)


@pytest.mark.parametrize("shape", OTHERS.values(), ids=OTHERS)
def test_hybrids_and_windows_write_the_same_text_alone_and_in_company(shape, tmp_path):
    """Logits of a windowed model may differ by rounding, which changes the text only at near ties."""
    write_model(shape, tmp_path / "model.gguf")
    prompts = [[(31 * i * n + 7 * n) % 1700 + 300 for i in range(10 + 17 * n)] for n in (1, 2, 3, 4)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=N_LOGPROBS)
    bound = NEAR if shape in WINDOWS.values() else 0
    sizes = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "profile": False, "trial": "off"}
    with LLM(str(tmp_path / "model.gguf"), n_slots=1, strategy="sequential", cache_prefix=False, **sizes) as llm:
        alone = [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
    with LLM(str(tmp_path / "model.gguf"), n_slots=4, strategy="batched", **sizes) as llm:
        together = [output.outputs[0] for output in llm.generate(prompts, params)]
        assert max(map(gap_of, together, alone)) <= bound
        [answer] = llm.chat([[{"role": "user", "content": "ten men"}]], params)
        assert len(answer.outputs[0].token_ids) == 8
    assert len({token for output in alone for token in output.token_ids}) > 8  # a repeated token would prove little


@pytest.mark.parametrize(("name", "billions"), PARAMETERS.items())
def test_real_shapes_have_the_parameters_of_the_real_models(name, billions):
    parameters = sum(part.matrices * part.rows * part.columns for part in weights_of(SHAPES[name]))
    assert parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("shape", "quant"),
    [*(case for case in SMALL if case[1] != "F16"), *((shape, "Q4_K_M") for shape in OTHERS.values())],
    ids=name_of,
)
def test_types_are_those_of_the_quantiser(shape, quant, tmp_path):
    llama = library.load()
    write_model(shape, tmp_path / "f16.gguf", "F16")
    write_model(shape, tmp_path / "ours.gguf", quant)
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{quant}"), 1
    assert llama.llama_model_quantize(bytes(tmp_path / "f16.gguf"), bytes(tmp_path / "theirs.gguf"), params) == 0

    def types(name):
        return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / name).tensors}

    assert types("ours.gguf") == types("theirs.gguf")


@pytest.mark.parametrize(("shape", "quant"), [case for case in SMALL if case[0] is not SMALL_QWEN], ids=name_of)
def test_weights_are_centred_and_of_the_wanted_size(shape, quant, tmp_path):
    write_model(shape, tmp_path / "model.gguf", quant)
    matrices = {tensor.name: tensor for tensor in tensors_of(shape, quant) if tensor.rows > 4}
    for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors:
        if tensor.name not in matrices:
            continue
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        wanted = matrices[tensor.name].std
        assert wanted / 1.5 < weights.std() < wanted * 1.5, tensor.name
        assert abs(weights.mean()) < 0.05 * wanted, tensor.name


def test_the_vocabulary_has_the_real_size_and_one_text_a_token(tmp_path):
    write_model(replace(SMALL_QWEN, n_vocab=151_936), tmp_path / "model.gguf")
    llama = library.load()
    params = llama.llama_model_default_params()
    params.vocab_only = True
    model = llama.llama_model_load_from_file(bytes(tmp_path / "model.gguf"), params)
    vocab = llama.llama_model_get_vocab(model)
    assert llama.llama_vocab_n_tokens(vocab) == 151_936
    eos = llama.llama_vocab_eos(vocab)
    assert eos == 151_645
    assert llama.llama_vocab_get_text(vocab, eos) == b"<|im_end|>"
    assert llama.llama_vocab_is_eog(vocab, eos)
    texts = {llama.llama_vocab_get_text(vocab, token) for token in range(151_936)}
    assert len(texts) == 151_936
    llama.llama_model_free(model)


def test_llama_3_stretches_the_slow_frequencies_only(tmp_path):
    write_model(replace(SMALL_LLAMA, head_dim=128, n_head=2), tmp_path / "model.gguf")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    factors = tensors["rope_freqs.weight"]
    assert (factors[0], factors[-1]) == (1.0, 8.0)
    assert all(a <= b for a, b in pairwise(factors))


def test_progress_ends_at_the_total(tmp_path):
    seen = []
    write_model(SMALL_QWEN, tmp_path / "model.gguf", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert seen == sorted(seen)


def test_bad_arguments_are_refused_and_nothing_is_left(tmp_path):
    for call, words in (
        (lambda: find_shape("gpt-5"), "gpt-5.*qwen2.5-0.5b"),
        (lambda: write_model(SMALL_QWEN, tmp_path / "x", "Q3_K"), "Q3_K.*Q4_K_M"),
        (lambda: write_model(SMALL_QWEN, tmp_path / "x", "mxfp4_moe"), "mxfp4_moe is for models with experts.*Q8_0"),
        (lambda: write_model(SMALL_QWEN, tmp_path / "x", seed=-1), "seed is -1"),
        (lambda: write_model(SMALL_QWEN, tmp_path), "is a folder"),
        (lambda: write_model(SMALL_QWEN, tmp_path / "none" / "x"), "does not exist"),
        (lambda: write_model(replace(SMALL_QWEN, n_ff=10**12), tmp_path / "x"), "GB free"),
    ):
        with pytest.raises(InputError, match=words):
            call()

    def interrupted(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_model(SMALL_QWEN, tmp_path / "x", progress=interrupted)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "known"),
    [(["gpt-5", "x.gguf"], "qwen2.5-0.5b"), (["qwen2.5-0.5b", "x.gguf", "--quant", "Q3"], "q4_k_m")],
)
def test_the_command_lists_what_it_knows(arguments, known):
    result = CliRunner().invoke(cli, ["synth", *arguments])
    assert result.exit_code == 2
    assert known in result.output.lower()


def test_an_encoder_beside_the_model(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "qwen2.5-0.5b", SMALL_QWEN)
    monkeypatch.setitem(PROJECTORS, "clip-b16", ProjectorShape("mlp"))
    path = tmp_path / "a model.gguf"
    done = CliRunner().invoke(cli, ["synth", "qwen2.5-0.5b", str(path), "--encoder", "clip-b16"])
    assert done.exit_code == 0, done.output
    assert "mmproj-a model.gguf" in done.output
    pixels = np.zeros((40, 60, 3), np.uint8)
    message = {"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "image", "image": pixels}]}
    with LLM(path, mmproj="auto", n_ctx=256, profile=False) as llm:
        [output] = llm.chat([message], SamplingParams(max_tokens=4, ignore_eos=True))
    assert sum(token_id < 0 for token_id in output.prompt_token_ids) == 64  # cells of the picture
    assert len(output.outputs[0].token_ids) == 4


def test_the_half_billion_shape_fits_in_little_memory(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from llamabatch.tools.processes import PeakMemory\n"
        "from llamabatch.tools.synth import SHAPES, write_model\n"
        "with PeakMemory([os.getpid()]) as memory:\n"
        "    write_model(SHAPES['qwen2.5-0.5b'], Path(sys.argv[1]))\n"
        "    print(memory.read())"
    )
    path = tmp_path / "model.gguf"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 600e6
    assert 500e6 < path.stat().st_size < 550e6
    decodes(path, extra_bufts=True)
    path.unlink()
