"""null in a body: as if the field were not there, in every dialect."""

import json

import pytest

pytest.importorskip("starlette")

from llamabatch.server.anthropic.messages_body import MESSAGES, read_messages
from llamabatch.server.batches.check import check_lines
from llamabatch.server.llama_server.completion_body import COMPLETION as LLAMA_COMPLETION
from llamabatch.server.llama_server.completion_body import INFILL, read_infill, read_llama_completion
from llamabatch.server.llama_server.embedding import EMBEDDING as LLAMA_EMBEDDING
from llamabatch.server.llama_server.embedding import read_llama_embedding
from llamabatch.server.openai.completion_body import COMPLETION, read_completion
from llamabatch.server.openai.embeddings import EMBEDDING, read_embedding
from llamabatch.server.openai.responses_body import RESPONSES, read_responses
from llamabatch.server.request.body import Rules
from llamabatch.server.request.chat_body import CHAT, read_chat
from llamabatch.server.vllm.rerank import CLASSIFY, RERANK, SCORE, read_classify, read_rerank, read_score
from llamabatch.server.vllm.tokenize import DETOKENIZE, TOKENIZE, read_detokenize, read_tokenize

MESSAGE = [{"role": "user", "content": "a"}]
BODIES = [
    (read_chat, CHAT, {"messages": MESSAGE}),
    (read_completion, COMPLETION, {"prompt": "a"}),
    (read_responses, RESPONSES, {"input": "a"}),
    (read_messages, MESSAGES, {"messages": MESSAGE, "max_tokens": 4}),
    (read_llama_completion, LLAMA_COMPLETION, {"prompt": "a"}),
    (read_infill, INFILL, {"input_prefix": "a", "input_suffix": "b"}),
    (read_embedding, EMBEDDING, {"input": "a"}),
    (read_llama_embedding, LLAMA_EMBEDDING, {"content": "a"}),
    (read_rerank, RERANK, {"query": "a", "documents": ["b"]}),
    (read_score, SCORE, {"text_1": "a", "text_2": "b"}),
    (read_classify, CLASSIFY, {"input": "a"}),
    (read_tokenize, TOKENIZE, {"content": "a"}),
    (read_detokenize, DETOKENIZE, {"tokens": [1]}),
]


@pytest.mark.parametrize(("read", "fields", "body"), BODIES, ids=lambda each: getattr(each, "__name__", ""))
def test_a_field_that_is_null_is_missing(read, fields, body):
    for strict in (True, False):
        rules = Rules(strict=strict)
        for name in (*fields, "a_field_of_another_service"):
            if name not in body:
                assert read({**body, name: None}, rules) == read(body, rules), name
        assert read({**dict.fromkeys((*fields, "another")), **body}, rules) == read(body, rules)


def test_a_field_that_is_null_is_missing_in_a_line_of_a_batch(tmp_path):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "n": None}, "x": None}
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(line) + "\n" + json.dumps({**line, "custom_id": None}) + "\n")
    [error] = check_lines(path, "/v1/completions").errors
    assert (error["line"], error["message"]) == (2, "the line has no custom_id")
