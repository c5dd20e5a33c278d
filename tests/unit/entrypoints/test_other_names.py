"""A name of vLLM or llama_cpp that does not exist here: the error says what replaces it."""

import copy
import importlib
import pickle
from functools import partial

import pytest

import llamabatch
from llamabatch import LLM, AsyncLLM, EngineConfig, RequestOutput, SamplingParams
from llamabatch.errors import InputError
from llamabatch.testing import FakeAsyncLLM, FakeLLM
from llamabatch.utils.other_names import MODULES, OF_LLM, OF_OUTPUT, OF_PACKAGE


def test_no_name_with_advice_is_one_of_ours():
    assert set(OF_PACKAGE) & set(llamabatch.__all__) == set()
    assert [name for name in OF_LLM if hasattr(LLM, name) or hasattr(AsyncLLM, name)] == []
    assert set(OF_OUTPUT) & {*dir(RequestOutput), *RequestOutput.__dataclass_fields__} == set()


@pytest.mark.parametrize("name", ["get_tokenizer", "create_completion", "llm_engine"])
def test_a_missing_method_says_what_there_is(name):
    for llm in (FakeLLM(), FakeAsyncLLM()):
        with pytest.raises(AttributeError, match=f"{type(llm).__name__}.{name} is not there: ") as caught:
            getattr(llm, name)
        assert OF_LLM[name] in str(caught.value)
        assert not hasattr(llm, name)
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            llm.nothing  # noqa: B018


def test_a_missing_field_of_an_output_says_what_there_is():
    [output] = FakeLLM().generate("Hello")
    with pytest.raises(AttributeError, match=r"RequestOutput.finished is not there: .*finish_reason"):
        output.finished  # noqa: B018
    assert copy.deepcopy(output) == pickle.loads(pickle.dumps(output)) == output


def test_a_missing_name_of_the_package_says_what_there_is():
    with pytest.raises(ImportError, match=r"llamabatch.Llama is not there: llamabatch.compat has it"):
        from llamabatch import Llama  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from llamabatch import Nothing  # noqa: F401
    with pytest.raises(AttributeError, match=r"LoRARequest is not there: llamabatch.compat.vllm.lora.request has it"):
        llamabatch.LoRARequest  # noqa: B018
    assert not hasattr(llamabatch, "Llama")
    assert not hasattr(llamabatch, "sampling_params")


@pytest.mark.parametrize("name", MODULES)
def test_a_missing_module_says_what_there_is(name):
    with pytest.raises(ModuleNotFoundError, match=f"there is no module llamabatch.{name}") as caught:
        importlib.import_module(f"llamabatch.{name}")
    assert MODULES[name] in str(caught.value)


def test_any_other_missing_module_is_pythons():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'llamabatch.nothing'"):
        importlib.import_module("llamabatch.nothing")


def test_what_the_advice_names_is_there():
    for texts in (OF_PACKAGE, MODULES):
        for name, text in texts.items():
            if text.endswith(" has it") and text.startswith("llamabatch."):
                assert hasattr(importlib.import_module(text.split()[0]), name), name
            if text.endswith(" has its names"):
                importlib.import_module(text.split()[0])


def test_an_error_has_the_name_that_was_given_beside_ours():
    for make, given, ours in (
        (partial(EngineConfig, "tiny"), "max_model_len", "n_ctx"),
        (SamplingParams, "n_predict", "max_tokens"),
    ):
        with pytest.raises(InputError, match=rf"^{given} \(here {ours}\) is -5; give a whole number"):
            make(**{given: -5})
        with pytest.raises(InputError, match=f"^{ours} is -5; give"):
            make(**{ours: -5})
