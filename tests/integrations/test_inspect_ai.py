"""Inspect AI with llamabatch: one of its tasks through the entry point, and the fields of requests and answers."""

import asyncio
import json

import pytest

pytest.importorskip("inspect_ai", reason="needs inspect_ai (make test-scale)")

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import includes
from inspect_ai.tool import ToolCall, ToolFunction, ToolInfo, ToolParams
from inspect_ai.util import JSONSchema

from llamabatch import LLM
from llamabatch.errors import ConfigError, EngineClosedError, PromptError, SamplingError
from llamabatch.integrations.inspect_ai import LlamaBatchAPI
from llamabatch.testing import FakeLLM

pytestmark = pytest.mark.filterwarnings("default")  # Inspect itself warns

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid"}
ADD = ToolInfo(
    name="add",
    description="Adds.",
    parameters=ToolParams(properties={"a": JSONSchema(type="integer")}, required=["a"]),
)


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", n_slots=8, instances=1) as llm:
        yield llm


def ask(llm, messages="Hello", tools=(), tool_choice="auto", **config):
    """Sends one request, and returns its output."""
    api = LlamaBatchAPI("given", llm=llm)
    if isinstance(messages, str):
        messages = [ChatMessageUser(content=messages)]
    output, call = asyncio.run(api.generate(messages, list(tools), tool_choice, GenerateConfig(**config)))
    assert call.request["model"] == "given"
    return output


def test_a_task_runs_on_the_model_that_its_name_says(tmp_path):
    samples = [Sample(input=f"What is the capital of {land}?", target=city) for land, city in CAPITALS.items()]
    options = {"model_args": {"n_slots": 4}, "display": "none", "log_dir": str(tmp_path)}
    [log] = eval(
        Task(dataset=samples, scorer=includes()), model="llamabatch/tiny", temperature=0.0, max_tokens=8, **options
    )
    assert log.status == "success", log.error
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    output = log.samples[0].output
    assert output.usage.input_tokens + output.usage.input_tokens_cache_read == 18
    assert output.stop_reason == "stop"


def test_requests_of_many_samples_share_the_batches(llm):
    api = LlamaBatchAPI("given", llm=llm)
    before = llm.stats()

    async def all_at_once():
        question = [ChatMessageUser(content="Tell me a story about a dog.")]
        config = GenerateConfig(max_tokens=100, temperature=0.0, extra_body={"ignore_eos": True})
        return await asyncio.gather(*(api.generate(question, [], "auto", config) for _ in range(8)))

    texts = {output.completion for output, _ in asyncio.run(all_at_once())}
    assert len(texts) == 1
    after = llm.stats()
    assert (after.decode_rows - before.decode_rows) / (after.decode_calls - before.decode_calls) > 3


def test_a_forced_call_and_its_answer(llm):
    output = ask(llm, "Add 3", [ADD], ToolFunction(name="add"), temperature=0.0, max_tokens=60)
    [call] = output.message.tool_calls
    assert (call.function, call.parse_error) == ("add", None)
    assert isinstance(call.arguments["a"], int)
    assert output.stop_reason == "tool_calls"
    history = [
        ChatMessageUser(content="Add 3"),
        output.message,
        ChatMessageTool(content="4", tool_call_id=call.id, function="add"),
    ]
    assert ask(llm, history, [ADD], max_tokens=4).stop_reason in ("max_tokens", "stop")


def test_a_call_that_was_cut_says_so(llm):
    text = ToolInfo(
        name="note",
        description="Notes.",
        parameters=ToolParams(properties={"text": JSONSchema(type="string", minLength=200)}, required=["text"]),
    )
    output = ask(llm, "Write", [text], "any", temperature=0.0, max_tokens=30)
    assert output.stop_reason == "max_tokens"
    assert "no JSON object" in output.message.tool_calls[0].parse_error


def test_every_option_of_a_request_arrives():
    fake = FakeLLM(answers="one two three")
    ask(
        fake,
        temperature=0.5, top_p=0.9, top_k=7, max_tokens=9, seed=3, stop_seqs=["x"], num_choices=2,
        frequency_penalty=0.1, presence_penalty=0.2, logit_bias={1: 2.0}, timeout=60, extra_body={"min_p": 0.1},
    )  # fmt: skip
    params = fake.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed) == (0.5, 0.9, 7, 9, 3)
    assert (params.stop, params.frequency_penalty, params.presence_penalty) == (("x",), 0.1, 0.2)
    assert (dict(params.logit_bias), params.deadline_s, params.min_p) == ({1: 2.0}, 60, 0.1)
    assert len(fake.requests) == 2


def test_a_schema_holds_the_answer(llm):
    schema = ResponseSchema(
        name="animal",
        json_schema=JSONSchema(type="object", properties={"legs": JSONSchema(enum=[2, 4])}, required=["legs"]),
    )
    output = ask(llm, "A dog", response_schema=schema, temperature=0.0, max_tokens=60)
    assert json.loads(output.completion)["legs"] in (2, 4)


def test_logprobs_are_told(llm):
    output = ask(llm, "What is the capital of France?", logprobs=True, top_logprobs=2, temperature=0.0, max_tokens=2)
    first = output.choices[0].logprobs.content[0]
    assert first.token == "Paris"
    assert len(first.top_logprobs) == 2


def test_a_history_with_thinking_and_an_error_of_a_tool_is_read():
    fake = FakeLLM()
    history = [
        ChatMessageUser(content="Add 3"),
        ChatMessageAssistant(
            content=[ContentReasoning(reasoning="hm"), ContentText(text="I call.")],
            tool_calls=[ToolCall(id="1", function="add", arguments={"a": 3})],
        ),
        ChatMessageTool(content="", tool_call_id="1", error={"type": "timeout", "message": "too slow"}),
        ChatMessageUser(content="And now?"),
    ]
    ask(fake, history, [ADD])
    prompt = fake.requests[0].prompt
    assert all(part in prompt for part in ("I call.", "Error: too slow", "And now?"))


def test_a_prompt_that_is_too_long_is_told_by_the_stop_reason():
    output = ask(FakeLLM(n_ctx=64), "word " * 200)
    assert output.stop_reason == "model_length"
    assert "n_ctx allows 1 to 64" in output.completion


def test_what_cannot_be_done_is_an_error_of_its_request():
    assert isinstance(ask(FakeLLM(), temperature=-1.0), SamplingError)
    assert "broken" in str(ask(FakeLLM(answers=lambda _: ValueError("broken"))))
    picture = ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AAAA")])
    with pytest.raises(PromptError, match="'image'"):
        ask(FakeLLM(), [picture])


def test_wrong_options_are_refused_and_a_closed_model_says_so():
    with pytest.raises(ConfigError, match="n_slot"):
        get_model("llamabatch/tiny", n_slot=4, memoize=False)
    model = get_model("llamabatch/tiny", memoize=False)
    n_tokens = asyncio.run(model.api.count_text_tokens("Hello there"))
    assert n_tokens == len(model.api._shared.llm.tokenize("Hello there"))
    model.api.close()
    with pytest.raises(EngineClosedError):
        asyncio.run(model.api.tokenize("a"))
