"""/slots, /props, /metrics, /load and their like, over a fake engine."""

import asyncio
import json
import time
from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from llamabatch.engine.engine_state import EngineState
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import EngineClosedError
from llamabatch.scheduler.slot_state import SlotState, WaitingState
from llamabatch.server.llama_server import slots
from llamabatch.server.monitor import live
from llamabatch.server.monitor.live import Live, live_of, longest, rates
from llamabatch.server.response import model_facts
from llamabatch.utils.version import __version__
from tests.unit.fakes import times
from tests.unit.server.serving_clients import fake_app, ready_client

SECRET = "a prompt that stays a secret"
STATES = [
    EngineState(
        (
            SlotState(0, "request-1", 0, 7, n_prompt=40, n_prompt_done=40, n_cached=10, n_output=5, max_output=9,
                      n_cells=45, prefix=7, adapters=("poet",), age_s=1.5, running_s=1.0),
            SlotState(1, "request-2", 1, 8, background=True, n_prompt=50, n_prompt_done=20, prefix=7, waits_for=None),
            SlotState(2, n_cells=33),
        ),
        (WaitingState("request-3", 0, False, -1, 12, 0, 0.25, "slot"),),
        3, 1, 512, 99,
    )
]  # fmt: skip


def with_states(client, monkeypatch, states=STATES):
    fake = client.app.state.serving.client
    monkeypatch.setattr(fake, "states", lambda: states)
    return client


def test_each_slot_has_llama_servers_fields(client, monkeypatch):
    first, second, third = with_states(client, monkeypatch).get("/slots").json()
    assert (first["id"], first["n_ctx"], first["is_processing"], first["id_task"]) == (0, 512, True, 7)
    assert first["next_token"] == [{"has_next_token": True, "n_remain": 4, "n_decoded": 5}]
    assert [first[f"n_prompt_tokens{name}"] for name in ("", "_processed", "_cache")] == [40, 30, 10]
    assert (first["tier"], second["tier"]) == ("default", "flex")
    assert third["is_processing"] is False
    assert third["next_token"] == [{"has_next_token": False, "n_remain": -1, "n_decoded": 0}]


def test_slots_of_several_engines_are_numbered_on(client, monkeypatch):
    found = with_states(client, monkeypatch, STATES * 2).get("/slots").json()
    assert [slot["id"] for slot in found] == list(range(6))


def test_no_free_slot_is_a_503_where_that_is_asked(client, monkeypatch):
    assert with_states(client, monkeypatch).get("/slots?fail_on_no_slot=1").status_code == 200
    full = [EngineState(STATES[0].slots[:2], n_ctx=512)]
    monkeypatch.setattr(client.app.state.serving.client, "states", lambda: full)
    asyncio.run(asyncio.sleep(0.12))  # a state that was read a moment ago may be shown again
    answer = client.get("/slots?fail_on_no_slot=1")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, 503)
    assert client.get("/slots").status_code == 200


def test_slots_may_be_turned_off():
    with ready_client(server={"slots": False}) as client:
        answer = client.get("/slots")
    assert answer.status_code == 501
    assert answer.json()["error"]["type"] == "not_supported_error"


def test_a_wrong_model_is_not_found():
    with ready_client(server={"served_model_names": ("m",)}) as client:
        assert client.get("/slots?model=m").status_code == 200
        assert client.get("/slots?model=other").status_code == 404
        assert client.get("/props?model=other").json()["error"]["type"] == "not_found_error"


async def watched(app, n):
    """Returns the first `n` events of /slots?stream=1. The reader then leaves."""
    events, left = [], asyncio.Event()

    async def receive():
        if not hasattr(receive, "asked"):
            receive.asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.body":
            events.extend(
                json.loads(part.removeprefix("data: ")) for part in message["body"].decode().split("\n\n") if part
            )
            if len(events) == n:
                left.set()
        else:
            assert dict(message["headers"])[b"content-type"].startswith(b"text/event-stream")

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/slots",
        "query_string": b"stream=1",
        "headers": [],
        "root_path": "",
    }
    await asyncio.wait_for(app(scope | {"app": app, "http_version": "1.1", "scheme": "http"}, receive, send), 20)
    return events


def test_the_stream_brings_ten_looks_a_second_until_its_reader_leaves(client, monkeypatch):
    with_states(client, monkeypatch)
    began = time.monotonic()
    events = client.portal.call(watched, client.app, 5)
    assert time.monotonic() - began > 0.39
    assert len(events) == 5
    first = events[0]
    assert [slot["state"] for slot in first["slots"]] == ["output", "prompt", "free"]
    assert first["slots"][0]["n_output"] == 5
    assert first["slots"][1]["request"] == "request-2.1"
    assert first["slots"][0]["prefix"] == first["slots"][1]["prefix"]
    assert first["queue"]["n"] == 3
    assert first["queue"]["next"] == [
        {"request": "request-3", "tier": "priority", "priority": -1, "n_prompt": 12, "n_output": 0, "age_s": 0.25,
         "reason": "slot"},
    ]  # fmt: skip
    assert first["state"] == "ready"
    assert events[-1]["rates"]["window_s"] > 0
    assert slots.SlotEvents._n_open == 0


def test_all_watchers_share_one_look_and_one_document(client, monkeypatch):
    looks, made = [], []
    document = Live._document
    monkeypatch.setattr(Live, "_document", lambda *args: made.append(1) or document(*args))
    fake = client.app.state.serving.client
    monkeypatch.setattr(fake, "states", lambda: looks.append(1) or STATES)

    async def many():
        return await asyncio.gather(*(watched(client.app, 5) for _ in range(slots.MAX_WATCHERS)))

    assert all(len(events) == 5 for events in client.portal.call(many))
    assert 0 < len(made) <= len(looks) < 5 * slots.MAX_WATCHERS


def test_an_event_has_the_state_of_its_moment(client, monkeypatch):
    monkeypatch.setattr(live, "EVERY_S", 600)
    serving = client.app.state.serving

    async def twice():
        seen = live_of(serving)
        first = await seen.event()
        assert await seen.event() is first
        monkeypatch.setattr(type(serving), "state", "draining")
        return first, await seen.event()

    states = [json.loads(event.removeprefix(b"data: "))["state"] for event in client.portal.call(twice)]
    assert states == ["ready", "draining"]


def test_the_tensors_of_a_model_are_read_once(client, monkeypatch):
    reads = []
    tensor = SimpleNamespace(n_elements=7, n_bytes=9, type_name="Q8_0")
    monkeypatch.setattr(model_facts, "read_tensors", lambda path: reads.append(path) or [tensor])
    for _ in range(3):
        meta = client.get("/v1/models").json()["data"][0]["meta"]
        assert (meta["n_params"], meta["size"]) == (7, 9)
        client.get(f"/v1/models/{client.app.state.serving.names[0]}")
    assert len(reads) == 1


def test_watchers_are_bounded(client, monkeypatch):
    monkeypatch.setattr(slots, "MAX_WATCHERS", 0)
    answer = client.get("/slots?stream=1")
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "5"


def test_another_value_of_stream_is_refused(client):
    answer = client.get("/slots?stream=banana")
    assert answer.status_code == 400
    assert "stream is 'banana'; give 1 or 0" in answer.text
    assert isinstance(client.get("/slots?stream=0").json(), list)


def test_the_stream_ends_with_the_server(client):
    serving = client.app.state.serving

    def drain():
        serving._state = "draining"

    async def watch():
        asyncio.get_running_loop().call_later(0.05, drain)
        return await watched(client.app, 10_000)

    events = client.portal.call(watch)
    assert events[-1]["state"] == "draining"
    serving._state = "ready"


def test_props_tell_the_model_and_its_settings():
    server = {"sampling": {"temperature": 0.25, "seed": 7}, "served_model_names": ("m",)}
    with ready_client(server=server, n_slots=3, n_ctx=256) as client:
        found = client.get("/props").json()
    assert (found["total_slots"], found["model_alias"]) == (3, "m")
    settings = found["default_generation_settings"]
    assert settings["n_ctx"] == 256
    assert (settings["params"]["temperature"], settings["params"]["seed"]) == (0.25, 7)
    assert (settings["params"]["top_k"], settings["params"]["n_predict"]) == (40, -1)


def test_props_change_only_where_the_server_allows_it():
    with ready_client() as client:
        assert client.post("/props", json={}).status_code == 501
    with ready_client(server={"props": True, "sampling": {"seed": 3}}) as client:
        assert client.post("/props", json={"temperature": 0.5, "seed": None}).json() == {"success": True}
        params = client.get("/props").json()["default_generation_settings"]["params"]
        assert (params["temperature"], params["seed"]) == (0.5, 2**32 - 1)
        answer = client.post("/props", json={"temprature": 1})
        assert (answer.status_code, "temprature" in answer.json()["error"]["message"]) == (400, True)
        assert client.post("/props", json={"temperature": 1000}).status_code == 400
        client.post("/v1/completions", json={"prompt": "x"})


def test_metrics_are_there_before_and_after_the_model(client):
    client.post("/v1/completions", json={"prompt": SECRET})
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert int(answer.headers["process-start-time-unix"]) > 0
    found = {s.name: s.value for f in text_string_to_metric_families(answer.text) for s in f.samples}
    assert found["llamabatch:ready"] == 1
    assert found["llamabatch:requests_submitted_total"] == 1
    assert found["vllm:generation_tokens_total"] > 0
    assert SECRET not in answer.text

    def never(config):
        raise OSError("no")

    with TestClient(fake_app(connect=never), raise_server_exceptions=False) as client:
        answer = client.get("/metrics")
    assert answer.status_code == 200
    assert "llamabatch:ready{" in answer.text


def test_counters_stand_still_once_the_engine_is_gone(client, monkeypatch):
    client.post("/v1/completions", json={"prompt": "x y"})
    monkeypatch.setattr("llamabatch.server.monitor.live.EVERY_S", 0.0)

    def counted():
        return {line for line in client.get("/metrics").text.splitlines() if line.startswith("vllm:generation_tokens")}

    before = counted()
    assert not any(line.endswith(" 0.0") for line in before)

    def gone():
        raise EngineClosedError("it is gone")

    monkeypatch.setattr(client.app.state.serving.client, "states", gone)
    assert counted() == before
    assert "vllm:num_requests_running" in client.get("/metrics").text
    assert client.get("/slots").status_code == 503


def test_load_version_and_ping(client):
    assert client.get("/load").json() == {"server_load": 0}
    assert client.get("/version").json() == {"version": __version__}
    assert client.get("/ping").status_code == client.post("/ping").status_code == 200
    assert client.post("/reset_prefix_cache").status_code == 200
    assert client.get("/reset_prefix_cache").status_code == 405


def test_speeds_of_a_span():
    span = EngineStats(generated_tokens=40, decode_calls=10, decode_rows=30, inter_token_s=times(0.01, 0.01, 0.3))
    found = rates(span, 2.0)
    assert (found["tokens_per_s"], found["steps_per_s"], found["rows_per_step"]) == (20.0, 5.0, 3.0)
    assert found["gap_max_s"] == 0.3
    assert rates(EngineStats(), 0.0)["gap_p95_s"] is None
    assert longest(times(1e6)) == 1e4
