"""Models of every kind of architecture, with random weights: each works as llama_cpp.Llama does, or is refused."""

import pytest
from architectures import N_EMBD, write, write_bert

from llamabatch import LLM, ConfigError


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The path of the model of a kind."""
    folder, written = tmp_path_factory.mktemp("models"), {}

    def path(kind):
        if kind not in written:
            written[kind] = write(kind, folder / f"{kind}.gguf")
        return written[kind]

    return path


def test_an_encoder_gives_one_vector_a_text(tmp_path):
    """The file that the tests of embeddings stand on is one that llama.cpp itself understands."""
    from llama_cpp import Llama

    llama = Llama(str(write_bert(tmp_path / "bert.gguf")), embedding=True, n_ctx=512, n_threads=1, verbose=False)
    one, other = llama.embed(["Hello world", "Once upon a time"])
    llama.close()
    assert len(one) == len(other) == N_EMBD
    assert one != other


def test_an_encoder_with_a_decoder_is_refused(models):
    with pytest.raises(ConfigError, match="no decoder-only text model"):
        LLM(models("t5"))
