"""Equal bits: a row's logits have the same bits alone and in a batch, or the option is refused."""

import functools
from dataclasses import replace

import pytest

from benchmarks import equal_bits
from llamabatch import LLM
from llamabatch.errors import ConfigError
from llamabatch.llama import library, model_runner
from llamabatch.tools.synth import write_model
from tests.model import architectures

pytest.importorskip("gguf")
needs_patch = pytest.mark.skipif(not library.has_equal_rows(), reason="llama.cpp is not our build with 0010")
HAS_PROMPTS = "prompts" in library.repack_features()  # AMX: native_patches/0020
OPTIONS = {"n_ctx": 768, "n_threads": 1, "n_threads_batch": 1, "trial": "off"}


@pytest.fixture(scope="module", params=["tiny", "F16", "experts"])
def model(request, tmp_path_factory):
    """The bundled model, a model in F16, and a mixture of experts in F32."""
    folder = tmp_path_factory.mktemp("models")
    if request.param == "F16":
        write_model(replace(equal_bits.SHAPE, n_embd=256, n_ff=256, n_head=4, n_head_kv=2), folder / "f16.gguf", "F16")
        return str(folder / "f16.gguf")
    return "tiny" if request.param == "tiny" else str(architectures.write("qwen2moe", folder / "moe.gguf"))


@pytest.fixture(scope="module")
def asked():
    """Returns prompts and output lengths. Most prompts are short, and some begin alike. One is so long that attention
    splits its keys into several ranges."""
    prompts, lengths = equal_bits.requests(3, 14, 1100)
    return [*(prompt[:90] for prompt in prompts), [400 + i % 300 for i in range(530)]], [*lengths, 3]


@pytest.fixture(scope="module")
def alone(model, asked):
    """A function that returns the rows of each request alone, with or without the promise of equal bits."""

    @functools.cache
    def found(promised):
        with LLM(model, strategy="sequential", cache_prefix=False, batch_invariant=promised, **OPTIONS) as llm:
            return equal_bits.alone(llm, *asked)

    return lambda promised: found(promised and HAS_PROMPTS)


@needs_patch
@pytest.mark.parametrize("promised", [True, False])
def test_rows_have_the_same_bits_alone_and_in_company(model, asked, alone, promised):
    company = {"n_slots": 5, "n_ubatch": 32, "prefill_share": 0.2, "kv": "split", "batch_invariant": promised}
    with LLM(model, strategy="batched", instances=1, **company, **OPTIONS) as llm:
        together = equal_bits.digests(llm, *asked)
        line = llm.plan.reasons["batch_invariant"]
    assert line.startswith("equal bits: yes") or (not promised and "prompts have kernels of their own" in line)
    assert together == alone(promised)


class Toggled:
    """Replaces the choice of threads: steps have one thread and two threads in turn."""

    def __init__(self, most, tries):
        assert (most, tries) == (2, True)
        self.steps = 0

    def threads_of(self, rows):
        self.steps += 1
        return 1 + self.steps % 2

    def observe(self, rows, seconds):
        pass


@needs_patch
def test_a_change_of_threads_between_steps_changes_no_bits(model, asked, alone, monkeypatch):
    expected = alone(False)
    monkeypatch.setattr(model_runner, "ThreadChoice", Toggled)
    options = {**OPTIONS, "n_threads": 2, "n_threads_batch": 2}
    with LLM(model, strategy="batched", instances=1, n_slots=5, n_ubatch=32, **options) as llm:
        assert equal_bits.digests(llm, *asked) == expected


@pytest.mark.skipif(not {"wide", "wide8"} & library.repack_features(), reason="no AVX2, or a build without 0012")
@pytest.mark.parametrize("kind", ["Q5_K", "Q6_K", "Q8_0", "Q4_0"])
def test_columns_in_strips_give_a_row_the_same_bits_alone_and_in_tiles(kind, asked, tmp_path):
    """On a CPU with AMX, a product of nine rows or more uses AMX, and one of fewer rows does not."""
    write_model(replace(equal_bits.SHAPE, n_vocab=2048), tmp_path / "f16.gguf", "F16")
    path = str(equal_bits.quantised(tmp_path / "f16.gguf", tmp_path / "model.gguf", kind))
    prompts, lengths = [prompt[:90] for prompt in asked[0][:12]], [min(4, length) for length in asked[1][:12]]
    with LLM(path, strategy="sequential", cache_prefix=False, batch_invariant=True, **OPTIONS) as llm:
        found = equal_bits.alone(llm, prompts, lengths)
    with LLM(path, strategy="batched", n_slots=12, instances=1, batch_invariant=True, **OPTIONS) as llm:
        assert equal_bits.digests(llm, prompts, lengths) == found


@needs_patch
def test_the_number_of_threads_changes_no_bits(asked):
    prompt, length = asked[0][-1:], asked[1][-1:]
    found = []
    for n_threads in (1, 2):
        options = {**OPTIONS, "n_threads": n_threads, "n_threads_batch": n_threads}
        with LLM("tiny", strategy="sequential", n_slots=1, batch_invariant=True, **options) as llm:
            found.append(equal_bits.digests(llm, prompt, length))
    assert found[0] == found[1]


@needs_patch
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"flash_attn": "off", "type_k": "f32"}, "flash_attn is 'off'"),
        ({"type_k": "q4_0"}, "type_k is 'q4_0'; give one of f32, f16, bf16, q8_0"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_said_in_the_plan(options, words):
    with pytest.raises(ConfigError, match=f"batch_invariant is True, but {words}"):
        LLM("tiny", batch_invariant=True, n_slots=2, **options, **OPTIONS)
    with LLM("tiny", n_slots=2, **options, **OPTIONS) as llm:
        assert llm.plan.reasons["batch_invariant"].startswith("equal bits: no, because ")


def test_a_window_is_refused(tmp_path):
    path = architectures.write("gemma2", tmp_path / "gemma2.gguf")
    with pytest.raises(ConfigError, match="batch_invariant is True, but "):
        LLM(str(path), batch_invariant=True, n_slots=2, **OPTIONS)
