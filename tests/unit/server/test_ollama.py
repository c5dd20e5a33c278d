"""ollama's endpoints with a fake engine: bodies become chats, and answers are documents or lines."""

import json

import pytest

from llamabatch.request.logprobs import Logprob
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput, chat_logprob
from llamabatch.request.tool_calls import ToolCall
from llamabatch.server.http.errors import ApiError
from llamabatch.server.ollama.answer import Lines, Writer, answer
from llamabatch.server.ollama.body import EmptyBody, RawBody, read_generate, read_ollama_chat
from llamabatch.server.ollama.dialect import moment
from llamabatch.server.request.body import Rules
from tests.unit.server.serving_clients import ready_client

HELLO = [{"role": "user", "content": "one two three"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}}


def chat(rules=None, **fields):
    return read_ollama_chat({"model": "m", "messages": HELLO, **fields}, rules or Rules())


@pytest.fixture(scope="module")
def client():
    with ready_client("one two three", server={"served_model_names": ("tiny",)}, n_ctx=64) as client:
        yield client


def test_options_are_fields_of_a_request_by_ollamas_names():
    options = {"num_predict": 5, "num_keep": 3, "repeat_last_n": 32, "repeat_penalty": 1.2, "stop": ["x"], "seed": 7}
    body = chat(options=options | {"min_p": 0.1, "tfs_z": 1, "temperature": 0.5, "mirostat": None})
    params = body.params
    assert (params.max_tokens, params.n_keep, params.repeat_last_n, params.seed) == (5, 3, 32, 7)
    assert (params.repetition_penalty, params.min_p, params.stop_strings, params.temperature) == (1.2, 0.1, ("x",), 0.5)
    assert (body.stream, body.ping_s, body.ignored) == (True, 0.0, ())
    assert {chat(options={"num_predict": number}).params.max_tokens for number in (-1, -2)} == {None}
    body = chat(options={"num_ctx": 8192, "num_gpu": 1, "unheard_of": 1, "n": 2}, keep_alive="5m", strange=1)
    assert set(body.ignored) == {"strange", *(f"options.{name}" for name in ("num_ctx", "num_gpu", "unheard_of", "n"))}
    assert [chat(keep_alive=each).ignored for each in ("soon", -1, None)] == [("keep_alive",), (), ()]
    with pytest.raises(ApiError, match="num_ctx"):
        chat(Rules(strict=True), options={"num_ctx": 8192})


def test_forms_logprobs_and_thinking():
    assert chat(format="json").params.structure is not None
    assert chat(format={"type": "object"}).params.structure is not None
    assert chat(format="").params.structure is None
    assert chat(logprobs=True, top_logprobs=2).params.logprobs == 2
    assert [chat(truncate=each).params.overflow for each in (True, None, False)] == ["truncate"] * 2 + ["refuse"]
    thinks = Rules(variables=frozenset({"enable_thinking", "reasoning_effort"}))
    assert chat(thinks, think=True).options.kwargs == {"enable_thinking": True}
    body = chat(thinks, think=False)
    assert (dict(body.options.kwargs), body.include_reasoning) == ({"enable_thinking": False}, False)
    assert chat(thinks, think="high").options.kwargs == {"reasoning_effort": "high"}
    silent = Rules(variables=frozenset({"messages"}), thinks=False)
    assert (chat(silent, think=True).ignored, chat(silent, think=False).ignored) == (("think",), ())


def test_images_of_the_history_are_texts_for_a_model_that_reads_text_alone():
    history = [{"role": "user", "content": "x", "images": ["aGk="]}, {"role": "assistant", "content": "y"}]
    body = chat(messages=[*history, *HELLO])
    assert body.ignored == ("messages[0].images[0]:image",)
    assert body.conversation[0]["content"] == "[image: not shown, as this model reads text alone]\nx"


def test_calls_and_their_results_get_ids():
    calls = [{"function": {"name": name, "arguments": {"x": name}}} for name in ("f", "g")]
    body = chat(
        messages=[
            *HELLO,
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
            {"role": "tool", "content": "of g", "tool_name": "g"},
            {"role": "tool", "content": "of f"},
            {"role": "assistant", "tool_calls": calls[:1]},
            {"role": "tool", "content": "again"},
        ],
        tools=[TOOL],
    )
    _, first, of_g, of_f, second, again = body.conversation
    assert [call["id"] for call in first["tool_calls"]] == ["call_0", "call_1"]
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": "f"}'}
    assert first["reasoning_content"] == "hm"
    assert (of_g["tool_call_id"], of_f["tool_call_id"]) == ("call_1", "call_0")
    assert second["tool_calls"][0]["id"] == again["tool_call_id"] == "call_2"


@pytest.mark.parametrize(
    ("read", "fields", "word"),
    [
        (read_ollama_chat, {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
        (read_ollama_chat, {"messages": "x"}, "messages"),
        (read_ollama_chat, {"messages": ["x"]}, "messages[0]"),
        (read_ollama_chat, {"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}, "tool_calls[0]"),
        (read_ollama_chat, {"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls"),
        (read_ollama_chat, {"messages": HELLO, "format": "xml"}, "format"),
        (read_ollama_chat, {"messages": HELLO, "options": []}, "options"),
        (read_ollama_chat, {"messages": HELLO, "options": {"tfs_z": 0.5}}, "tfs_z"),
        (read_ollama_chat, {"messages": HELLO, "think": "much"}, "think"),
        (read_ollama_chat, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        (read_generate, {"prompt": "x", "images": ["aGk="]}, "images"),
        (read_generate, {"prompt": "x", "context": "1"}, "context"),
        (read_generate, {"prompt": "x", "context": [1, -2]}, "context"),
        (read_generate, {"prompt": "x", "context": [1], "raw": True}, "context"),
        (read_generate, {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        (read_generate, {"prompt": "x", "suffix": "y", "raw": True}, "suffix"),
        (read_generate, {"prompt": "x", "raw": True, "system": "y"}, "system"),
        (read_generate, {"prompt": 5}, "prompt"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(read, fields, word):
    with pytest.raises(ApiError) as caught:
        read(fields)
    assert caught.value.status == 400
    assert word in caught.value.message


def test_a_prompt_is_a_message_or_with_raw_a_text():
    body = read_generate({"prompt": "Hi", "system": "Be short."})
    assert [message["role"] for message in body.conversation] == ["system", "user"]
    body = read_generate({"prompt": "Hi", "raw": True, "logprobs": True, "options": {"num_predict": 0}, "think": True})
    assert isinstance(body, RawBody)
    assert (body.prompt, body.no_output, body.params.logprobs, body.ignored) == ("Hi", True, 0, ("think",))
    empty = read_generate({"model": "m", "keep_alive": 0})
    assert isinstance(empty, EmptyBody)
    assert (empty.model, empty.unload) == ("m", True)


def test_the_context_of_an_answer_is_the_beginning_of_the_next_prompt(client):
    def said(**fields):
        found = client.post("/api/generate", json={"model": "tiny", "prompt": "Hi", **fields})
        assert found.status_code == 200, found.text
        return [json.loads(line) for line in found.text.splitlines()]

    [first] = said(stream=False)
    model = client.app.state.serving.model
    assert model.detokenize(first["context"]).endswith("one two three")
    assert first["context"][0] == model.special_ids["bos"]
    *pieces, second = said(context=first["context"])
    assert not any("context" in piece for piece in pieces)
    assert second["context"][: len(first["context"])] == first["context"]
    assert second["context"].count(model.special_ids["bos"]) == 1
    assert second["prompt_eval_count"] > len(first["context"])
    [raw] = said(raw=True, stream=False)
    assert "context" not in raw
    late = client.post("/api/generate", json={"prompt": "Hi", "context": [10**6]})
    assert (late.status_code, "10" in late.json()["error"]) == (400, True)


def test_a_suffix_is_the_end_of_a_gap(client):
    body = {"prompt": "ab", "suffix": "yz", "system": "s", "stream": False}
    refused = client.post("/api/generate", json=body)
    assert refused.status_code == 400
    assert "suffix" in refused.json()["error"]
    assert "fim_mid" in refused.json()["error"]
    model = client.app.state.serving.model
    marks, bos = {"fim_pre": 4, "fim_suf": 5, "fim_mid": 6}, model.special_ids["bos"]
    before = model.special_ids
    model.special_ids = {**before, **marks}
    try:
        answered = client.post("/api/generate", json=body)
        assert answered.headers["X-Llamabatch-Ignored"] == "system"
        found = answered.json()
        assert found["response"] == "one two three"
        ab, yz = (model.tokenize(text, add_special=False) for text in ("ab", "yz"))
        assert found["context"][: found["prompt_eval_count"]] == [bos, 4, *ab, 5, *yz, 6]
        assert "insert" in client.post("/api/show", json={"model": "tiny"}).json()["capabilities"]
    finally:
        model.special_ids = before


CALL = ToolCall("call_7", "f", '{"x": 1}')


def output(text="Hello", **fields):
    whole = CompletionOutput(0, text, (1, 2), FinishReason.STOP, None, **fields)
    return RequestOutput("r", None, (5, 6, 7), (whole,))


def test_documents_and_lines_of_a_chat_with_thinking_and_calls():
    finished = output(reasoning="hm", tool_calls=(CALL,))
    writer = Writer("m", is_chat=True)
    whole = answer(writer, [finished])
    call = {"id": "call_7", "function": {"index": 0, "name": "f", "arguments": {"x": 1}}}
    assert whole["message"] == {"role": "assistant", "content": "Hello", "thinking": "hm", "tool_calls": [call]}
    assert (whole["done"], whole["done_reason"]) == (True, "stop")
    assert (whole["prompt_eval_count"], whole["eval_count"]) == (3, 2)
    lines = Lines(writer)
    data = lines.feed([SequenceOutput("r", (1,), "", reasoning="hm"), SequenceOutput("r", (), "Hel")])
    data += lines.feed([SequenceOutput("r", (2,), "lo", finished=finished)]) + b"".join(lines.end())
    found = [json.loads(line) for line in data.decode().splitlines()]
    assert "".join(line["message"]["content"] for line in found) == "Hello"
    assert [line["message"].get("thinking") for line in found] == ["hm", None, None, None, None]
    assert [line["message"].get("tool_calls") for line in found][-2:] == [[call], None]
    assert [line["done"] for line in found] == [False] * 4 + [True]
    assert found[-1].keys() >= {"done_reason", "eval_count", "eval_duration", "total_duration"}
    hidden = answer(Writer("m", is_chat=False, shows_thinking=False), [finished])
    assert (hidden["response"], "thinking" in hidden, "message" in hidden) == ("Hello", False, False)
    assert json.loads(lines.error(ApiError(503, "gone"))) == {"error": "gone"}
    assert moment(0) == "1970-01-01T00:00:00.000000Z"


def test_a_chat_over_http_whole_and_in_lines(client):
    asked = {"model": "tiny:latest", "messages": HELLO}
    answered = client.post("/api/chat", json=asked)
    assert answered.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answered.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "one two three"
    assert {line["model"] for line in lines} == {"tiny:latest"}
    whole = client.post("/api/chat", json=asked | {"stream": False, "strange": 1})
    assert whole.json()["message"]["content"] == "one two three"
    assert whole.headers["X-Llamabatch-Ignored"] == "strange"
    said = client.post("/api/generate", json={"model": "tiny", "prompt": "Hi", "stream": False}).json()
    assert (said["response"], said["done_reason"]) == ("one two three", "stop")
    loaded = client.post("/api/generate", json={"model": "tiny"}).json()
    assert (loaded["response"], loaded["done"], loaded["done_reason"]) == ("", True, "load")
    nothing = client.post(
        "/api/chat", json={"model": "tiny", "messages": HELLO, "options": {"num_predict": 0}, "stream": False}
    ).json()
    assert (nothing["message"]["content"], nothing["done_reason"], nothing["eval_count"]) == ("", "length", 0)


def test_errors_have_ollamas_shape(client):
    missing = client.post("/api/chat", json={"model": "other", "messages": HELLO})
    assert missing.status_code == 404
    assert "other" in missing.json()["error"]
    assert isinstance(client.post("/api/chat", json={"messages": 5}).json()["error"], str)
    assert isinstance(client.post("/api/chat", content=b"{").json()["error"], str)
    assert isinstance(client.get("/api/chat").json()["error"], str)
    assert isinstance(client.get("/v1/chat/completions").json()["error"], dict)


def test_the_model_is_listed_and_shown(client):
    [listed] = client.get("/api/tags").json()["models"]
    assert (listed["name"], listed["model"]) == ("tiny", "tiny")
    assert len(listed["digest"]) == 64
    [running] = client.get("/api/ps").json()["models"]
    assert running["context_length"] == 64
    shown = client.post("/api/show", json={"model": "tiny:latest"}).json()
    assert "completion" in shown["capabilities"]
    assert "general.parameter_count" in shown["model_info"]
    assert client.post("/api/show", json={"name": "other"}).status_code == 404
    assert client.post("/api/show", json={}).status_code == 400
    assert client.get("/api/version").json()["version"].count(".") == 2


def test_a_sampled_token_behind_the_likeliest_is_no_top_logprob():
    likeliest = {1: Logprob(-0.5, 1, "a"), 2: Logprob(-1.0, 2, "b")}
    given = {3: Logprob(-2.0, 3, "c")} | likeliest
    for most, shown in ((2, ["a", "b"]), (3, ["a", "b", "c"]), (-1, ["a", "b", "c"]), (0, [])):
        assert [each["token"] for each in chat_logprob(given, most=most)["top_logprobs"]] == shown


def test_another_name_of_several_answers_is_ignored_as_n_is():
    body = read_generate({"prompt": "x", "raw": True, "options": {"num_return_sequences": 2, "n": 2}})
    assert (body.params.n, body.ignored) == (1, ("options.num_return_sequences", "options.n"))


def test_an_answer_goes_on_with_its_beginning():
    begun = [*HELLO, {"role": "assistant", "content": "The answer"}]
    assert chat(messages=begun).options.continue_final_message
    assert not chat().options.continue_final_message


def test_errors_have_ollamas_names():
    with pytest.raises(ApiError, match=r"^options\.num_predict is 'x'"):
        chat(options={"num_predict": "x"})
