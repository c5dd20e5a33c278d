"""Messages about common mistakes say what to do."""

import asyncio
import copy
import pickle

import pytest

from llamabatch import LLM, PromptError
from llamabatch.compat import LlamaGrammar
from llamabatch.errors import ModelFileError, SamplingError, UnknownOptionError
from llamabatch.gguf.resolve import resolve
from llamabatch.testing import FakeAsyncLLM, FakeLLM


@pytest.mark.parametrize("name", ["lora", "loras", "adapter", "lora_path", "lora_modules"])
def test_an_adapter_is_an_option_of_adapters(name):
    with pytest.raises(UnknownOptionError, match=r"give adapters=\{'name': path\}"):
        LLM("tiny", **{name: "a.gguf"})


def test_a_text_is_no_conversation():
    with pytest.raises(PromptError, match=r"a single message; give \[\{'role': 'user'"):
        FakeLLM().chat({"role": "user", "content": "text"})
    with pytest.raises(PromptError, match=r"conversations is 'text', a text; give \[\{'role': 'user'.*generate\(\)"):
        FakeLLM().chat("text")


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", [FakeLLM, FakeAsyncLLM])
def test_a_model_is_not_pickled(kind, way):
    with pytest.raises(TypeError, match=f"{kind.__name__} cannot be pickled or copied: .*make one in each process"):
        way(kind())


def test_a_closed_model_says_so():
    with FakeLLM("a.gguf") as llm:
        assert "closed" not in repr(llm)
    assert repr(llm) == "FakeLLM('a.gguf', closed)"

    async def run():
        async with FakeAsyncLLM("a.gguf") as llm:
            assert "closed" not in repr(llm)
        return repr(llm)

    assert asyncio.run(run()) == "FakeAsyncLLM('a.gguf', closed)"


def test_a_mistyped_path_names_the_file_that_is_there(tmp_path):
    for name in ("Llama-3.2-1B-Q4_K_M.gguf", "qwen.gguf", "notes.txt"):
        (tmp_path / name).touch()
    with pytest.raises(ModelFileError, match=r"does not exist; did you mean 'Llama-3.2-1B-Q4_K_M.gguf'\?"):
        resolve(str(tmp_path / "llama-3.2-1b-q4_k_s.gguf"))
    with pytest.raises(ModelFileError, match=r"did you mean 'qwen.gguf'\?"):
        resolve(str(tmp_path / "qwen"))
    with pytest.raises(ModelFileError, match=r"tinny does not exist; did you mean 'tiny'\?"):
        resolve(str(tmp_path / "tinny"))
    with pytest.raises(ModelFileError, match=r"m.gguf does not exist \(.*/nowhere is no folder\)"):
        resolve(str(tmp_path / "nowhere" / "m.gguf"))
    with pytest.raises(ModelFileError, match="does not exist; give the path"):
        resolve(str(tmp_path / "mistral-7b.gguf"))


def test_a_path_stands_in_a_message_once(tmp_path):
    path = str(tmp_path / ("long" * 100))
    with pytest.raises(ModelFileError, match="cannot be read: ") as caught:
        resolve(f"{path}.gguf")
    assert str(caught.value).count(path) == 1
    with pytest.raises(SamplingError, match="cannot be read: ") as caught:
        LlamaGrammar.from_file(tmp_path / "no.gbnf")
    assert str(caught.value).count("no.gbnf") == 1
