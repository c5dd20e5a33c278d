"""LangChain with llamabatch: its standard tests on the bundled model, and on a FakeLLM if they need a better model."""

import asyncio
import json
import re
from typing import ClassVar, Literal

import pytest

pytest.importorskip("langchain_core", reason="needs langchain (make test-scale)")
pytest.importorskip("langchain_tests", reason="needs langchain-tests (make test-scale)")

from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, trim_messages
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests, EmbeddingsUnitTests
from pydantic import BaseModel

from llamabatch import LLM
from llamabatch.errors import ConfigError, EngineClosedError, PromptError, SamplingError
from llamabatch.integrations.langchain import ChatLlamaBatch, LlamaBatchEmbeddings
from llamabatch.testing import FakeLLM

pytestmark = pytest.mark.filterwarnings("default")  # LangChain itself warns

LLM_OF_TESTS = LLM("tiny", n_slots=8)
TOO_SMALL = "the bundled model is too small for this; TestScripted runs it"


class _Chat:
    chat_model_class = ChatLlamaBatch
    supports_model_override = False  # each ChatLlamaBatch has one loaded model
    has_tool_calling = True
    has_tool_choice = True
    returns_usage_metadata = True
    supports_json_mode = True
    chat_model_params: ClassVar = {"llm": LLM_OF_TESTS, "temperature": 0.0, "max_tokens": 200}


class TestUnit(_Chat, ChatModelUnitTests):
    # without the standard api_key and max_retries, which have no meaning without a network
    standard_chat_model_params: ClassVar = {"temperature": 0, "max_tokens": 100, "timeout": 60, "stop": []}
    chat_model_params: ClassVar = {"llm": LLM_OF_TESTS}


class TestBundledModel(_Chat, ChatModelIntegrationTests):
    has_structured_output = False  # on some CPUs this model never ends a text in JSON; TestScripted tests it

    @pytest.mark.xfail(reason=TOO_SMALL)
    def test_tool_calling(self, model):
        super().test_tool_calling(model)

    @pytest.mark.xfail(reason=TOO_SMALL)
    async def test_tool_calling_async(self, model):
        await super().test_tool_calling_async(model)

    @pytest.mark.xfail(reason=TOO_SMALL)
    def test_json_mode(self, model):
        super().test_json_mode(model)

    @pytest.mark.xfail(reason=TOO_SMALL)
    def test_agent_loop(self, model):
        super().test_agent_loop(model)

    @pytest.mark.xfail(reason=TOO_SMALL)
    def test_unicode_tool_call_integration(self, model, **options):
        super().test_unicode_tool_call_integration(model, **options)


def witty(request):
    """Returns the answer that a large model would give to a request of the standard tests."""
    text = request.text
    if "magic_function_no_args" in text:
        return call("magic_function_no_args")
    if "magic_function" in text or "Hello!" in text:
        return call("magic_function", input=3)
    if "customer" in text and (found := re.search("'(.*?)'", text)):
        return call("unicode_customer", customer_name=found[1], description="a company")
    if "weather in" in text:
        return call("get_weather", location="San Francisco, CA")
    if "Pirate" in text:
        return call("greeting_generator", answer_style="pirate")
    if "joke" in text:
        return json.dumps({"setup": "Why did the cat sit?", "punchline": "It was tired."})
    return "Fair winds to you."


def call(name, **arguments):
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


class TestScripted(_Chat, ChatModelIntegrationTests):
    chat_model_params: ClassVar = {"llm": FakeLLM(answers=witty), "max_tokens": 500}


class TestEmbeddingsUnit(EmbeddingsUnitTests):
    embeddings_class = LlamaBatchEmbeddings
    embedding_model_params: ClassVar = {"llm": LLM_OF_TESTS}


class TestEmbeddings(EmbeddingsIntegrationTests):
    embeddings_class = LlamaBatchEmbeddings
    embedding_model_params: ClassVar = {"llm": LLM_OF_TESTS}


class Recorder(BaseCallbackHandler):
    def __init__(self):
        self.seen = []

    def on_chat_model_start(self, serialized, messages, **kwargs):
        self.seen.append(("start", messages[0][-1].content))

    def on_llm_end(self, response, **kwargs):
        self.seen.append(("end", response.generations[0][0].text))

    def on_llm_error(self, error, **kwargs):
        self.seen.append(("error", str(error)))


def counted(llm, monkeypatch):
    """Returns a list that gets the number of conversations of each call of LLM.chat."""
    calls, real = [], llm.chat
    monkeypatch.setattr(
        llm, "chat", lambda given, *args, **named: calls.append(len(given)) or real(given, *args, **named)
    )
    return calls


def test_a_batch_is_one_call_and_each_input_has_its_callbacks(monkeypatch):
    llm = FakeLLM(answers=lambda request: request.text.upper())
    calls = counted(llm, monkeypatch)
    recorder = Recorder()
    chain = ChatPromptTemplate.from_template("say {word}") | ChatLlamaBatch(llm=llm) | StrOutputParser()
    words = [f"word {i}" for i in range(20)]
    assert chain.batch([{"word": word} for word in words], {"callbacks": [recorder]}) == [
        f"SAY {word.upper()}" for word in words
    ]
    assert calls == [20]
    assert recorder.seen.count(("start", "say word 7")) == 1
    assert recorder.seen.count(("end", "SAY WORD 7")) == 1


def test_a_batch_keeps_to_max_concurrency(monkeypatch):
    llm = FakeLLM()
    calls = counted(llm, monkeypatch)
    ChatLlamaBatch(llm=llm).batch(["a"] * 5, {"max_concurrency": 2})
    assert calls == [2, 2, 1]


def test_one_failure_of_a_batch_is_its_own():
    llm = FakeLLM(answers={"good": "yes", "bad": ValueError("broken")})
    model, recorder = ChatLlamaBatch(llm=llm), Recorder()
    good, bad = model.batch(["good", "bad"], {"callbacks": [recorder]}, return_exceptions=True)
    assert good.text == "yes"
    assert "broken" in str(bad)
    assert ("end", "yes") in recorder.seen
    assert any(kind == "error" and "broken" in text for kind, text in recorder.seen)
    with pytest.raises(Exception, match="broken"):
        model.batch(["good", "bad"])
    [long] = model.batch(["word " * 5000], return_exceptions=True)
    assert isinstance(long, PromptError)


def test_a_cache_is_asked_before_anything_is_computed():
    llm = FakeLLM()
    model = ChatLlamaBatch(llm=llm, cache=InMemoryCache())
    model.batch(["one", "two"])
    assert [each.text for each in model.batch(["one", "two", "three"])] == ["one", "two", "three"]
    assert len(llm.requests) == 3


def test_a_batch_streams_where_invoke_does(monkeypatch):
    llm = FakeLLM()
    model, calls = ChatLlamaBatch(llm=llm, streaming=True), counted(llm, monkeypatch)
    assert [each.text for each in model.batch(["one two", "three"])] == ["one two", "three"]
    assert calls == [2]
    assert len(llm.requests) == 2


def test_coroutines_share_the_engine_of_other_calls():
    model = ChatLlamaBatch("tiny", temperature=0, max_tokens=6, engine={"n_slots": 8})
    llm = model._shared.llm
    before = llm.stats().submitted

    async def ask():
        answers = await model.abatch([f"What is the capital of {land}?" for land in ("France", "Italy", "Spain")])
        streamed = [chunk async for chunk in model.astream("What is the capital of France?")]
        return [each.text for each in answers], "".join(chunk.text for chunk in streamed)

    assert asyncio.run(ask()) == (["Paris", "Rome", "Madrid"], "Paris")
    assert model.invoke("What is the capital of France?").text == "Paris"
    assert llm.stats().submitted == before + 5
    model.close()
    with pytest.raises(EngineClosedError):
        model.invoke("Hello")
    with pytest.raises(EngineClosedError):
        asyncio.run(model.ainvoke("Hello"))


def test_an_llm_that_was_given_stays_open():
    model = ChatLlamaBatch(llm=LLM_OF_TESTS)
    asyncio.run(model.ainvoke("Hello"))
    model.close()
    assert LLM_OF_TESTS.generate("Once", {"max_tokens": 1})[0].text


def test_parameters_of_the_model_and_of_the_call():
    llm = FakeLLM()
    model = ChatLlamaBatch(llm=llm, temperature=0.5, top_k=7, timeout=60, stop=["x"], sampling={"min_p": 0.1})
    model.invoke("a")
    model.bind(temperature=0.1, max_completion_tokens=9).invoke("a", stop=["y"])
    first, second = (request.params for request in llm.requests)
    assert (first.temperature, first.top_k, first.min_p, first.deadline_s, first.stop) == (0.5, 7, 0.1, 60, ("x",))
    assert (second.temperature, second.max_tokens, second.stop) == (0.1, 9, ("y",))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"temprature": 1}, ValueError, "temprature"),
        ({"temperature": -1.0}, SamplingError, "temperature"),
        ({"sampling": {"mini_p": 1}}, SamplingError, "mini_p"),
        ({"engine": {"n_slot": 4}}, ConfigError, "n_slot"),
        ({"llm": FakeLLM(), "engine": {"n_slots": 4}}, ConfigError, "n_slots: the model is an LLM already"),
        ({"llm": "tiny"}, ConfigError, "give an LLM"),
    ],
)
def test_wrong_arguments_are_refused_before_a_model_is_loaded(given, error, message):
    with pytest.raises(error, match=message):
        ChatLlamaBatch(**given)


def test_wrong_arguments_of_a_call_are_refused():
    model = ChatLlamaBatch(llm=FakeLLM())
    with pytest.raises(ConfigError, match=r"model is 'other'.*make another one"):
        model.invoke("a", model="other")
    with pytest.raises(ConfigError, match="tool_choice is 'nothing'"):
        model.bind_tools([{"type": "function", "function": {"name": "f", "parameters": {}}}], tool_choice="nothing")
    with pytest.raises(ConfigError, match="method is 'magic'"):
        model.with_structured_output({"title": "a", "type": "object"}, method="magic")
    with pytest.raises(SamplingError, match="no_such"):
        model.invoke("a", no_such=1)


def test_broken_arguments_of_a_call_are_an_invalid_one():
    model = ChatLlamaBatch(llm=LLM_OF_TESTS, temperature=0, max_tokens=30)
    tool = {"type": "function", "function": {"name": "note", "parameters": {"type": "object", "properties": {
        "text": {"type": "string", "minLength": 200}}, "required": ["text"]}}}  # fmt: skip
    answer = model.bind_tools([tool], tool_choice="any").invoke("Write")
    assert answer.tool_calls == []
    assert [each["name"] for each in answer.invalid_tool_calls] == ["note"]


def test_a_form_holds_the_answer_and_its_raw_text_is_there():
    class Animal(BaseModel):
        name: Literal["dog", "bird"]
        legs: Literal[2, 4]

    model = ChatLlamaBatch(llm=LLM_OF_TESTS, temperature=0, max_tokens=100)
    found = model.with_structured_output(Animal, include_raw=True).batch(["A dog", "A bird"])
    assert all(isinstance(each["parsed"], Animal) and each["parsing_error"] is None for each in found)
    short = ChatLlamaBatch(llm=LLM_OF_TESTS, temperature=0, max_tokens=3)
    cut = short.with_structured_output(Animal, include_raw=True).invoke("A dog")
    assert cut["parsed"] is None
    assert cut["parsing_error"] is not None
    assert isinstance(cut["raw"], AIMessage)


def test_thinking_and_logprobs_are_told():
    model = ChatLlamaBatch(llm=LLM_OF_TESTS, temperature=0, max_tokens=3)
    answer = model.invoke([HumanMessage("What is the capital of France?")], logprobs=True, top_logprobs=2)
    content = answer.response_metadata["logprobs"]["content"]
    assert content[0]["token"] == "Paris"
    assert len(content[0]["top_logprobs"]) == 2


def test_prefixes_of_embeddings_and_their_length():
    llm = FakeLLM()
    vectors = LlamaBatchEmbeddings(llm=llm, query_prefix="query: ", document_prefix="passage: ", dimensions=8)
    vectors.embed_documents(["one", "two"])
    assert len(vectors.embed_query("one")) == 8
    assert [request.prompt for request in llm.requests] == ["passage: one", "passage: two", "query: one"]
    assert vectors.embed_documents([]) == []


def test_vectors_have_length_one_unless_told_otherwise():
    llm = FakeLLM(embeddings=lambda request: [3.0, 4.0])
    assert LlamaBatchEmbeddings(llm=llm).embed_query("one") == pytest.approx([0.6, 0.8])
    assert LlamaBatchEmbeddings(llm=llm, normalize=False).embed_query("one") == [3.0, 4.0]


def weather(city: str) -> str:
    """The weather in a city."""
    return city


def test_tokens_are_counted_by_the_engine(monkeypatch):
    model = ChatLlamaBatch(llm=LLM_OF_TESTS, temperature=0, max_tokens=1)
    assert model.get_token_ids("Once upon a time") == LLM_OF_TESTS.tokenize("Once upon a time", add_special=False)
    assert model.get_num_tokens("") == 0
    assert ChatLlamaBatch(llm=FakeLLM(), custom_get_token_ids=lambda text: [7] * 3).get_token_ids("a") == [7] * 3
    messages = [SystemMessage("Be brief."), HumanMessage("What is the capital of France?")]
    n_tokens = model.get_num_tokens_from_messages(messages)
    assert n_tokens == model.invoke(messages).usage_metadata["input_tokens"]
    assert model.get_num_tokens_from_messages([]) == 0
    bound = model.bind_tools([weather]).invoke(messages).usage_metadata["input_tokens"]
    assert model.get_num_tokens_from_messages(messages, tools=[weather]) == bound > n_tokens


def test_a_conversation_is_trimmed_by_its_tokens():
    model = ChatLlamaBatch(llm=LLM_OF_TESTS)
    talk = [HumanMessage("one"), AIMessage("two"), HumanMessage("What is the capital of France?")]
    n_tokens = model.get_num_tokens_from_messages(talk[2:])
    assert trim_messages(talk, max_tokens=n_tokens, token_counter=model, strategy="last") == talk[2:]
    assert trim_messages(talk, max_tokens=10_000, token_counter=model, strategy="last") == talk


def test_an_order_that_the_template_refuses_is_counted(monkeypatch):
    """The template refuses messages that are not in turns, as templates of Mistral and Gemma do."""
    llm = FakeLLM()
    strict = (
        "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('turns') }}{% endif %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    )
    monkeypatch.setattr(llm._client.model, "chat_template", strict)
    model = ChatLlamaBatch(llm=llm)
    user, call = HumanMessage("one two"), AIMessage("three", tool_calls=[{"name": "f", "args": {"a": 1}, "id": "1"}])
    assert model.get_num_tokens_from_messages([user, AIMessage("three")]) == 1 + 2 + 2 + 1 + 2
    assert model.get_num_tokens_from_messages([AIMessage("three"), user]) == 1 + 2 + 2 + 1 + 2
    written = model.get_num_tokens('{"name": "f", "arguments": {"a": 1}}')
    assert model.get_num_tokens_from_messages([call, user]) == 1 + 2 + 2 + 1 + 2 + written


def test_a_profile_is_there_without_a_model():
    assert ChatLlamaBatch("no/such.gguf", engine={"n_ctx": 512}).profile["max_input_tokens"] == 512
    assert "max_input_tokens" not in ChatLlamaBatch("no/such.gguf").profile
    profile = ChatLlamaBatch(llm=LLM_OF_TESTS).profile
    assert profile["max_input_tokens"] == LLM_OF_TESTS.n_ctx
    assert profile["tool_calling"]
    assert not profile["image_inputs"]
    assert ChatLlamaBatch(llm=LLM_OF_TESTS, profile={"max_input_tokens": 9}).profile == {"max_input_tokens": 9}
