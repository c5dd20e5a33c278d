"""Files and batches with OpenAI's own client, which validates the server's answers strictly."""

from __future__ import annotations

import json
import time

import openai
import pytest

from tests.server.test_openai_client import client_of

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client(url):
    with client_of(url) as made:
        yield made


def lines(n):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me about the fox."}], "max_tokens": 8}
    return [{"custom_id": f"id {i}", "method": "POST", "url": CHAT, "body": body} for i in range(n)]


def upload(client, asked):
    content = "".join(json.dumps(line) + "\n" for line in asked).encode()
    return client.files.create(file=("in.jsonl", content), purpose="batch")


def ended(client, batch):
    until = time.monotonic() + 60
    while batch.status not in ("completed", "failed", "cancelled", "expired"):
        assert time.monotonic() < until, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def test_a_batch_from_its_file_to_its_results(client):
    asked = lines(20)
    asked[3]["body"] = {"messages": []}
    file = upload(client, asked)
    assert (file.object, file.purpose, file.status) == ("file", "batch", "processed")
    made = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"for": "a test"}
    )
    batch = ended(client, made)
    assert (batch.status, batch.errors, batch.metadata) == ("completed", None, {"for": "a test"})
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (20, 19, 1)
    results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert {each["custom_id"] for each in results} == {f"id {i}" for i in range(20) if i != 3}
    for each in results:
        openai.types.chat.ChatCompletion.model_validate(each["response"]["body"], strict=True)
    [failed] = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert failed["custom_id"] == "id 3"
    assert batch.id in [each.id for each in client.batches.list(limit=1)]
    assert {file.id, batch.output_file_id} <= {each.id for each in client.files.list()}
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_errors_have_the_clients_classes(client):
    with pytest.raises(openai.BadRequestError, match="purpose is 'assistants'"):
        client.files.create(file=("a", b"{}"), purpose="assistants")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_1")
    file = upload(client, [{"custom_id": "a"}])
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="soon")
    batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"))
    assert batch.status == "failed"
    assert batch.errors.data[0].line == 1
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_a_batch_is_cancelled(client):
    asked = lines(300)
    for line in asked:
        line["body"] = line["body"] | {"max_tokens": 400, "ignore_eos": True}
    made = client.batches.create(input_file_id=upload(client, asked).id, endpoint=CHAT, completion_window="1h")
    assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
    batch = ended(client, made)
    assert batch.status == "cancelled"
    assert batch.request_counts.completed + batch.request_counts.failed == 300
