"""The vocabulary and metadata of the bundled model, with engines in this process and in a child."""

import asyncio
import shutil
import threading

import pytest

from llamabatch import LLM, AsyncLLM, EngineClosedError, EngineError, MetadataArray, ModelFileError
from llamabatch.gguf.header import metadata_of
from llamabatch.gguf.reader import FLOAT32, TEXT, Items
from llamabatch.llama.model import Model
from llamabatch.utils.paths import bundled_model


@pytest.mark.parametrize("options", [{}, {"isolate": True}], ids=["here", "a child"])
def test_a_vocabulary_names_each_token_once_and_back(options):
    with LLM("tiny", n_ctx=128, n_slots=2, **options) as llm:
        vocab, n_ctx = llm.vocab, llm.n_ctx
        tokens = list(vocab)
        assert len(tokens) == len(vocab) == vocab.size == 2048 == len(set(tokens))
        assert [vocab.id(token) for token in tokens] == list(range(2048))
        assert [vocab.token(i) for i in range(2048)] == tokens
        assert (vocab.bos_token_id, vocab.eos_token_id, vocab.eot_token_id, vocab.pad_token_id) == (0, 2, 2, 0)
        assert vocab.special_ids["nl"] == llm.tokenize("\n")[0]
        assert vocab.eog_token_ids == (0, 2)
        ids = llm.tokenize("Once upon a time", add_special=False)
        assert b"".join(map(vocab.bytes, ids)) == b"Once upon a time"
        assert vocab.bytes(2) == vocab.token(2).encode() == b"<|im_end|>"
        assert "fim_pre" not in vocab.special_ids
        assert repr(vocab).startswith("Vocab(size=2048, bos=0, eos=2")
    assert n_ctx == 128 == llm.n_ctx
    assert vocab.id("<|im_end|>") == 2  # this was read before the end
    with pytest.raises(EngineClosedError):
        vocab.token(5)
    with pytest.raises(EngineClosedError):
        next(iter(vocab))


def test_metadata_are_the_values_of_the_header(tmp_path):
    copy = tmp_path / "copy.gguf"
    shutil.copy(bundled_model(), copy)
    with LLM(copy, n_slots=1) as llm:
        found = llm.metadata
        assert (found["general.architecture"], found["llama.block_count"]) == ("llama", 6)
        assert found["llama.rope.freq_base"] == 10000.0
        assert found["tokenizer.ggml.add_bos_token"] is False
        assert found["tokenizer.ggml.tokens"] == MetadataArray("string", 2048)
        assert len(found["tokenizer.ggml.token_type"].values) == 2048
        assert "3, 3" not in repr(found["tokenizer.ggml.token_type"])
        with pytest.raises(TypeError):
            found["general.name"] = "other"
        copy.unlink()
        with pytest.raises(ModelFileError, match="cannot be read any more"):
            _ = llm.metadata


def test_arrays_of_each_type():
    header = {"a": Items(FLOAT32, 70000, 0, 0), "b": (True,), "c": (), "d": Items(TEXT, 3, 0, 0), "e": (0.5, 1.5)}
    kinds = {key: (each.type, len(each), each.values) for key, each in metadata_of(header).items()}
    assert kinds == {
        "a": ("float", 70000, None), "b": ("bool", 1, (True,)), "c": ("int", 0, ()),
        "d": ("string", 3, None), "e": ("float", 2, (0.5, 1.5)),
    }  # fmt: skip


def test_an_async_llm_has_the_same():
    async def ask():
        llm = AsyncLLM("tiny", n_ctx=128, n_slots=1)
        with pytest.raises(EngineError, match="not loaded yet"):
            _ = llm.n_ctx
        async with llm:
            vocab = await llm.vocab()
            assert vocab is await llm.vocab()
            return vocab.id("<|im_end|>"), (await llm.metadata())["general.architecture"], llm.n_ctx

    assert asyncio.run(ask()) == (2, "llama", 128)


def test_no_token_stands_for_more_bytes_than_the_longest():
    model = Model(bundled_model(), vocab_only=True)
    try:
        assert model.longest_token == 13
        pieces = [model.piece(token_id) for token_id in range(model.n_vocab)]
        assert max(map(len, pieces)) <= 13
        for text in (*(piece.decode(errors="replace") * 50 for piece in pieces), " " * 999, "ä😀\x00 " * 99):
            for parse_special in (False, True):
                ids = model.tokenize(text, add_special=False, parse_special=parse_special)
                assert len(text.encode()) <= 13 * len(ids)
    finally:
        model.close()


def test_a_long_text_holds_up_no_call_for_a_token():
    """Event loops ask for texts of tokens while another thread tokenizes megabytes."""
    model = Model(bundled_model(), vocab_only=True)
    try:
        with model._text_lock:
            asked = threading.Thread(target=lambda: (model.piece(5), model.token_text(5), model.grammars))
            asked.start()
            asked.join(20)
            assert not asked.is_alive()
    finally:
        model.close()
