"""Tests /v1/responses with OpenAI's client and /v1/messages with Anthropic's. The clients validate answers strictly."""

from __future__ import annotations

import anthropic
import openai
import pytest

from llamabatch import LLM
from tests.server.conftest import running

HELLO = "Tell me about the fox."
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# a chat template that opens the thinking, like Qwen3's
THINKS = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is not defined or enable_thinking %}<think>"
    "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def plain():
    with LLM("tiny", n_slots=8) as llm:
        yield llm.chat([[{"role": "user", "content": HELLO}]], {"temperature": 0, "max_tokens": 24})[0].text


@pytest.fixture(scope="module")
def responses(url):
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    ) as made:
        yield made.responses


@pytest.fixture(scope="module")
def messages(url):
    with anthropic.Anthropic(
        base_url=url, api_key="none", max_retries=0, timeout=60, _strict_response_validation=True
    ) as made:
        yield made.messages


# --- /v1/responses ----------------------------------------------------------------------------------------------------


def test_a_response_whole_and_streamed(responses, plain):
    asked = {"model": "tiny", "input": HELLO, "temperature": 0, "max_output_tokens": 24}
    whole = responses.create(**asked)
    assert whole.output_text == plain
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with responses.stream(**asked) as stream:
        events = list(stream)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    assert events[-1].response.output_text == plain


def test_a_loop_of_tools_by_responses(responses):
    tools = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}]
    items = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = responses.create(model="tiny", input=items, tools=tools, tool_choice="required")
    [call] = [item for item in first.output if item.type == "function_call"]
    with responses.stream(
        model="tiny", input=items, tools=tools, tool_choice={"type": "function", "name": "weather"}
    ) as stream:
        [streamed] = [item for item in stream.get_final_response().output if item.type == "function_call"]
    assert streamed.name == call.name == "weather"
    items += [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    last = responses.create(model="tiny", input=items, tools=tools, max_output_tokens=24)
    assert last.status in ("completed", "incomplete")


def test_a_form_and_logprobs_by_responses(responses):
    form = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    asked = {"model": "tiny", "input": "Where?", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = responses.create(**asked, text={"format": form})
    assert answer.output_text in ('{"city": "Paris"}', '{"city": "Rome"}')
    logprobs = answer.output[0].content[0].logprobs
    assert len(logprobs) == answer.usage.output_tokens
    assert all(len(each.top_logprobs) == 2 for each in logprobs)


def test_what_responses_refuse(responses):
    for more in ({"previous_response_id": "resp_1"}, {"temperature": -1}, {"background": True}):
        with pytest.raises(openai.BadRequestError):
            responses.create(model="tiny", input="x", **more)


# --- /v1/messages -----------------------------------------------------------------------------------------------------


def ask(*content):
    return {"role": "user", "content": [*content] if len(content) != 1 else content[0]}


def test_a_message_whole_and_streamed(messages, plain):
    asked = {"model": "tiny", "messages": [ask(HELLO)], "max_tokens": 24, "extra_body": {"temperature": 0}}
    whole = messages.create(**asked)
    assert [block.text for block in whole.content] == [plain]
    with messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [plain]
    assert final.stop_reason == whole.stop_reason
    count = messages.count_tokens(model="tiny", messages=asked["messages"])
    assert count.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_a_loop_of_tools_by_messages(messages):
    tools = [{"name": "weather", "description": "The weather of a city.", "input_schema": CITY}]
    said = [ask("What is the weather in Paris?")]
    first = messages.create(model="tiny", messages=said, max_tokens=64, tools=tools, tool_choice={"type": "any"})
    assert first.stop_reason == "tool_use"
    [call] = [block for block in first.content if block.type == "tool_use"]
    assert call.input["city"] in ("Paris", "Rome")
    chosen = {"type": "tool", "name": "weather"}
    with messages.stream(model="tiny", messages=said, max_tokens=64, tools=tools, tool_choice=chosen) as stream:
        [streamed] = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert streamed.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    said += [{"role": "assistant", "content": first.content}, ask(result, {"type": "text", "text": "So?"})]
    last = messages.create(model="tiny", messages=said, max_tokens=24, tools=tools)
    assert last.usage.output_tokens > 0


def test_what_messages_refuse(messages):
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
    for more in ({"messages": [ask(picture, picture)]}, {"extra_body": {"temperature": -1}}):
        with pytest.raises(anthropic.BadRequestError) as caught:
            messages.create(**{"model": "tiny", "messages": [ask("x")], "max_tokens": 4, **more})
        assert caught.value.body["error"]["type"] == "invalid_request_error"


# --- both -------------------------------------------------------------------------------------------------------------


def test_thinking_by_both_and_errors_of_keys(tmp_path):
    options = {"model": "tiny", "n_slots": 4, "chat_template": THINKS, "api_keys": ["secret"]}
    with running(tmp_path, **options) as url:
        mine = anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0, _strict_response_validation=True)
        asked = {"model": "tiny", "messages": [ask(HELLO)], "max_tokens": 40}
        message = mine.messages.create(**asked, extra_body={"thinking": {"type": "enabled", "budget_tokens": 8}})
        assert message.content[0].type == "thinking"
        with mine.messages.stream(**asked, extra_body={"thinking": {"type": "enabled", "budget_tokens": 8}}) as stream:
            assert stream.get_final_message().content[0].type == "thinking"
        silent = mine.messages.create(**asked, extra_body={"thinking": {"type": "disabled"}})
        assert {block.type for block in silent.content} == {"text"}
        theirs = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", _strict_response_validation=True)
        more = {"thinking_token_budget": 8}
        response = theirs.responses.create(model="tiny", input=HELLO, max_output_tokens=40, extra_body=more)
        assert response.output[0].type == "reasoning"
        with pytest.raises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(**asked)
