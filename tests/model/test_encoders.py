"""Embeddings, ranks and classes of encoders equal those of transformers. Unsuitable files and calls are refused."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from llamabatch import (
    LLM,
    AsyncLLM,
    Classification,
    ConfigError,
    Engine,
    EngineConfig,
    InputError,
    LlamaBatchError,
    ModelFileError,
    PromptError,
    PromptWarning,
    Request,
    RerankResult,
)
from llamabatch.cli import cli
from llamabatch.entrypoints.classification import pair_tokenizer
from llamabatch.llama import library
from tests.model.architectures import RERANK_TEMPLATE, write_qwen3_reranker
from tests.model.encoder_files import ENCODERS, N_CTX, N_EMBD, QUERY, TEXTS, write_encoder
from tests.waiting import until

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "encoders" / "vectors.json").read_text(encoding="utf-8"))
# llama.cpp reads GELU, in its tanh form, from a table of float16 values. transformers' GELU differs by 4e-4 here.
NEAR = 1e-3
DOCUMENTS = list(TEXTS)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoders")
    return {name: write_encoder(name, folder / f"{name}.gguf") for name in ENCODERS}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return write_qwen3_reranker(tmp_path_factory.mktemp("qwen3") / "reranker.gguf")


def raw(llm, name, texts):
    """Returns our numbers in the order of the texts, for comparison with those of transformers."""
    if not ENCODERS[name].n_labels:
        return llm.embed(texts, normalize=False)
    if ENCODERS[name].n_labels > 1:
        return [list(found.probs.values()) for found in llm.classify(texts, use_activation=False)]
    found = llm.rerank(QUERY, texts, use_activation=False)
    return [[each.relevance_score] for each in sorted(found, key=lambda each: each.index)]


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "bert-rank", "xlm-roberta-rank"])
def test_tokens_are_those_of_transformers(files, name):
    with LLM(files[name]) as llm:
        to_ids = llm.tokenize
        if ENCODERS[name].n_labels == 1:
            to_ids = pair_tokenizer(llm._client.model, QUERY)
        for text, wanted in zip(TEXTS, VECTORS[name]["results"], strict=True):
            assert list(to_ids(text)) == wanted["ids"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"instances": 1}) for name in ENCODERS),
        *((name, {"instances": 2, "n_ubatch": 32}) for name in ("bert", "xlm-roberta-rank", "bert-classes")),
        *((name, {"isolate": True}) for name in ("bert-cls", "xlm-roberta-rank", "bert-classes")),
    ],
    ids=str,
)
def test_vectors_scores_and_classes_are_those_of_transformers(files, name, options):
    wanted = [each["values"] for each in VECTORS[name]["results"]]
    with LLM(files[name], **options) as llm:
        together = raw(llm, name, DOCUMENTS)
        alone = [raw(llm, name, [text])[0] for text in DOCUMENTS]
        crowd = raw(llm, name, DOCUMENTS * 20)
        stats = llm.stats()
    assert stats.embed_texts == 22 * len(DOCUMENTS)
    assert "n_ubatch" in options or stats.embed_passes < stats.embed_texts * 0.7, "texts share passes"
    for found in (together, alone, *(crowd[i : i + len(TEXTS)] for i in range(0, len(crowd), len(TEXTS)))):
        for one, values in zip(found, wanted, strict=True):
            assert len(one) == len(values)
            assert np.abs(np.subtract(one, values)).max() < NEAR


@pytest.mark.parametrize("name", ["bert-rank", "xlm-roberta-rank"])
def test_documents_come_by_relevance(files, name):
    scores = [each["values"][0] for each in VECTORS[name]["results"]]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    with LLM(files[name]) as llm:
        found = llm.rerank(QUERY, DOCUMENTS)
        assert all(isinstance(each, RerankResult) and each.error is None for each in found)
        assert [each.index for each in found] == order
        assert [each.document for each in found] == [DOCUMENTS[i] for i in order]
        for each in found:
            assert abs(each.relevance_score - 1 / (1 + math.exp(-scores[each.index]))) < NEAR
        assert [each.index for each in llm.rerank(QUERY, DOCUMENTS, 2)] == order[:2]
        assert len(llm.rerank(QUERY, iter(DOCUMENTS), top_n=99)) == len(DOCUMENTS)
        [empty] = llm.rerank(QUERY, [""])
        assert 0 < empty.relevance_score < 1


def test_classes_have_names_and_probabilities(files):
    with LLM(files["bert-classes"]) as llm:
        found = llm.classify(DOCUMENTS)
        [one] = llm.classify(llm.tokenize(DOCUMENTS[0]))
    assert (one.label, one.probability) == (found[0].label, pytest.approx(found[0].probability, abs=1e-5))
    for each, wanted in zip(found, VECTORS["bert-classes"]["results"], strict=True):
        assert isinstance(each, Classification)
        values = np.exp(wanted["values"]) / np.exp(wanted["values"]).sum()
        assert list(each.probs) == ["joy", "anger", "fear", "none"]
        assert np.abs(np.subtract(list(each.probs.values()), values)).max() < NEAR
        assert each.label == list(each.probs)[int(np.argmax(values))]
        assert each.probability == max(each.probs.values())
        assert abs(sum(each.probs.values()) - 1) < 1e-6
    with LLM(files["bert-rank"]) as llm:  # this model has one output, without a name
        [one] = llm.classify("blue")
        assert list(one.probs) == [one.label] == ["LABEL_0"]
        assert 0 < one.probability < 1


def test_a_bad_document_is_one_error(files):
    documents = ["blue", None, "word " * 200, "a", 7]
    with LLM(files["bert-rank"]) as llm:
        found = llm.rerank(QUERY, documents, errors="return")
        assert [each.index for each in found[2:]] == [1, 2, 4], "those with errors come last"
        assert all(math.isnan(each.relevance_score) for each in found[2:])
        assert found[2].error == "a document is a text, not None"
        assert f"a text to rank or classify takes 1 to {N_CTX}" in found[3].error
        with pytest.warns(PromptWarning, match=r"^3 of 5 documents failed, first: documents\[1\]: a document is"):
            assert str(llm.rerank(QUERY, documents, errors="warn")) == str(found)
        with pytest.raises(PromptError, match=r"^documents\[1\]: a document is a text, not None"):
            llm.rerank(QUERY, documents)
        good = llm.rerank(QUERY, ["blue", "a"])
        assert [each.relevance_score for each in found[:2]] == pytest.approx(
            [e.relevance_score for e in good], abs=1e-5
        )


def test_arguments_that_rerank_and_classify_do_not_take(files):
    with LLM(files["bert-rank"]) as llm:
        for query in ("", None, 5, ["a"]):
            with pytest.raises(PromptError, match="query is "):
                llm.rerank(query, ["a"])
        for top_n in (0, -1, 1.5, "1", True):
            with pytest.raises(InputError, match=r"top_n is .*from 1 to"):
                llm.rerank(QUERY, ["a"], top_n)
        for documents in ("one text", [[1, 2]], {"a": 1}, 5):
            with pytest.raises(PromptError, match="document"):
                llm.rerank(QUERY, documents)
        with pytest.raises(InputError, match="use_activation is 'no'"):
            llm.rerank(QUERY, ["a"], use_activation="no")
        with pytest.raises(InputError, match="use_activation is 1"):
            llm.classify("a", use_activation=1)
        assert llm.rerank(QUERY, []) == llm.classify([]) == []
        [error] = llm.classify([[1, 10**6]], errors="return")
        assert isinstance(error, LlamaBatchError)
        with pytest.raises(InputError, match="errors is 'never'"):
            llm.rerank(QUERY, ["a"], errors="never")


def test_a_model_does_what_its_pooling_is_for(files):
    with LLM(files["bert-rank"]) as llm:
        with pytest.raises(ConfigError, match=r"gives no embeddings: it is a model that ranks texts.*pooling='mean'"):
            llm.embed("a")
        with pytest.raises(ConfigError, match=r"cannot generate text: it is a model \(bert\) that ranks and classif"):
            llm.generate("a")
        with pytest.raises(ConfigError, match="cannot score texts"):
            llm.score("a", ["b"])
    with LLM(files["bert"]) as llm:
        for ask in (lambda: llm.rerank(QUERY, ["a"]), lambda: llm.classify("a")):
            with pytest.raises(
                ConfigError, match=r"ranks and classifies no texts: it is a model whose pooling is 'mean'"
            ):
                ask()
    with LLM(files["bert-classes"]) as llm, pytest.raises(ConfigError, match=r"has 4 outputs \('joy', .*classify\(\)"):
        llm.rerank(QUERY, ["a"])
    with (
        Engine(EngineConfig(str(files["bert"]))) as engine,
        pytest.raises(ConfigError, match="ranks and classifies no"),
    ):
        engine.add(Request("a", (5, 6), classify=True))
    with Engine(EngineConfig(str(files["bert-rank"]))) as engine:
        with pytest.raises(ConfigError, match="gives no embeddings"):
            engine.add(Request("a", (5, 6), embed=True))
        engine.add(Request("a", (5, 6), classify=True))
        [output] = engine.step()
        assert len(output.finished.embedding) == 1


def test_a_plan_names_the_pooling(files):
    for name, pooling, why in (
        ("bert-cls", "cls", "the file names it"),
        ("xlm-roberta-rank", "rank", "an encoder with a classification head"),
    ):
        with LLM(files[name]) as llm:
            assert llm.plan.config.pooling == pooling
            assert f"pooling = {pooling}: {why}" in llm.plan.describe()
            assert llm.plan.memory.kv_cache == 0
        shown = CliRunner().invoke(cli, ["plan", "-m", str(files[name])], catch_exceptions=False)
        assert f"Pooling of texts: {pooling}: {why}." in " ".join(shown.output.split())
        shown = CliRunner().invoke(cli, ["plan", "-m", str(files[name]), "--json"], catch_exceptions=False)
        assert json.loads(shown.output)["engine"]["pooling"] == pooling
    with LLM("tiny") as llm:
        assert llm.plan.config.pooling == "mean"
        assert "pooling" not in llm.plan.reasons


def test_a_bert_whose_converter_lost_its_pooler_says_so(tmp_path, caplog):
    path = write_encoder("bert-rank", tmp_path / "a.gguf", without=("cls.weight", "cls.bias"))
    with LLM(path) as llm:
        assert len(llm.rerank(QUERY, DOCUMENTS)) == len(DOCUMENTS)
        assert "cls.weight" in llm.plan.reasons["pooling"]
    assert [r.message for r in caplog.records if "the scores are not those of the original model" in r.message]
    caplog.clear()
    with LLM(path, pooling="mean") as llm:
        assert "cls.weight" not in llm.plan.reasons.get("pooling", "")
    assert not caplog.records


PEAK = """
import json, sys
from pathlib import Path
from llamabatch import LLM
from llamabatch.planning.memory import PROCESS_BYTES
with LLM(sys.argv[1], profile=False, n_ubatch=256) as llm:
    llm.classify([list(range(10, 90))] * 16) if llm.plan.config.pooling == "rank" else llm.embed(["a " * 80] * 16)
    lines = Path("/proc/self/status").read_text().splitlines()
    [peak] = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    print(json.dumps([llm.plan.peak_bytes + PROCESS_BYTES, peak, llm.plan.memory.reserved]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("name", ["bert", "xlm-roberta-classes"])
def test_the_predicted_peak_is_the_measured_one(tmp_path, name):
    """An encoder's graph has no logits. llama.cpp still reserves memory for them, but only a stock build touches it."""
    path = write_encoder(name, tmp_path / "large.gguf", n_more=60_000)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PEAK, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    predicted, measured, reserved = json.loads(done.stdout)
    assert predicted == pytest.approx(measured, rel=0.1)
    assert (reserved > 0) == library.has_lazy_cells()


def test_pooling_is_an_option_of_the_engine(files):
    with LLM(files["bert"]) as llm:
        mean = llm.embed(DOCUMENTS, pooling="mean", normalize=False)
        with pytest.raises(ConfigError, match=r"pooling is 'cls', but this engine pools by 'mean'.*pooling='cls'"):
            llm.embed("a", pooling="cls")
        with pytest.raises(InputError, match="pooling is 'middle'"):
            llm.embed("a", pooling="middle")
        lengths = [len(llm.tokenize(text)) for text in DOCUMENTS]
    found = {}
    for pooling in ("cls", "last", "none", "mean"):
        with LLM(files["bert-rank"], pooling=pooling) as llm:  # the same weights; the head is ignored
            found[pooling] = llm.embed(DOCUMENTS, normalize=False)
    assert [each.shape for each in found["none"]] == [(n, N_EMBD) for n in lengths]
    for at, rows in enumerate(found["none"]):
        assert np.abs(rows[0] - found["cls"][at]).max() < 1e-4
        assert np.abs(rows[-1] - found["last"][at]).max() < 1e-4
        assert np.abs(rows.mean(0) - mean[at]).max() < 1e-4
        assert np.abs(found["mean"][at] - mean[at]).max() < 1e-4
    with LLM(files["bert"], pooling="none") as llm:
        [units] = llm.embed("the cat")
        assert np.allclose(np.linalg.norm(units, axis=1), 1)
    for model in (files["bert"], "tiny"):
        with pytest.raises(ConfigError, match=r"pooling is 'rank', but .* has no classification head .*'none', 'mean'"):
            LLM(model, pooling="rank")
    with pytest.raises(ConfigError, match=r"pooling is 'max' .known: auto, none, mean, cls, last, rank"):
        LLM("tiny", pooling="max")


def test_a_decoder_pools_as_asked_and_generates_beside_it():
    with LLM("tiny", pooling="last") as llm, LLM("tiny", pooling="none") as rows:
        [last], [each] = (one.embed("Hello world", normalize=False) for one in (llm, rows))
        assert np.abs(each[-1] - last).max() < 1e-3
        assert llm.generate("Hello", {"max_tokens": 2, "ignore_eos": True})[0].finish_reason == "length"


def test_dimensions_cut_and_then_normalise(files):
    with LLM(files["bert"]) as llm:
        [whole], [cut] = llm.embed("the cat", normalize=False), llm.embed("the cat", dimensions=8)
        assert cut.shape == (8,)
        assert np.allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-5)
        assert np.allclose(llm.embed("the cat", dimensions=8, normalize=False)[0], whole[:8], atol=1e-5)
        assert np.allclose(llm.embed("the cat", dimensions=N_EMBD)[0], llm.embed("the cat")[0], atol=1e-5)
        for wrong in (0, -1, N_EMBD + 1, 8.0, "8", True):
            with pytest.raises(InputError, match=rf"dimensions is .*1 to {N_EMBD}"):
                llm.embed("the cat", dimensions=wrong)
    with LLM(files["bert"], isolate=True) as llm, pytest.raises(InputError, match=f"dimensions is 999.*1 to {N_EMBD}"):
        llm.embed("the cat", dimensions=999)


def test_a_text_longer_than_a_pass_has_one_of_its_own(files):
    """llama.cpp would end the process if an encoder got more tokens than n_ubatch."""
    with LLM(files["xlm-roberta-rank"], n_ubatch=8, n_batch=80) as llm:
        found = llm.rerank(QUERY, DOCUMENTS, use_activation=False)
        assert (
            abs(found[0].relevance_score - max(v["values"][0] for v in VECTORS["xlm-roberta-rank"]["results"])) < NEAR
        )
        with pytest.raises(PromptError, match="takes 1 to 80"):
            llm.rerank(QUERY, ["the cat " * 80])
    with pytest.raises(ConfigError, match=f"n_ctx is {N_CTX + 1}"):
        LLM(files["xlm-roberta-rank"], n_ctx=N_CTX + 1)


def test_heads_that_llama_cpp_could_not_read_are_refused(tmp_path):
    """llama.cpp copies as many floats as the file has labels from each row of outputs, even if the row is shorter."""
    headless = ("cls.output.weight", "cls.output.bias")
    path = write_encoder("bert-classes", tmp_path / "a.gguf", without=headless, pooling_type=gguf.PoolingType.RANK)
    with pytest.raises(ConfigError, match="rank"):
        LLM(path)
    path = write_encoder("bert-classes", tmp_path / "b.gguf", classifier__output_labels=["a", "b"])
    with pytest.raises((ModelFileError, ConfigError)):
        LLM(path)
    path = write_encoder("bert-classes", tmp_path / "c.gguf", classifier__output_labels=["a", "b", "a", ""])
    with LLM(path) as llm:
        assert list(llm.classify("blue")[0].probs) == ["a", "b", "LABEL_2", "LABEL_3"]


@pytest.mark.parametrize(
    ("trial", "reason"), [("off", "adds a BOS token to each text but has none"), ("on", "crashes the process")]
)
def test_a_vocabulary_without_its_own_marks_is_refused(tmp_path, trial, reason):
    """llama.cpp asserts that the vocabulary has the tokens that it adds at the beginning and end of each text."""
    path = write_encoder("xlm-roberta-rank", tmp_path / "a.gguf", marks=False)
    with pytest.raises(ModelFileError, match=reason):
        LLM(path, trial=trial)


def test_adapters_change_scores(qwen, tmp_path):
    """A LoRA changes the scores of a ranking model only in the call that names it."""
    writer = gguf.GGUFWriter(tmp_path / "lora.gguf", "qwen3")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    rng = np.random.default_rng(0)
    for side, shape in (("a", (4, 128)), ("b", (64, 4))):
        writer.add_tensor(f"blk.1.ffn_down.weight.lora_{side}", rng.normal(0, 0.4, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with LLM(qwen, adapters={"a": tmp_path / "lora.gguf"}) as llm:
        [plain], [adapted], [again] = (llm.rerank(QUERY, ["blue"], adapters=each) for each in (None, "a", None))
        assert abs(plain.relevance_score - adapted.relevance_score) > 1e-3
        assert plain.relevance_score == pytest.approx(again.relevance_score, abs=1e-5)
        texts = llm.classify(["blue"] * 2, adapters=[None, "a"])
        assert abs(texts[0].probability - texts[1].probability) > 1e-4


def test_a_decoder_ranks_by_its_template(qwen):
    """The score is the probability of "yes" after the last token, as for Qwen3-Reranker."""
    with LLM(qwen, instances=1) as llm:
        found = llm.rerank(QUERY, DOCUMENTS)
        assert llm.stats().embed_passes <= 3
        prompts = [RERANK_TEMPLATE.replace("{query}", QUERY).replace("{document}", text) for text in DOCUMENTS]
        classes = llm.classify([llm.tokenize(prompt, parse_special=True) for prompt in prompts])
        assert llm.plan.memory.kv_cache == 0
        assert "none: it ranks texts" in llm.plan.memory.layout
        with pytest.raises(ConfigError, match=r"cannot generate text: it is a model \(qwen3\) that ranks"):
            llm.generate("a")
        alone = [llm.rerank(QUERY, [text])[0].relevance_score for text in DOCUMENTS]
        # a "{document}" in the query is not replaced by the document
        [tricky] = llm.rerank("about {document}", ["blue"])
        plain = RERANK_TEMPLATE.replace("{document}", "blue").replace("{query}", "about {document}")
        [wanted] = llm.classify(llm.tokenize(plain, parse_special=True))
        assert tricky.relevance_score == pytest.approx(wanted.probs["yes"], abs=1e-5)
    for each in found:
        assert each.relevance_score == pytest.approx(classes[each.index].probs["yes"], abs=1e-4)
        assert each.relevance_score == pytest.approx(alone[each.index], abs=1e-4)
    assert all(list(each.probs) == ["yes", "no"] and abs(sum(each.probs.values()) - 1) < 1e-5 for each in classes)
    assert len({round(each.relevance_score, 4) for each in found}) > 3
    with LLM(qwen, pooling="last") as llm:  # with this pooling, the model is an ordinary decoder
        assert llm.generate("a", {"max_tokens": 2, "ignore_eos": True})[0].finish_reason == "length"
        assert llm.embed("a")[0].shape == (64,)


def test_beside_a_query_that_spells_out_special_tokens(files):
    with LLM(files["bert-rank"]) as llm:
        ids = pair_tokenizer(llm._client.model, "[SEP] blue")("[CLS]")
        assert ids.count(llm.tokenize("")[0]) == 1, "only the mark in front is a [CLS]"
        assert llm.rerank("[SEP] blue", ["[CLS]"])[0].error is None


def test_pairs_of_a_child_that_dies_go_on_in_another(files):
    documents = DOCUMENTS * 200
    with LLM(files["bert-rank"], isolate=True) as llm:
        [pid] = llm._client.pids
        found = []
        thread = threading.Thread(target=lambda: found.extend(llm.rerank(QUERY, documents, use_activation=False)))
        thread.start()
        until(lambda: llm.stats().submitted)
        os.kill(pid, signal.SIGKILL)
        thread.join(60)
        llm.rerank(QUERY, ["blue"])  # computed by the next child, even if the first had finished before it was killed
        assert [beat.restarts for beat in llm.heartbeats] == [1]
    assert sorted(each.index for each in found) == list(range(len(documents)))
    for each in found:
        wanted = VECTORS["bert-rank"]["results"][each.index % len(DOCUMENTS)]["values"][0]
        assert abs(each.relevance_score - wanted) < NEAR


def test_async(files):
    async def both():
        async with AsyncLLM(files["bert-rank"]) as llm:
            return await asyncio.gather(llm.rerank(QUERY, DOCUMENTS, 3), llm.classify(["blue", ""], errors="return"))

    found, (one, error) = asyncio.run(both())
    with LLM(files["bert-rank"]) as llm:
        assert [each.index for each in found] == [each.index for each in llm.rerank(QUERY, DOCUMENTS, 3)]
    assert one.label == "LABEL_0"
    assert isinstance(error, LlamaBatchError)
