"""Vectors of texts equal those of llama_cpp.Llama, alone, in a batch and beside generation. Wrong calls are refused."""

from __future__ import annotations

import asyncio
import threading

import gguf
import numpy as np
import pytest

from llamabatch import (
    LLM,
    ConfigError,
    Engine,
    EngineConfig,
    InputError,
    LlamaBatchError,
    PromptError,
    PromptWarning,
    Request,
    SamplingParams,
)
from llamabatch.entrypoints.async_llm import AsyncLLM
from llamabatch.llama.library import repack_features
from llamabatch.utils.paths import bundled_model
from tests.model.adapter_files import write_lora
from tests.model.architectures import N_EMBD, write, write_bert
from tests.model.conftest import questions

GREEDY = SamplingParams(temperature=0, max_tokens=24)
TEXTS = ["Hello world", "Once upon a time there was a dog.", "a", *questions()[:20], "The sea was calm. " * 12]


def cosine(a, b):
    return float(np.dot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("bert") / "bert.gguf")


def peer(path, texts, pooling=None):
    """Returns llama_cpp.Llama's vectors, computed text by text."""
    import llama_cpp

    more = {} if pooling is None else {"pooling_type": pooling}
    llama = llama_cpp.Llama(str(path), embedding=True, n_ctx=512, n_threads=1, verbose=False, **more)
    found = [llama.embed(text) for text in texts]
    llama.close()
    return found


@pytest.mark.parametrize("pooling", [gguf.PoolingType.MEAN, gguf.PoolingType.CLS, gguf.PoolingType.LAST], ids=str)
def test_vectors_of_an_encoder_are_those_of_llama_cpp(tmp_path, pooling):
    path = write_bert(tmp_path / "bert.gguf", pooling)
    with LLM(path) as llm:
        vectors = llm.embed(TEXTS)
    assert all(v.shape == (N_EMBD,) and v.dtype == np.float32 for v in vectors)
    for vector, wanted in zip(vectors, peer(path, TEXTS), strict=True):
        assert cosine(vector, wanted) > 0.9999


def test_vectors_of_a_decoder_are_those_of_llama_cpp():
    # with AMX, our kernels multiply prompts in BF16, and those of llama_cpp in 8 bits
    alike = 0.9995 if "prompts" in repack_features() else 0.9999
    with LLM("tiny") as llm:
        for vector, wanted in zip(llm.embed(TEXTS), peer(bundled_model(), TEXTS, pooling=1), strict=True):
            assert cosine(vector, wanted) > alike


@pytest.mark.parametrize(
    "options", [{"instances": 1}, {"instances": 2}, {"isolate": True}, {"kv": "unified"}, {"max_queue": 99}], ids=str
)
def test_company_changes_no_vector_and_texts_share_passes(bert, options):
    with LLM(bert, instances=1) as llm:
        alone = [llm.embed(text)[0] for text in TEXTS]
        assert llm.stats().embed_passes == len(TEXTS)
    with LLM(bert, **options) as llm:
        for vector, wanted in zip(llm.embed(TEXTS), alone, strict=True):
            assert cosine(vector, wanted) > 0.99999
        stats = llm.stats()
    assert stats.embed_texts == len(TEXTS)
    assert stats.embed_passes <= 2 + stats.embed_tokens // 256, "passes are filled with texts of any length"


def test_normalised_or_not(bert):
    with LLM(bert) as llm:
        [unit] = llm.embed("Hello world")
        [plain] = llm.embed("Hello world", normalize=False)
        [ids] = llm.embed(llm.tokenize("Hello world"), normalize=False)
        with pytest.raises(InputError, match="normalize is None; give True or False"):
            llm.embed("Hello world", normalize=None)
    assert abs(float(np.linalg.norm(unit)) - 1) < 1e-5 < abs(float(np.linalg.norm(plain)) - 1)
    assert cosine(plain, unit) > 0.99999
    assert np.array_equal(plain, ids)


def test_one_bad_text_is_one_error(bert):
    with LLM(bert) as llm:
        texts = ["Hello", "", [5, 10**6], "word " * 2000, "Goodbye", 7]
        vectors = llm.embed(texts, return_errors=True)
        assert [isinstance(v, LlamaBatchError) for v in vectors] == [False, True, True, True, False, True]
        assert "outside the vocabulary" in str(vectors[2])
        assert "tokens; an embedding takes 1 to 512" in str(vectors[3])
        assert list(map(str, llm.embed(texts, errors="return"))) == list(map(str, vectors))
        with pytest.warns(PromptWarning, match=r"^4 of 6 texts failed, first: texts\[1\]: the prompt is empty"):
            assert list(map(str, llm.embed(texts, errors="warn"))) == list(map(str, vectors))
        with pytest.raises(PromptError, match=r"^all 2 texts failed, first: "):
            llm.embed(["", None], errors="warn")
        for i in (1, 2, 3, 5):
            with pytest.raises(PromptError, match=r"texts\[1\]: "):
                llm.embed(["Hello", texts[i]])
            with pytest.raises(PromptError):
                llm.embed(texts[i])
        assert cosine(llm.embed("Hello")[0], vectors[0]) > 0.99999
        assert len(llm.embed([])) == 0


def test_a_long_text_makes_the_context_larger_and_a_longer_one_is_refused():
    with LLM("tiny", n_batch=640, n_ctx=1024, n_ubatch=128, instances=1) as llm:
        [short, long] = llm.embed([[5] * 10, list(range(5, 605))])
        assert cosine(short, llm.embed([[5] * 10])[0]) > 0.9999
        assert cosine(long, llm.embed([list(range(5, 605))])[0]) > 0.9999
        with pytest.raises(PromptError, match="641 tokens; an embedding takes 1 to 640"):
            llm.embed([5] * 641)


def test_an_encoder_embeds_only(bert):
    with Engine(EngineConfig(str(bert))) as engine:
        with pytest.raises(ConfigError, match=r"cannot generate text: it is an encoder"):
            engine.add(Request("a", (5, 6)))
        assert engine.step() == []


def test_a_model_that_gives_no_embeddings_says_so(tmp_path):
    path = write("mamba", tmp_path / "model.gguf")
    with LLM(path) as llm, pytest.raises(ConfigError, match="gives no embeddings: it is a model with recurrent state"):
        llm.embed("Hello")


@pytest.mark.parametrize("options", [{"instances": 1}, {"isolate": True}], ids=str)
def test_generation_goes_on_beside_embeddings(options, assert_equal_by_the_rule):
    asked = questions()[:8]
    with LLM("tiny", n_slots=8, **options) as llm:
        wanted, alone = llm.generate(asked, GREEDY), llm.embed(TEXTS)
        found = []
        thread = threading.Thread(target=lambda: found.extend(llm.embed(TEXTS * 5)))
        thread.start()
        outputs = llm.generate(asked, GREEDY)
        thread.join()
    assert_equal_by_the_rule(outputs, wanted)
    for vector, one in zip(found, alone * 5, strict=True):
        assert cosine(vector, one) > 0.9999


def test_texts_wait_their_turn_beside_talkers():
    """A step that also decodes embeds at most 64 tokens, except one step in 30."""
    with Engine(EngineConfig("tiny", strategy="batched", n_slots=4)) as engine:
        engine.add(Request("talker", (5, 6, 7), SamplingParams(max_tokens=200, ignore_eos=True)))
        engine.step()
        for i in range(60):
            engine.add(Request(f"text-{i}", tuple(range(5, 25 + i)), embed=True))
        tokens, done = [], 0
        before = engine.stats().embed_tokens
        while done < 60:
            outputs = engine.step()
            assert "talker" in {output.request_id for output in outputs}, "each step brings the talker's next token"
            done += sum(output.finished is not None for output in outputs)
            tokens.append(engine.stats().embed_tokens - before)
            before += tokens[-1]
    assert sum(n > 64 for n in tokens) <= 1 + len(tokens) // 30


def test_adapters_change_vectors(tmp_path):
    with LLM("tiny", adapters={"a": write_lora(tmp_path / "a.gguf", size=0.6)}) as llm:
        plain, adapted, again = llm.embed(["Hello"] * 3, adapters=[None, "a", None])
        assert cosine(plain, adapted) < 0.99
        assert cosine(plain, again) > 0.99999
        llm.unload_adapter("a")
        assert cosine(plain, llm.embed("Hello")[0]) > 0.99999


def test_aborted_and_closed(bert):
    engine = Engine(EngineConfig(str(bert)))
    engine.add(Request("a", (5, 6), embed=True))
    engine.add(Request("b", (5, 6), embed=True))
    with pytest.raises(ValueError, match="already in flight"):
        engine.add(Request("b", (5, 6), embed=True))
    assert engine.abort("a").finished.finish_reason == "abort"
    [output] = engine.step()
    assert (output.request_id, len(output.finished.embedding)) == ("b", N_EMBD)
    assert not engine.has_work
    engine.close()


def test_async(bert):
    async def both():
        async with AsyncLLM(bert) as llm:
            return await asyncio.gather(llm.embed(TEXTS[:3]), llm.embed(["", "a"], return_errors=True, normalize=True))

    vectors, (error, unit) = asyncio.run(both())
    assert [v.shape for v in vectors] == [(N_EMBD,)] * 3
    assert isinstance(error, LlamaBatchError)
    assert abs(float(np.linalg.norm(unit)) - 1) < 1e-5
