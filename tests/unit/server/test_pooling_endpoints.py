"""Embeddings, ranks, classes, models and tokens over HTTP."""

import base64
import json

import numpy as np
import pytest

from llamabatch.testing.fake_model import FakeModel
from tests.unit.server.serving_clients import fake_client, ready_client

ADAPTERS = {"pirate": "p.gguf", "poet": "q.gguf"}


@pytest.fixture(scope="module")
def client():
    with ready_client(adapters=ADAPTERS) as client:
        yield client


def refused(client, path, **body):
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_a_vector_for_each_text(client):
    answer = client.post("/v1/embeddings", json={"input": ["one two", "three"], "model": "any"}).json()
    assert (answer["object"], answer["model"]) == ("list", "any")
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(0, "embedding"), (1, "embedding")]
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    first = np.array(answer["data"][0]["embedding"])
    assert np.linalg.norm(first) == pytest.approx(1.0, abs=1e-6)
    [raw] = client.post("/v1/embeddings", json={"input": "one two", "embd_normalize": -1}).json()["data"]
    raw = np.array(raw["embedding"])
    assert raw / np.linalg.norm(raw) == pytest.approx(first, abs=1e-6)
    [cut] = client.post("/v1/embeddings", json={"input": "one two", "dimensions": 3}).json()["data"]
    assert np.array(cut["embedding"]) == pytest.approx(raw[:3] / np.linalg.norm(raw[:3]), abs=1e-6)


def test_inputs_in_llama_servers_forms(client):
    def vectors(*given):
        answer = client.post("/v1/embeddings", json={"input": list(given)}).json()
        return [each["embedding"] for each in answer["data"]]

    parts = {"content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}
    plain, named, joined = vectors("one two", {"prompt_string": "one two"}, parts)
    assert plain == named == joined
    ids = client.post("/tokenize", json={"content": "one two"}).json()["tokens"]
    mixed = [5, "one two", 6]
    assert vectors(mixed) == vectors([5, *ids, 6]) == vectors(*mixed)
    assert len(vectors("one", "")) == 2  # an empty text still has its first token


def test_long_texts_are_cut_where_the_body_allows_it(client, monkeypatch):
    monkeypatch.setattr(FakeModel, "longest_token", 4)
    long = "one two three four " * 1500
    assert "tokens" in refused(client, "/v1/embeddings", input=long)["message"]
    for most, kept in ((-1, None), (5, 5), (10**6, None)):
        answer = client.post("/v1/embeddings", json={"input": [long, "one"], "truncate_prompt_tokens": most}).json()
        assert len(answer["data"]) == 2
        if kept is not None:
            assert answer["usage"]["prompt_tokens"] <= 2 * kept
    tail = client.post("/v1/embeddings", json={"input": long + "end", "truncate_prompt_tokens": 3}).json()
    again = client.post("/v1/embeddings", json={"input": "else " * 50 + "end", "truncate_prompt_tokens": 3}).json()
    assert tail["usage"] == again["usage"]
    ollamas = client.post("/api/embed", json={"input": [long, "one"]}).json()
    assert len(ollamas["embeddings"]) == 2
    assert "tokens" in client.post("/api/embed", json={"input": long, "truncate": False}).json()["error"]
    assert client.post("/api/embeddings", json={"prompt": "one"}).json()["embedding"]


def test_base64_holds_the_same_floats(client):
    body = {"input": [[5, 6, 7], [8]]}
    plain = client.post("/v1/embeddings", json=body).json()["data"]
    coded = client.post("/v1/embeddings", json=body | {"encoding_format": "base64"}).json()["data"]
    for one, other in zip(plain, coded, strict=True):
        assert np.frombuffer(base64.b64decode(other["embedding"]), "<f4").tolist() == one["embedding"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 5.5]}, "input"),
        ({"input": {"content": "a"}}, "input"),
        ({"input": {"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 2**30}, "dimensions"),
        ({"input": "a", "embd_normalize": 1}, "embd_normalize"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_wrong_bodies_of_embeddings(client, body, param):
    assert refused(client, "/v1/embeddings", **body)["param"] == param


def test_documents_by_relevance(client):
    body = {"query": "fox", "documents": ["a dog", {"text": "a fox"}, "none"], "top_n": 2}
    for path in ("/v1/rerank", "/rerank", "/v1/reranking", "/v2/rerank"):
        answer = client.post(path, json=body).json()
        assert len(answer["results"]) == 2
    scores = [each["relevance_score"] for each in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0.0 <= score <= 1.0 for score in scores)
    for each in answer["results"]:
        given = body["documents"][each["index"]]
        assert each["document"] == (given if isinstance(given, dict) else {"text": given})
    assert answer["usage"]["total_tokens"] > 0
    short = client.post("/v1/rerank", json=body | {"return_documents": False}).json()["results"][0]
    assert short.keys() == {"index", "relevance_score"}


def test_texts_are_ranked_in_the_shape_of_text_embeddings_inference(client):
    body = {"query": "fox", "texts": ["a dog", "a fox"], "raw_scores": True, "return_text": True}
    answer = client.post("/rerank", json=body).json()
    assert [each.keys() for each in answer] == [{"index", "score", "text"}] * 2


def test_scores_come_in_the_order_of_the_documents(client):
    ranked = client.post("/v1/rerank", json={"query": "fox", "documents": ["a", "b"]}).json()["results"]
    scored = client.post("/v1/score", json={"text_1": "fox", "text_2": ["a", "b"]}).json()["data"]
    assert [each["score"] for each in scored] == [
        each["relevance_score"] for each in sorted(ranked, key=lambda each: each["index"])
    ]
    one, other = client.post("/v1/score", json={"text_1": ["fox", "a"], "text_2": ["a", "b"]}).json()["data"]
    assert one["score"] == scored[0]["score"]
    [alone] = client.post("/v1/score", json={"text_1": "a", "text_2": "b"}).json()["data"]
    assert other["score"] == alone["score"]
    assert refused(client, "/v1/score", text_1=["a", "b"], text_2=["c", "d", "e"])["param"] == "text_1"


def test_a_document_that_is_too_long_can_be_cut(client):
    long = "one two three four " * 1500
    body = {"query": "fox", "texts": [long, "a"]}
    assert "tokens" in refused(client, "/v1/rerank", **body)["message"]
    ranked = client.post("/v1/rerank", json=body | {"truncate": True}).json()
    assert sorted(each["index"] for each in ranked) == [0, 1]
    short = client.post("/v1/score", json={"text_1": "fox", "text_2": [long, "a"], "truncate_prompt_tokens": 6}).json()
    least = client.post("/v1/score", json={"text_1": "fox", "text_2": ["", "a"]}).json()
    assert least["usage"]["prompt_tokens"] < short["usage"]["prompt_tokens"] <= 12


def test_a_class_for_each_text(client):
    answer = client.post("/v1/classify", json={"input": ["one", "two"]}).json()
    for each in answer["data"]:
        assert sum(each["probs"]) == pytest.approx(1.0)
        assert each["label"] == each["labels"][int(np.argmax(each["probs"]))]
        assert each["num_classes"] == len(each["probs"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": "b"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [1]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query"),
        ("/v1/classify", {"input": []}, "input"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
    ],
)
def test_wrong_bodies_of_ranks_and_classes(client, path, body, param):
    assert refused(client, path, **body)["param"] == param


def test_the_model_and_its_adapters_are_listed(client):
    answer = client.get("/v1/models").json()
    base, *adapters = answer["data"]
    assert (base["id"], base["object"], base["parent"]) == ("fake", "model", None)
    assert base["max_model_len"] == base["meta"]["n_ctx"]
    assert base["meta"].keys() >= {"vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size"}
    assert [(each["id"], each["parent"]) for each in adapters] == [("pirate", "fake"), ("poet", "fake")]
    assert answer["models"][0]["capabilities"] == ["completion", "embedding", "rerank", "tools"]
    assert client.get("/v1/models/pirate").json() == adapters[0]
    missing = client.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def asked(name, **server):
    """Returns the adapters of a chat that asks for a model, or the error's code."""
    with ready_client(server=server, adapters=ADAPTERS) as client:
        response = client.post("/v1/chat/completions", json=name | {"messages": [{"role": "user", "content": "a"}]})
        if response.status_code != 200:
            return response.json()["error"]["code"]
        return dict(fake_client(client).requests[0].adapters)


def test_the_name_of_an_adapter_is_a_model():
    assert asked({"model": "pirate"}) == {"pirate": 1.0}
    assert asked({"model": "fake"}) == {}
    assert asked({"model": "gpt-4"}) == {}, "llama-server serves any name"
    assert asked({"model": "gpt-4"}, served_model_names=("mine",)) == "model_not_found"
    assert asked({"model": "pirate"}, served_model_names=("mine",)) == {"pirate": 1.0}
    assert asked({"model": "mine"}, served_model_names=("mine", "yours")) == {}
    assert asked({"lora": [{"id": 1, "scale": 0.5}]}) == {"poet": 0.5}
    assert asked({}, default_adapters={"poet": 0.3}) == {"poet": 0.3}
    assert asked({"lora": []}, default_adapters={"poet": 0.3}) == {}


def test_tokens_in_the_shape_of_either_server(client):
    there = client.post("/tokenize", json={"content": "one two"}).json()
    assert there.keys() == {"tokens"}
    with_bos = client.post("/tokenize", json={"content": "one two", "add_special": True}).json()["tokens"]
    assert with_bos[1:] == there["tokens"]
    pieces = client.post("/tokenize", json={"content": "one two", "with_pieces": True}).json()["tokens"]
    assert [each["piece"] for each in pieces] == ["one", " two"]
    mixed = client.post("/tokenize", json={"content": [7, "one two"]}).json()["tokens"]
    assert mixed == [7, *there["tokens"]]
    here = client.post("/tokenize", json={"prompt": "one two", "return_token_strs": True}).json()
    assert here == {"count": 3, "max_model_len": 4096, "tokens": with_bos, "token_strs": ["<|bos|>", "one", " two"]}
    text = client.post("/detokenize", json={"tokens": with_bos}).json()
    assert text == {"content": "<|bos|>one two", "prompt": "<|bos|>one two"}
    assert client.post("/detokenize", json={"tokens": []}).json()["content"] == ""


def test_a_conversation_as_text_and_tokens(client):
    body = {"messages": [{"role": "user", "content": "one"}]}
    text = client.post("/apply-template", json=body).json()["prompt"]
    assert text == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    counted = client.post("/tokenize", json=body).json()
    again = client.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"]
    assert counted["tokens"] == again
    short = client.post("/tokenize", json=body | {"add_generation_prompt": False}).json()["count"]
    assert short < counted["count"]


def test_wrong_bodies_of_tokens(client):
    for body in (
        {},
        {"content": "a", "prompt": "b"},
        {"content": 5},
        {"content": [[1]]},
        {"prompt": [1]},
        {"content": [-1]},
    ):
        refused(client, "/tokenize", **body)
    for body in ({}, {"tokens": "a"}, {"tokens": [1.5]}, {"tokens": [2**20]}):
        refused(client, "/detokenize", **body)
    refused(client, "/apply-template")


def test_the_tokenizer_tells_its_special_tokens(client):
    answer = client.get("/tokenizer_info").json()
    assert (answer["bos_token"], answer["eos_token"]) == ("<|bos|>", "<|eos|>")
    assert "im_start" in answer["chat_template"]


def test_unknown_fields_are_named_in_a_header(client):
    response = client.post("/v1/embeddings", json={"input": "a", "topp": 1, "x y": 2})
    assert response.headers["x-llamabatch-ignored"] == "topp, x?y"


def test_a_timeout_in_the_header_ends_a_text(client):
    response = client.post("/v1/embeddings", json={"input": "a"}, headers={"X-Request-Timeout": "soon"})
    assert response.status_code == 400


def test_what_is_no_json_is_told(client):
    response = client.post("/v1/embeddings", content=b'{"input": NaN}', headers={"content-type": "application/json"})
    assert (response.status_code, json.loads(response.content)["error"]["code"]) == (400, "invalid_json")
    assert client.post("/v1/embeddings", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
