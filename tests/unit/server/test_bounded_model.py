"""Long texts and calls of many prompts are refused before anything is tokenized."""

import pytest

from llamabatch.server.serving.bounded_model import COUNTED, MAX_TEXT
from llamabatch.testing.fake_model import FakeModel
from tests.unit.server.serving_clients import ready_client

LONGEST = 64 * FakeModel.longest_token  # most characters of a prompt with n_ctx=64
LONG = "a" * (COUNTED + 1)
CHAT = [{"role": "user", "content": LONG}]


@pytest.fixture(scope="module")
def client():
    with ready_client(n_ctx=64, n_slots=2, max_queue=8) as made:
        yield made


@pytest.fixture
def read(monkeypatch):
    """Returns a list of all texts that are tokenized."""
    texts = []
    real = FakeModel.tokenize

    def tokenize(self, text, **options):
        texts.append(text)
        return real(self, text, **options)

    monkeypatch.setattr(FakeModel, "tokenize", tokenize)
    return texts


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": ["a", LONG]}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 1}),
        ("/v1/responses", {"input": "a", "instructions": LONG}),
        ("/completion", {"prompt": LONG}),
        ("/completion", {"prompt": [1, LONG]}),
        ("/completion", {"prompt": [1, *[LONG[: LONGEST // 2]] * 3]}),
        ("/v1/embeddings", {"input": LONG}),
        ("/embedding", {"content": LONG}),
        ("/v1/rerank", {"query": "a", "documents": [LONG]}),
        ("/v1/classify", {"input": LONG}),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_unread(client, read, path, body):
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "n_ctx allows 1 to 64 tokens, which are 65536 characters at most" in error["message"]
    if "n_ctx" in error:
        assert (error["n_prompt_tokens"] > 64, error["n_ctx"]) == (True, 64)
    assert max(map(len, read), default=0) < LONGEST


def test_the_tokens_of_a_prompt_that_is_a_little_longer_are_counted_once(client, read):
    words = "a b " * (LONGEST // 3)
    answer = client.post("/v1/completions", json={"prompt": [words, words]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert f"the prompt has {error['n_prompt_tokens']} tokens; n_ctx allows 1 to 64" in error["message"]
    assert read.count(words) == 1


def test_a_prompt_of_as_many_characters_is_read(client, read):
    answer = client.post("/v1/completions", json={"prompt": "a" * LONGEST, "max_tokens": 1})
    assert answer.status_code == 200
    assert "a" * LONGEST in read


def test_a_prompt_that_may_be_cut_has_a_limit_too(client, read):
    body = {"max_tokens": 1, "overflow": "truncate"}
    assert client.post("/v1/completions", json=body | {"prompt": "a b " * 40_000}).status_code == 200
    answer = client.post("/v1/completions", json=body | {"prompt": "a" * (MAX_TEXT + 1)})
    assert answer.status_code == 400
    assert f"{MAX_TEXT} can be truncated" in answer.json()["error"]["message"]
    assert max(map(len, read)) < MAX_TEXT


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a"] * 4, "n": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 11}),
        ("/completion", {"prompt": ["a"] * 11}),
        ("/v1/embeddings", {"input": ["a"] * 11}),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 11}),
    ],
)
def test_a_call_of_too_many_is_refused_before_any_prompt_is_read(client, read, path, body):
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert "allowed are 1 to 10" in answer.json()["error"]["message"]
    assert not read


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "a" * (MAX_TEXT + 1), "with_pieces": True}),
        ("/tokenize", {"content": ["a" * (MAX_TEXT // 2)] * 3}),
        ("/tokenize", {"prompt": "a" * (MAX_TEXT + 1)}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a" * MAX_TEXT}]}),
    ],
)
def test_texts_that_are_tokenized_for_their_tokens_alone_have_a_limit(client, read, path, body):
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert str(MAX_TEXT) in answer.text
    assert sum(map(len, read)) <= MAX_TEXT


@pytest.mark.parametrize(("path", "name"), [("/tokenize", "content"), ("/detokenize", "tokens")])
def test_more_tokens_than_a_body_may_have_values_are_refused_unread(client, read, path, name):
    answer = client.post(path, json={name: [1] * (MAX_TEXT + 1)})
    assert answer.status_code == 413
    assert f"{MAX_TEXT:,}" in answer.text
    assert not read
