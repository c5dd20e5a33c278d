"""LiteLLM with llamabatch: its four kinds of calls, tools, vectors, and errors in LiteLLM's classes."""

import asyncio
import json

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # without it, the import of litellm downloads prices
    litellm = pytest.importorskip("litellm", reason="needs litellm (make test-scale)")

from llamabatch import LLM
from llamabatch.errors import ConfigError, QueueFull
from llamabatch.integrations.litellm import register
from llamabatch.testing import FakeLLM

pytestmark = pytest.mark.filterwarnings("default")  # LiteLLM itself warns

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "note",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        },
    }
]
GREEDY = {"temperature": 0, "max_tokens": 60}


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", n_slots=8) as llm:
        yield llm


@pytest.fixture
def model(llm):
    """The name of a model whose engine stays open during a test."""
    register(engines={"open": llm})
    yield "llamabatch/open"
    register().close()


def fake(**given):
    llm = FakeLLM(**given)
    register(engines={"fake": llm})
    return llm


def test_a_model_is_loaded_by_its_name():
    provider = register(n_slots=4)
    answer = litellm.completion("llamabatch/tiny", QUESTION, **GREEDY)
    assert answer.choices[0].message.content == "Paris"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (18, 2)
    assert provider._engines["tiny"].llm.plan.config.n_slots == 4
    provider.close()
    with pytest.raises(litellm.ServiceUnavailableError, match="closed"):
        litellm.completion("llamabatch/tiny", QUESTION)


def test_streams_and_coroutines(model):
    chunks = list(litellm.completion(model, QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY))
    # the chunk with the usage has no choices
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == "Paris"
    assert chunks[-1].usage.prompt_tokens == 18

    async def ask():
        answers = await asyncio.gather(*(litellm.acompletion(model, QUESTION, **GREEDY) for _ in range(8)))
        stream = await litellm.acompletion(model, QUESTION, stream=True, **GREEDY)
        return answers, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    answers, streamed = asyncio.run(ask())
    assert {answer.choices[0].message.content for answer in answers} == {streamed} == {"Paris"}


def test_a_forced_call_whole_and_as_it_comes(model):
    forced = {"tools": TOOLS, "tool_choice": "required", **GREEDY}
    answer = litellm.completion(model, QUESTION, **forced)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "note"
    assert isinstance(json.loads(call.function.arguments)["n"], int)
    assert answer.choices[0].finish_reason == "tool_calls"
    chunks = list(litellm.completion(model, QUESTION, stream=True, **forced))
    joined = litellm.stream_chunk_builder(chunks).choices[0]
    assert joined.message.tool_calls[0].function.arguments == call.function.arguments
    assert joined.finish_reason == "tool_calls"
    history = [*QUESTION, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "noted"}]
    assert litellm.completion(model, history, tools=TOOLS, max_tokens=4).choices[0].finish_reason in ("stop", "length")


def test_a_form_holds_the_answer(model):
    schema = {"type": "object", "properties": {"legs": {"enum": [2, 4]}}, "required": ["legs"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
    answer = litellm.completion(model, QUESTION, response_format=form, **GREEDY)
    assert json.loads(answer.choices[0].message.content)["legs"] in (2, 4)


def test_vectors(model, llm):
    found = litellm.embedding(model, input=["one", "two"])
    again = asyncio.run(litellm.aembedding(model, input=["one", "two"]))
    assert [each["index"] for each in found.data] == [0, 1]
    assert found.data[1]["embedding"] == pytest.approx(llm.embed("two", normalize=True)[0].tolist())
    assert again.data == found.data
    assert found.usage.prompt_tokens == sum(map(len, llm.tokenize(["one", "two"])))


def test_a_model_costs_nothing(capsys):
    fake()
    answer = litellm.completion("llamabatch/fake", QUESTION)
    chunks = list(litellm.completion("llamabatch/fake", QUESTION, stream=True))
    told = capsys.readouterr()
    found = (answer, litellm.embedding("llamabatch/fake", input=["one"]), litellm.stream_chunk_builder(chunks))
    assert [litellm.completion_cost(each) for each in found] == [0.0] * 3
    assert answer._hidden_params["response_cost"] == 0.0  # LiteLLM's proxy adds up these costs
    assert told.out + told.err == ""


def test_a_price_that_the_user_gave_stays(monkeypatch):
    monkeypatch.setattr(litellm, "model_cost", dict(litellm.model_cost))
    price = {"input_cost_per_token": 0.5, "output_cost_per_token": 0.25}
    litellm.register_model({"llamabatch/priced": {"litellm_provider": "llamabatch", "mode": "chat", **price}})
    register(engines={"priced": FakeLLM()})
    usage = (answer := litellm.completion("llamabatch/priced", QUESTION)).usage
    assert litellm.completion_cost(answer) == 0.5 * usage.prompt_tokens + 0.25 * usage.completion_tokens > 0


def test_every_option_arrives_and_the_default_timeout_is_none():
    llm = fake()
    litellm.completion("llamabatch/fake", QUESTION, temperature=0.5, top_p=0.9, stop=["x"], n=2, seed=3, user="me")
    litellm.completion("llamabatch/fake", QUESTION, timeout=30, top_k=7, min_p=0.1, max_completion_tokens=9)
    first, _, second = (request.params for request in llm.requests)
    assert (first.temperature, first.top_p, first.stop, first.seed, first.deadline_s) == (0.5, 0.9, ("x",), 3, None)
    assert (second.deadline_s, second.top_k, second.min_p, second.max_tokens) == (30, 7, 0.1, 9)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "given", "error"),
    [
        ("a", {"temperature": -1}, litellm.BadRequestError),
        ("a", {"no_such_field": 1}, litellm.BadRequestError),
        ("a", {"messages": [{"role": "user", "content": "word " * 9000}]}, litellm.ContextWindowExceededError),
        (ValueError("broken"), {}, litellm.InternalServerError),
        (QueueFull("full"), {}, litellm.RateLimitError),
    ],
)
def test_errors_are_those_of_litellm(stream, answer, given, error):
    fake(answers=lambda _: answer)
    # LiteLLM wraps a 5xx error in the middle of a stream
    expected = (error, litellm.exceptions.MidStreamFallbackError) if stream else error
    asked = {"messages": QUESTION, "num_retries": 0, **given}
    with pytest.raises(expected):
        list(litellm.completion("llamabatch/fake", stream=stream, **asked))

    async def ask():
        answer = await litellm.acompletion("llamabatch/fake", stream=stream, **asked)
        return [chunk async for chunk in answer] if stream else answer

    with pytest.raises(expected):
        asyncio.run(ask())


def test_wrong_options_are_refused_at_once_and_an_llm_stays_open(llm):
    with pytest.raises(ConfigError, match="n_slot"):
        register(n_slot=4)
    register(engines={"open": llm}).close()
    assert llm.tokenize("a")


def test_dspy_asks_through_it(model):
    dspy = pytest.importorskip("dspy", reason="needs dspy")
    lm = dspy.LM(model, temperature=0.0, max_tokens=8, cache=False)
    assert lm("What is the capital of France?") == ["Paris"]
