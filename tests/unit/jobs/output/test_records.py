"""The record of a row, and the line that holds it."""

import json
from array import array
from dataclasses import replace

import pytest

from llamabatch.errors import ConfigError
from llamabatch.jobs.output.records import RecordOptions, has_error, number_of, record, refusal, to_line
from llamabatch.jobs.rows import BadRow, Row
from llamabatch.request.logprobs import Logprob
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, Timings
from llamabatch.request.tool_calls import ToolCall

ROW = Row(17, "a", "completion", "France?")
CHAT = Row(18, "b", "chat", ({"role": "user", "content": "France?"},), openai=True, model="gpt")
TIMES = Timings(0.25, 0.5, 1.0, (0.5, 0.75, 1.0))
PARIS = CompletionOutput(0, "Paris", (5, 9), FinishReason.STOP, 2)
OUTPUT = RequestOutput("request-123", "France?", (1, 2, 3), (PARIS,), None, TIMES, num_cached_tokens=2)
FAILED = RequestOutput("request-124", "France?", (1,), (CompletionOutput(0, "", (), FinishReason.ERROR),), "too long")


def test_a_flat_record_holds_what_was_asked_for_and_no_times():
    plain = {"row": 17, "id": "a", "text": "Paris", "finish_reason": "stop", "error": None}
    assert record(ROW, OUTPUT, RecordOptions()) == plain
    assert list(record(ROW, OUTPUT, RecordOptions())) == list(plain)
    asked = record(ROW, OUTPUT, RecordOptions(token_ids=True, times=True))
    times = {"queued_s": 0.25, "ttft_s": 0.5, "total_s": 1.0, "generation_tps": 4.0, "num_cached_tokens": 2}
    assert asked == {**plain, "token_ids": (5, 9), **times}
    assert list(asked)[-1] == "error"


def test_several_continuations_logprobs_and_cut_prompts():
    logprobs = ({5: Logprob(-0.1, 1, "Pa"), 7: Logprob(-2.5, 2, "Lo")},)
    first = CompletionOutput(0, "Pa", (5,), FinishReason.LENGTH, None, logprobs)
    second = CompletionOutput(1, "Lo", (7,), FinishReason.STOP)
    output = RequestOutput("r", "x", (1, 2), (first, second), prompt_logprobs=(None, *logprobs), num_truncated=3)
    made = record(ROW, output, RecordOptions(token_ids=True))
    logprobs = [
        [
            {"token_id": 5, "token": "Pa", "logprob": -0.1, "rank": 1},
            {"token_id": 7, "token": "Lo", "logprob": -2.5, "rank": 2},
        ]
    ]
    assert (made["text"], made["logprobs"], made["prompt_logprobs"]) == ("Pa", logprobs, [None, *logprobs])
    assert [(each["index"], each["text"], each["token_ids"]) for each in made["outputs"]] == [
        (0, "Pa", (5,)), (1, "Lo", (7,)),
    ]  # fmt: skip
    assert made["num_truncated"] == 3


def test_calls_of_tools():
    calls = (ToolCall("call_1", "weather", '{"city": "Oslo"}'),)
    written = [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]
    called = CompletionOutput(0, "", (5,), FinishReason.STOP, tool_calls=calls)
    output = RequestOutput("r", "x", (1, 2), (called,))
    made = record(ROW, output, RecordOptions())
    assert (made["tool_calls"], made["finish_reason"]) == (written, "stop")
    [choice] = record(CHAT, output, RecordOptions())["response"]["body"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": None, "tool_calls": written}
    assert choice["finish_reason"] == "tool_calls"
    assert "tool_calls" not in record(ROW, OUTPUT, RecordOptions())


def test_thinking_stands_beside_the_text():
    thought = replace(PARIS, reasoning="Let me see.")
    output = replace(OUTPUT, outputs=(thought, PARIS))
    made = record(ROW, output, RecordOptions())
    assert (made["text"], made["reasoning"]) == ("Paris", "Let me see.")
    assert ["reasoning" in each for each in made["outputs"]] == [True, False]
    choices = record(CHAT, output, RecordOptions())["response"]["body"]["choices"]
    assert [choice["message"].get("reasoning_content") for choice in choices] == ["Let me see.", None]


def test_an_embedding():
    row = Row(2, "e", "embedding", "text", openai=True)
    nothing = CompletionOutput(0, "", (), FinishReason.STOP)
    output = RequestOutput("r", "text", (1, 2), (nothing,), embedding=array("f", [0.5, -0.25]))
    assert record(row, output, RecordOptions(shape="flat"))["embedding"] == [0.5, -0.25]
    body = record(row, output, RecordOptions(model="tiny"))["response"]["body"]
    assert body["data"] == [{"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}]
    assert (body["object"], body["model"], body["usage"]) == ("list", "tiny", {"prompt_tokens": 2, "total_tokens": 2})


def test_lines_of_openai_are_answered_in_kind():
    made = record(CHAT, OUTPUT, RecordOptions(model="tiny"))
    assert (made["id"], made["custom_id"], made["error"]) == ("batch_req_18", "b", None)
    assert (made["response"]["status_code"], made["response"]["request_id"]) == (200, "req_18")
    body = made["response"]["body"]
    assert (body["id"], body["object"], body["created"], body["model"]) == ("chatcmpl-18", "chat.completion", 0, "gpt")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Paris"}
    assert body["usage"]["total_tokens"] == 5
    assert record(ROW, OUTPUT, RecordOptions(model="tiny"))["row"] == 17
    forced = record(ROW, OUTPUT, RecordOptions(shape="openai", model="tiny"))["response"]["body"]
    assert (forced["object"], forced["model"]) == ("text_completion", "tiny")
    assert record(CHAT, OUTPUT, RecordOptions(shape="flat"))["text"] == "Paris"
    timed = record(CHAT, OUTPUT, RecordOptions(times=True))["response"]["body"]
    assert timed["created"] > 1e9
    # like times, cached tokens depend on the rows that run at the same time
    assert timed["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert list(body["usage"]) == ["prompt_tokens", "completion_tokens", "total_tokens"]


def test_rows_that_failed():
    flat = record(ROW, FAILED, RecordOptions())
    assert flat == {"row": 17, "id": "a", "text": "", "finish_reason": "error", "error": "too long"}
    answer = record(CHAT, FAILED, RecordOptions())
    error = {"code": "request_failed", "message": "too long"}
    assert answer == {"id": "batch_req_18", "custom_id": "b", "response": None, "error": error}
    aborted = RequestOutput("r", "x", (1,), (CompletionOutput(0, "Pa", (5,), FinishReason.ABORT),))
    assert record(ROW, aborted, RecordOptions())["error"] == "the request was aborted"


def test_lines_that_are_no_rows_have_an_error_in_their_place():
    bad = BadRow(3, None, "line 4: it is empty")
    flat = refusal(bad, bad.error, RecordOptions())
    assert flat == {"row": 3, "id": None, "text": "", "finish_reason": "error", "error": "line 4: it is empty"}
    answer = refusal(BadRow(3, "x", "no", openai=True), "no", RecordOptions())
    assert answer["error"] == {"code": "invalid_request", "message": "no"}


@pytest.mark.parametrize(
    "made",
    [
        record(ROW, OUTPUT, RecordOptions()),
        record(ROW, OUTPUT, RecordOptions(times=True, token_ids=True)),
        record(CHAT, OUTPUT, RecordOptions()),
        record(ROW, FAILED, RecordOptions()),
        record(CHAT, FAILED, RecordOptions()),
        refusal(BadRow(17, None, 'a tail as of a good one: "error": null}'), '"error": null}', RecordOptions()),
    ],
)
def test_number_and_error_of_a_line_without_parsing_it(made):
    line = to_line(made)
    assert number_of(line) in (17, 18)
    assert has_error(line) == (made["error"] is not None)
    assert all(number_of(line[:n]) is None for n in range(len(line)))


def test_what_json_and_utf8_cannot_say():
    line = to_line({"row": 1, "id": "\ud800 é", "text": "é\u2028世", "error": None})
    assert json.loads(line)["id"] == "\ud800 é"
    assert line.count(b"\n") == 1
    assert "é\u2028世".encode() in to_line({"row": 1, "text": "é\u2028世"})
    odd = to_line({"row": 1, "logprobs": [[{"logprob": float("-inf")}], (float("nan"), 0.1)], "error": None})
    assert json.loads(odd) == {"row": 1, "logprobs": [[{"logprob": None}], [None, 0.1]], "error": None}


def test_an_unknown_shape_is_refused():
    with pytest.raises(ConfigError, match=r"shape is 'openal'; did you mean 'openai'\?"):
        RecordOptions(shape="openal")
