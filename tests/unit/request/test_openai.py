"""Results as OpenAI's dictionaries."""

import pytest

from llamabatch.errors import PromptError
from llamabatch.request.logprobs import Logprob
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput, chat_logprob
from llamabatch.request.request import Request

LOGPROBS = (
    {5: Logprob(-0.1, 1, "Pa"), 7: Logprob(-2.5, 2, "Lo")},
    {9: Logprob(-3.0, 3, "ris"), 5: Logprob(-0.2, 1, "Pa"), 7: Logprob(-1.5, 2, "é")},
)
COMPLETION = CompletionOutput(0, "Paris", (5, 9), FinishReason.STOP, 2, LOGPROBS, -3.1)
OUTPUT = RequestOutput(
    *("request-1", "France?", (1, 2, 3), (COMPLETION, CompletionOutput(1, "x", (4,), FinishReason.LENGTH))),
    num_cached_tokens=2,
)


def test_a_completion():
    made = OUTPUT.to_openai(model="tiny")
    assert (made["object"], made["model"]) == ("text_completion", "tiny")
    assert [(c["index"], c["text"], c["finish_reason"]) for c in made["choices"]] == [
        (0, "Paris", "stop"), (1, "x", "length"),
    ]  # fmt: skip
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert made["usage"] == usage
    assert made["choices"][0]["logprobs"] == {
        "tokens": ["Pa", "ris"],
        "token_logprobs": [-0.1, -3.0],
        "top_logprobs": [{"Pa": -0.1, "Lo": -2.5}, {"ris": -3.0, "Pa": -0.2, "é": -1.5}],
        "text_offset": [0, 2],
    }
    assert made["choices"][1]["logprobs"] is None
    assert "error" not in made


def test_a_chat_completion():
    made = OUTPUT.to_openai(chat=True)
    assert made["object"] == "chat.completion"
    assert made["choices"][0]["message"] == {"role": "assistant", "content": "Paris"}
    first, second = made["choices"][0]["logprobs"]["content"]
    assert first["token"] == "Pa"
    assert [t["token"] for t in first["top_logprobs"]] == ["Pa", "Lo"]
    assert second["token"] == "ris"
    assert [t["token"] for t in second["top_logprobs"]] == ["Pa", "é", "ris"]
    assert second["top_logprobs"][1]["bytes"] == [0xC3, 0xA9]


def test_a_token_that_is_not_among_the_likeliest_is_not_listed_there():
    rare = ({9: Logprob(-9.0, 77, "x"), 5: Logprob(-0.2, 1, "Pa")},)
    completion = CompletionOutput(0, "x", (9,), FinishReason.STOP, 2, rare, -9.0)
    made = RequestOutput("r", None, (1,), (completion,)).to_openai(chat=True)
    [token] = made["choices"][0]["logprobs"]["content"]
    assert (token["token"], [t["token"] for t in token["top_logprobs"]]) == ("x", ["Pa"])


def test_tokens_asked_for_by_id_are_listed_whatever_their_rank():
    told = ({9: Logprob(-3.0, 30, "ris"), 7: Logprob(-9.0, 900, "é"), 5: Logprob(-0.2, 1, "Pa")},)
    completion = CompletionOutput(0, "ris", (9,), FinishReason.LENGTH, None, told)
    made = RequestOutput("r", None, (1,), (completion,)).to_openai(chat=True)
    [content] = made["choices"][0]["logprobs"]["content"]
    assert content["token"] == "ris"
    assert [each["token"] for each in content["top_logprobs"]] == ["Pa", "é"]


def test_a_failure_keeps_its_reason():
    made = RequestOutput.failed(Request("r", (1,)), "too long").to_openai()
    assert made["choices"][0]["finish_reason"] == "error"
    assert made["error"] == {"message": "too long", "type": "server_error"}
    refused = RequestOutput.failed(Request("r", (1,)), PromptError("too long")).to_openai()
    assert refused["error"] == {"message": "too long", "type": "invalid_request_error"}


@pytest.mark.parametrize("chat", [False, True])
def test_pieces_of_a_stream(chat):
    piece = SequenceOutput("r", (5,), "Pa", None, 1).to_openai(chat=chat)["choices"][0]
    assert piece["index"] == 1
    assert piece["finish_reason"] is None
    assert (piece["delta"]["content"] if chat else piece["text"]) == "Pa"
    told = SequenceOutput("r", (5,), "Pa", None, 1, logprobs=({5: Logprob(-0.2, 1, "Pa")},)).to_openai(chat=chat)
    assert told["choices"][0]["logprobs"]["content"] if chat else told["choices"][0]["logprobs"]["tokens"]
    last = SequenceOutput("r", (9,), "ris", OUTPUT, 1).to_openai(chat=chat)["choices"][0]
    assert last["finish_reason"] == "length"


def test_bytes_of_a_part_of_a_character_are_not_those_of_its_replacement():
    pieces = {5: b"\xe6\x97", 6: b"\xa5", 7: "\N{REPLACEMENT CHARACTER}".encode(), 8: b"a"}
    given = tuple({i: Logprob(-0.1, 1, piece.decode(errors="replace"))} for i, piece in pieces.items())
    known, unknown = [chat_logprob(each, pieces.__getitem__) for each in given], [chat_logprob(each) for each in given]
    assert [bytes(each["bytes"]) for each in known] == list(pieces.values())
    assert [each["bytes"] for each in unknown] == [None, None, None, [97]]
    assert known[0]["top_logprobs"][0]["bytes"] == [0xE6, 0x97]


def test_offsets_behind_a_character_of_several_tokens():
    names = ["a", *["\ufffd"] * 3, " b", "c"]
    logprobs = tuple({i: Logprob(-0.1, 1, name)} for i, name in enumerate(names))
    completion = CompletionOutput(0, "a日 bc", tuple(range(6)), FinishReason.STOP, None, logprobs)
    [choice] = RequestOutput("r", None, (1,), (completion,)).to_openai()["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2, 4]
