"""Any JSON in any known field is read, or refused with a 400. A field that is null counts as missing."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch.server.anthropic.messages_body import MESSAGES, read_messages
from llamabatch.server.batches.check import check_lines
from llamabatch.server.http.errors import ApiError
from llamabatch.server.llama_server import completion_body as llama
from llamabatch.server.llama_server import embedding as llama_embedding
from llamabatch.server.openai.completion_body import COMPLETION, read_completion
from llamabatch.server.openai.embeddings import EMBEDDING, read_embedding
from llamabatch.server.openai.responses_body import RESPONSES, read_responses
from llamabatch.server.request.body import Rules
from llamabatch.server.request.chat_body import CHAT, read_chat
from llamabatch.server.request.json_body import read_json
from llamabatch.server.vllm.rerank import CLASSIFY, RERANK, SCORE, read_classify, read_rerank, read_score
from llamabatch.server.vllm.tokenize import DETOKENIZE, TOKENIZE, read_detokenize, read_tokenize

READERS = {
    "chat": (read_chat, CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    "completion": (read_completion, COMPLETION, {"prompt": "a"}),
    "messages": (read_messages, MESSAGES, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
    "llama_completion": (llama.read_llama_completion, llama.COMPLETION, {"prompt": "a"}),
    "infill": (llama.read_infill, llama.INFILL, {"input_prefix": "a", "input_suffix": "b"}),
    "embedding": (read_embedding, EMBEDDING, {"input": "a"}),
    "rerank": (read_rerank, RERANK, {"query": "a", "documents": ["b"]}),
    "score": (read_score, SCORE, {"text_1": "a", "text_2": "b"}),
    "classify": (read_classify, CLASSIFY, {"input": "a"}),
    "responses": (read_responses, RESPONSES, {"input": "a"}),
    "llama_embedding": (llama_embedding.read_llama_embedding, llama_embedding.EMBEDDING, {"content": "a"}),
    "tokenize": (read_tokenize, TOKENIZE, {}),
    "detokenize": (read_detokenize, DETOKENIZE, {"tokens": [1]}),
}
KINDS = ["auto", "required", "text", "type", "json_schema", "function"]
WORDS = st.sampled_from(["", "a", *KINDS, "name", "role", "content", "{", "\0", "ä😀"])
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**63, 2**64, -(2**64), 10**38]),
    st.floats(allow_nan=False, allow_infinity=False),
    WORDS,
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4))


def refusal(read, body):
    try:
        read(body, Rules(trust_templates=True))
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60)
@given(data=st.data())
def test_a_body_is_read_or_refused(name, data):
    read, fields, usual = READERS[name]
    given_fields = data.draw(st.dictionaries(st.sampled_from(sorted(fields)), VALUES, max_size=6))
    body = read_json(json.dumps(usual | given_fields).encode())
    error = refusal(read, body)
    if error is not None:
        assert error.status == 400, error.message
        assert len(error.message) < 2000
        error.response()


@pytest.mark.parametrize("name", READERS)
def test_each_field_takes_each_kind_of_value(name):
    read, fields, usual = READERS[name]
    values = [0, -1, 1.5, 10**38, True, "a", "", [], [1], ["a"], [[]], [{}], {}, {"a": 1}, {"type": "function"}, [None]]
    for field in fields:
        for value in values:
            error = refusal(read, usual | {field: value})
            assert error is None or error.status == 400, (field, value, error.message)


@pytest.mark.parametrize("name", READERS)
def test_a_field_that_is_null_is_missing(name):
    read, fields, usual = READERS[name]
    usual = usual or {"content": "a"}
    for strict in (True, False):
        rules = Rules(strict=strict)
        for field in (*fields, "a_field_of_another_service"):
            if field not in usual:
                assert read({**usual, field: None}, rules) == read(usual, rules), field
        assert read({**dict.fromkeys((*fields, "another")), **usual}, rules) == read(usual, rules)


def test_a_field_that_is_null_is_missing_in_a_line_of_a_batch(tmp_path):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "n": None}, "x": None}
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(line) + "\n" + json.dumps({**line, "custom_id": None}) + "\n")
    [error] = check_lines(path, "/v1/completions").errors
    assert (error["line"], error["message"]) == (2, "the line has no custom_id")
