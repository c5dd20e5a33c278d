"""The endpoints of llama-server and vLLM, on the bundled model, with the engine in a child process."""

import asyncio
import json
import os
import signal
import threading

import pytest
from starlette.testclient import TestClient

from llamabatch import LLM, SamplingParams
from llamabatch.server import app
from llamabatch.server.monitor import live
from tests.model.adapter_files import write_lora
from tests.unit.server.test_application import ready
from tests.unit.server.test_status_endpoints import watched
from tests.waiting import PATIENCE_S, until

SECRET = "Once upon a time there was a zebra"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    write_lora(folder / "one.gguf", seed=1)
    (folder / "damaged.gguf").write_bytes(b"GGUF" + bytes(100))
    return folder


@pytest.fixture(scope="module")
def client(folder, steps):
    made = app("tiny", n_slots=2, n_ctx=2048, instances=1, kv="split", lora_dir=str(folder), n_threads=1)
    with TestClient(made, raise_server_exceptions=False) as client:
        yield ready(client)


@pytest.fixture
def busy(client, steps):
    """Three requests for two slots, which run until the end of the test."""
    serving = client.app.state.serving
    calls = []

    async def start():
        async def run():
            from llamabatch.entrypoints.input_processor import InputProcessor

            def prepare(inputs: InputProcessor):
                return inputs.prompts(
                    ["Two zebras, and nobody else. " * 20] * 3,
                    SamplingParams(max_tokens=1900, ignore_eos=True),
                    None,
                    "raise",
                )

            call = await serving.submit(prepare, stream=True)
            calls.append(call)
            async for _ in call:
                pass

        return asyncio.ensure_future(run())

    with steps.each_takes(0.02):
        client.portal.call(start)
        until(lambda: all(slot["next_token"][0]["n_decoded"] > 0 for slot in client.get("/slots").json()))
        yield
        client.portal.call(calls[0].abort)


def test_texts_are_those_of_the_library(client):
    with LLM("tiny", n_slots=2, instances=1) as llm:
        [expected] = llm.generate(SECRET, SamplingParams(max_tokens=24, temperature=0))
    body = {"prompt": SECRET, "n_predict": 24, "temperature": 0, "n_probs": 3, "return_tokens": True}
    found = client.post("/completion", json=body).json()
    assert found["content"] == expected.text
    assert found["tokens"] == list(expected.token_ids)
    assert found["timings"]["prompt_ms"] > 0
    assert found["timings"]["predicted_ms"] > 0
    assert len(found["completion_probabilities"]) == len(expected.token_ids)
    for token, given in zip(expected.token_ids, found["completion_probabilities"], strict=True):
        assert given["id"] == token == given["top_logprobs"][0]["id"]
        assert len(given["top_logprobs"]) == 3
        assert bytes(given["bytes"]).decode(errors="ignore") == given["token"]
    assert "".join(each["token"] for each in found["completion_probabilities"]).startswith(expected.text)
    streamed = client.post("/completion", json=body | {"stream": True})
    parts = [json.loads(part.removeprefix("data: ")) for part in streamed.text.split("\n\n") if part]
    assert "".join(part["content"] for part in parts) == expected.text
    assert [token for part in parts for token in part["tokens"]] == list(expected.token_ids)


def test_logprobs_of_a_chat_have_the_bytes_of_each_token(client):
    word = "日本 é"
    asked = {"guided_choice": [word], "temperature": 0}
    chat = asked | {"messages": [{"role": "user", "content": "Say it"}], "logprobs": True, "top_logprobs": 2}

    def joined(content):
        assert all(bytes(each["bytes"]) or each["token"] == "" for token in content for each in token["top_logprobs"])
        assert any("\N{REPLACEMENT CHARACTER}" in token["token"] for token in content)  # parts of a character
        return b"".join(bytes(token["bytes"]) for token in content)

    whole = client.post("/v1/chat/completions", json=chat).json()["choices"][0]
    assert whole["message"]["content"] == word
    assert joined(whole["logprobs"]["content"]).startswith(word.encode())
    lines = client.post("/v1/chat/completions", json=chat | {"stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [token for part in parts if part for token in part["content"]] == whole["logprobs"]["content"]
    response = client.post("/v1/responses", json=asked | {"input": "Say it", "top_logprobs": 2}).json()
    assert joined(response["output"][0]["content"][0]["logprobs"]).startswith(word.encode())


def test_cached_tokens_are_told_and_may_be_avoided(client):
    prompt = "The second prompt of this test, which is computed once. " * 4
    first, again, anew = (
        client.post("/completion", json={"prompt": prompt, "n_predict": 2, "cache_prompt": cache}).json()["timings"]
        for cache in (True, True, False)
    )
    n_prompt = first["prompt_n"] + first["cache_n"]
    assert first["cache_n"] < 40
    assert (again["prompt_n"], again["cache_n"]) == (1, n_prompt - 1)
    assert (anew["prompt_n"], anew["cache_n"]) == (n_prompt, 0)


def test_an_output_ends_once_its_time_is_over_and_it_has_a_line(client, steps):
    form = {"structured_outputs": {"regex": "a\\n(b ){1500}"}}
    body = {"prompt": "x", "n_predict": -1, "t_max_predict_ms": 150, **form}
    with steps.each_takes(0.01):
        found = client.post("/completion", json=body).json()
    assert found["stop_type"] == "limit"
    assert found["content"].startswith("a\n")
    assert 0 < found["tokens_predicted"] < 1500
    with steps.each_takes(0.01):
        parts = client.post("/completion", json=body | {"stream": True}).text.split("\n\n")
    last = json.loads([part for part in parts if part][-1].removeprefix("data: "))
    assert (last["stop"], last["stop_type"]) == (True, "limit")
    _until_idle(client)


def _until_idle(client):
    until(lambda: not any(slot["is_processing"] for slot in client.get("/slots").json()))


def test_progress_of_a_long_prompt(client):
    body = {"prompt": "a b c d e f " * 200, "n_predict": 2, "stream": True, "return_progress": True}
    parts = client.post("/completion", json=body).text.split("\n\n")
    told = [json.loads(part.removeprefix("data: ")) for part in parts if "prompt_progress" in part]
    processed = [each["prompt_progress"]["processed"] for each in told]
    assert processed[0] == 0
    assert processed == sorted(set(processed))
    assert processed[-1] == told[0]["prompt_progress"]["total"] == told[0]["tokens_evaluated"]


@pytest.mark.timed
def test_slots_show_what_runs_and_no_prompt(client, busy):
    answer = client.get("/slots")
    found = answer.json()
    assert [slot["is_processing"] for slot in found] == [True, True]
    assert all(slot["n_ctx"] == 2048 for slot in found)
    assert client.get("/slots?fail_on_no_slot=1").status_code == 503
    assert "zebra" not in answer.text
    events = client.portal.call(watched, client.app, 3)

    def grew():
        events.extend(client.portal.call(watched, client.app, 2))
        return events[-1]["slots"][0]["n_output"] > events[0]["slots"][0]["n_output"]

    until(grew)
    assert "zebra" not in json.dumps(events)
    last = events[-1]
    assert [slot["state"] for slot in last["slots"]] == ["output", "output"]
    assert [one["reason"] for one in last["queue"]["next"]] == ["slot"]
    assert last["rates"]["tokens_per_s"] > 0
    assert 1 < last["rates"]["rows_per_step"] <= 2
    assert 0 < last["rates"]["gap_p50_s"] <= last["rates"]["gap_max_s"]
    assert len({slot["prefix"] for slot in last["slots"]}) == 1  # all slots have the same prompt
    text = client.get("/metrics").text
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 2.0' in text
    assert "llamacpp:requests_deferred 1.0" in text
    assert "zebra" not in text
    assert client.get("/load").json() == {"server_load": 1}


def test_metrics_count_what_answers_tell(client, monkeypatch):
    monkeypatch.setattr(live, "EVERY_S", 0)  # else old values may be shown again

    def figures():
        lines = client.get("/metrics").text.splitlines()
        return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("llamacpp:")}

    _until_idle(client)
    before = figures()
    answers = [client.post("/completion", json={"prompt": "Count me " * 40, "n_predict": n}).json() for n in (1, 4, 8)]
    after = figures()

    def more(name):
        return after[f"llamacpp:{name}"] - before[f"llamacpp:{name}"]

    assert more("tokens_predicted_total") == sum(each["timings"]["predicted_n"] for each in answers)
    assert more("prompt_tokens_total") == sum(each["timings"]["prompt_n"] for each in answers)
    assert more("prompt_tokens_cached_total") == sum(each["timings"]["cache_n"] for each in answers) > 0
    assert more("prompt_seconds_total") * 1000 == pytest.approx(sum(each["timings"]["prompt_ms"] for each in answers))
    assert more("n_decode_total") > 0
    assert after["llamacpp:n_tokens_max"] >= max(each["tokens_evaluated"] for each in answers)


def test_an_adapter_is_loaded_used_and_unloaded(client, folder):
    def text(**more):
        body = {"prompt": SECRET, "max_tokens": 12, "temperature": 0, **more}
        return client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    plain = text()
    body = {"lora_name": "one", "lora_path": "one.gguf"}
    assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["tiny", "one"]
    adapted = text(model="one")
    assert adapted != plain == text()
    assert text(lora=[{"id": 0, "scale": 1.0}]) == adapted
    assert client.post("/lora-adapters", json=[{"id": 0, "scale": 1.0}]).status_code == 200
    assert text() == adapted
    assert text(lora=[]) == text(lora=[{"id": 0, "scale": 0.0}]) == plain
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "one"}).status_code == 200
    assert text() == plain
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": "damaged.gguf"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_adapter")
    assert text() == plain


def test_an_adapter_in_use_is_not_unloaded(client, steps):
    body = {"lora_name": "one", "lora_path": "one.gguf"}
    assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
    long = {"model": "one", "prompt": SECRET, "max_tokens": 200, "ignore_eos": True, "stream": True}
    thread = threading.Thread(target=lambda: client.post("/v1/completions", json=long))
    with steps.each_takes(0.1):
        thread.start()
        until(lambda: any(slot["adapters"] for slot in client.get("/slots").json()))
        answer = client.post("/v1/unload_lora_adapter", json={"lora_name": "one"})
    thread.join()
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "adapter_in_use")
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "one"}).status_code == 200


@pytest.mark.timed
def test_watchers_see_an_engine_that_is_killed_come_back(client, monkeypatch):
    engine, go_on = client.app.state.serving.client, threading.Event()
    [supervisor] = engine.inner._children
    start = supervisor._start_child
    monkeypatch.setattr(supervisor, "_start_child", lambda *a: go_on.wait(PATIENCE_S) and start(*a))
    _until_idle(client)
    events, before = client.portal.call(watched, client.app, 2), engine.stats().restarts

    def last():
        events.extend(client.portal.call(watched, client.app, 2))
        return events[-1]

    watching = client.portal.start_task_soon(watched, client.app, 3)
    for pid in engine.pids:
        os.kill(pid, signal.SIGKILL)
    events += watching.result(PATIENCE_S)
    until(lambda: last()["state"] == "restarting")
    go_on.set()
    until(lambda: last()["slots"] and engine.stats().restarts > before)  # the new child's first state may come later
    counts = [event["totals"]["restarts"] for event in events if "totals" in event]
    assert counts[-1] == counts[0] + 1
    assert len(events[-1]["slots"]) == 2
    assert {event["state"] for event in events} == {"ready", "restarting"}
    assert events[-1]["state"] == "ready"
    body = {"prompt": "x", "n_predict": 2, "ignore_eos": True}
    assert client.post("/completion", json=body).json()["tokens_predicted"] == 2
    assert "llamabatch:engine_restarts_total" in client.get("/metrics").text
