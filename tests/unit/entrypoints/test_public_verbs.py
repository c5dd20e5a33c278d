"""LLM and AsyncLLM have the same verbs, with the same parameters and defaults."""

import inspect
from typing import get_type_hints

import pytest

from llamabatch import LLM, AsyncLLM, EngineError
from llamabatch.chat.options import ChatKeywords, chat_options
from llamabatch.testing import FakeLLM

# Parameters for a caller that waits on a terminal.
ONLY_SYNC = {"progress"}
# Methods for the life of an engine on an event loop.
ONLY_ASYNC = {"load", "aclose"}


def verbs(front):
    return {name for name in dir(front) if not name.startswith("_")}


def parameters(function):
    """Returns name, kind and default of each parameter. Annotations are left to the type checker."""
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in found if p.name not in ONLY_SYNC]


def test_the_names_are_the_same():
    assert verbs(AsyncLLM) - ONLY_ASYNC == verbs(LLM)


@pytest.mark.parametrize("name", [*sorted(verbs(LLM)), "__init__"])
def test_the_parameters_are_the_same(name):
    ours, theirs = getattr(LLM, name), inspect.getattr_static(AsyncLLM, name)
    if isinstance(ours, property):  # in AsyncLLM it may be a method without arguments
        assert isinstance(theirs, property) or parameters(theirs) == parameters(ours.fget)
        return
    assert parameters(ours) == parameters(getattr(AsyncLLM, name))


def test_the_keywords_of_chats_are_those_of_their_options():
    assert get_type_hints(ChatKeywords) == {n: t for n, t in get_type_hints(chat_options).items() if n != "return"}


@pytest.mark.parametrize("name", ["chat", "stream", "as_completed"])
def test_signatures_name_the_keywords_of_chats_in_front_of_the_verbs_own(name):
    shown = inspect.signature(getattr(LLM, name)).parameters
    wanted = [*inspect.signature(chat_options).parameters.values(), shown["adapters"], shown["errors"]]
    assert [p for p in shown.values() if p.kind is p.KEYWORD_ONLY and p.name not in ONLY_SYNC] == wanted
    with FakeLLM() as llm, pytest.raises(TypeError, match=rf"LLM\.{name}\(\) got an unexpected keyword .*'tool'"):
        getattr(llm, name)("a", tool=[])


@pytest.mark.parametrize("name", ["generate", "chat", "stream", "as_completed"])
def test_a_field_of_sampling_that_is_given_as_a_keyword_is_told_its_place(name):
    with (
        FakeLLM() as llm,
        pytest.raises(TypeError, match=r"'max_tokens', a param.* params=SamplingParams\(max_tokens="),
    ):
        getattr(llm, name)("a", max_tokens=5)
    for keyword, advice in {
        "max_new_tokens": r"SamplingParams\(max_new_tokens=",
        "lora_request": "adapters='name'",
        "max_model_len": r"LLM\(..., max_model_len=",
    }.items():
        with FakeLLM() as llm, pytest.raises(TypeError, match=advice):
            getattr(llm, name)("a", **{keyword: None})


def test_a_prompt_of_a_chat_has_no_keyword_for_its_answer():
    with FakeLLM() as llm, pytest.raises(TypeError, match=r"apply_chat_template\(\) got .*'tool_choice'"):
        llm.apply_chat_template([{"role": "user", "content": "a"}], tool_choice="auto")


@pytest.mark.parametrize("name", sorted(verbs(LLM)))
def test_every_verb_says_what_it_does(name):
    assert inspect.getdoc(getattr(LLM, name))
    assert inspect.getdoc(getattr(AsyncLLM, name))


def test_a_verb_that_waits_is_a_coroutine_or_an_asynchronous_iterator():
    at_once = {"plan", "n_ctx", "is_asleep", "stream", "as_completed", "close", "from_pretrained"}
    for name in verbs(AsyncLLM) - at_once:
        assert inspect.iscoroutinefunction(getattr(AsyncLLM, name)), name


def test_from_pretrained_of_an_async_llm_downloads_nothing_at_once():
    llm = AsyncLLM.from_pretrained("owner/repo", "*Q4_K_M.gguf", revision="main", n_ctx=64)
    with pytest.raises(EngineError, match="not loaded yet"):
        _ = llm.plan
    llm.close()
