"""The endpoints of the server with real models: the bundled model, and tiny encoders."""

import base64

import numpy as np
import pytest
from starlette.testclient import TestClient

from llamabatch import LLM
from llamabatch.server import app
from llamabatch.server.openapi import OPERATIONS
from tests.model.encoder_files import QUERY, TEXTS, write_encoder
from tests.unit.server.test_application import ready

GENERATED = [
    (path, name, body)
    for path, operation in OPERATIONS.items()
    for name, body in operation.examples.items()
    if path
    in (
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/messages/count_tokens",
        "/v1/completions",
        "/v1/embeddings",
        "/apply-template",
    )
    or path.endswith("tokenize")
]


@pytest.fixture(scope="module")
def tiny():
    with TestClient(app("tiny", n_slots=4), raise_server_exceptions=False) as client:
        yield ready(client)


@pytest.mark.parametrize(("path", "name", "body"), GENERATED, ids=[f"{path} {name}" for path, name, _ in GENERATED])
def test_every_example_of_the_document_works(tiny, path, name, body):
    response = tiny.post(path, json=body)
    assert response.status_code == 200, response.text
    assert '"error":{' not in response.text.replace(" ", "")


def test_a_form_that_costs_too_much_is_the_callers_fault(tiny):
    grammar = "root ::= " + " | ".join(f'"{i}"' for i in range(4_000))
    answer = tiny.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "grammar": grammar})
    assert answer.status_code == 400, answer.text
    assert "structured_outputs cannot be followed any further" in answer.json()["error"]["message"]


def test_vectors_are_those_of_the_library(tiny):
    texts = ["Once upon a time", "a fox"]
    with LLM("tiny", n_slots=4) as llm:
        wanted = llm.embed(texts, normalize=True)
        ids = [llm.tokenize(text) for text in texts]
    plain = tiny.post("/v1/embeddings", json={"input": texts}).json()
    coded = tiny.post("/v1/embeddings", json={"input": ids, "encoding_format": "base64"}).json()
    assert plain["usage"] == coded["usage"] == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}
    for one, other, vector in zip(plain["data"], coded["data"], wanted, strict=True):
        assert np.abs(np.array(one["embedding"]) - vector).max() < 1e-5
        assert np.abs(np.frombuffer(base64.b64decode(other["embedding"]), "<f4") - vector).max() < 1e-5


def test_a_text_without_tokens_has_no_vector(tiny):
    for given, which in (("", r"input[0]"), (["a", ""], "input[1]")):
        response = tiny.post("/v1/embeddings", json={"input": given})
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(f"{which} is empty")


def test_the_facts_of_the_model(tiny):
    [card] = tiny.get("/v1/models").json()["data"]
    facts = card["meta"]
    assert card["id"] == "tiny"
    assert facts["size"] > 10**6
    assert facts["n_params"] > 10**6
    assert facts["n_ctx_train"] >= facts["n_ctx"] == card["max_model_len"]
    assert facts["n_vocab"] > max(tiny.post("/tokenize", json={"content": "Once upon a time"}).json()["tokens"])
    assert facts["vocab_type"] == 2


def test_tokens_come_back_as_text(tiny):
    text = "Once upon a time ä 😀"
    made = tiny.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    ids = [each["id"] for each in made]
    assert tiny.post("/detokenize", json={"tokens": ids}).json()["content"] == text
    data = [each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"]) for each in made]
    assert b"".join(data).decode() == text
    info = tiny.get("/tokenizer_info").json()
    assert info["eos_token"]
    [eos] = tiny.post("/tokenize", json={"content": info["eos_token"]}).json()["tokens"]
    assert eos in info["eos_token_ids"]


def test_ranks_are_those_of_the_library(tmp_path):
    path = write_encoder("bert-rank", tmp_path / "ranker.gguf")
    documents = list(TEXTS)
    with LLM(path) as llm:
        wanted = llm.rerank(QUERY, documents, 3)
    with TestClient(app(path, isolate=False), raise_server_exceptions=False) as client:
        found = ready(client).post("/v1/rerank", json={"query": QUERY, "documents": documents, "top_n": 3}).json()
        scored = client.post("/v1/score", json={"text_1": QUERY, "text_2": documents}).json()["data"]
        refused = client.post("/v1/completions", json={"prompt": "a"})
    assert [(each["index"], each["document"]["text"]) for each in found["results"]] == [
        (each.index, each.document) for each in wanted
    ]
    for each, one in zip(found["results"], wanted, strict=True):
        assert each["relevance_score"] == pytest.approx(one.relevance_score, abs=1e-5)
        assert scored[each["index"]]["score"] == pytest.approx(one.relevance_score, abs=1e-5)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "model_not_supported")


def test_classes_are_those_of_the_library(tmp_path):
    path = write_encoder("bert-classes", tmp_path / "classes.gguf")
    with LLM(path) as llm:
        wanted = llm.classify(list(TEXTS))
    with TestClient(app(path, isolate=False), raise_server_exceptions=False) as client:
        found = ready(client).post("/v1/classify", json={"input": list(TEXTS)}).json()["data"]
    for each, one in zip(found, wanted, strict=True):
        assert each["label"] == one.label
        assert each["probs"] == pytest.approx(list(one.probs.values()), abs=1e-5)
