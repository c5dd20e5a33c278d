"""The requests that a server refuses before anything runs, and its answers while its engine is gone."""

import asyncio
import threading
import time

import httpx
import pytest

from llamabatch.client.base import Heartbeat, Outage
from llamabatch.errors import EngineClosedError, SamplingError
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.structured_outputs import structure
from llamabatch.server.http.errors import ApiError
from llamabatch.server.serving import checks
from llamabatch.server.serving.admission import Admission
from tests.unit.server.serving_clients import fake_app, ready_client
from tests.unit.server.test_admission import entered, measured, request
from tests.unit.server.test_application import CHAT
from tests.waiting import PATIENCE_S, until, until_soon

PATH = "/v1/completions"


class Held:
    """Answers that wait until a test releases them."""

    def __init__(self):
        self.go = threading.Event()
        self.n_asked = 0

    def __call__(self, asked):
        self.n_asked += 1
        assert self.go.wait(20)
        return "done"


def test_a_full_queue_is_a_429_with_the_seconds_to_wait():
    held = Held()
    with ready_client(held, n_slots=1, max_queue=1) as client:
        answers = []
        callers = [
            threading.Thread(target=lambda: answers.append(client.post(PATH, json={"prompt": "a"}).status_code))
            for _ in range(2)
        ]
        for caller in callers:
            caller.start()
        until(lambda: client.app.state.serving.admission.n_in_flight == 2)
        response = client.post(PATH, json={"prompt": "b", "stream": True})
        assert response.status_code == 429
        assert 1 <= int(response.headers["retry-after"]) <= 60
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "allowed are 1 that run and max_queue=1 that wait" in error["message"]
        held.go.set()
        for caller in callers:
            caller.join(20)
        assert answers == [200, 200]
        assert client.post(PATH, json={"prompt": "b"}).status_code == 200
        assert client.app.state.serving.admission.n_in_flight == 0
        assert client.app.state.serving.client.stats().rejected == 1


def test_a_call_for_which_no_queue_is_long_enough_is_a_400():
    with ready_client(n_slots=2, max_queue=3) as client:
        assert client.post(PATH, json={"prompt": ["a"] * 5}).status_code == 200
        response = client.post(PATH, json={"prompt": ["a", "b"], "n": 3})
        assert response.status_code == 400
        assert "6 continuations at once; allowed are 1 to 5" in response.json()["error"]["message"]
        assert client.app.state.serving.admission.n_in_flight == 0


def test_a_deadline_that_the_queue_alone_would_miss_is_a_504_at_once(client, monkeypatch):
    serving = client.app.state.serving
    serving._admission = measured(1)
    now = time.perf_counter()
    monkeypatch.setattr("time.perf_counter", lambda: now)
    entered(serving.admission, 40, now)  # each takes 1.4 s
    for more in ({}, {"stream": True}):
        response = client.post(PATH, json={"prompt": "a", "deadline_s": 20, **more})
        assert response.status_code == 504
        assert response.headers["retry-after"] == "56"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
        assert "would wait about 56.0 s" in error["message"]
    response = client.post(PATH, json={"prompt": "a"}, headers={"X-Request-Timeout": "20"})
    assert response.status_code == 504
    assert client.post(PATH, json={"prompt": "a", "deadline_s": 600}).status_code == 200
    assert client.post(PATH, json={"prompt": "a", "deadline_s": 20, "service_tier": "priority"}).status_code == 200
    response = client.post(CHAT_PATH, json={**CHAT, "deadline_s": 20, "service_tier": "flex"})
    assert response.status_code == 504
    assert "in the background" in response.json()["error"]["message"]


CHAT_PATH = "/v1/chat/completions"


def test_a_deadline_counts_from_the_arrival():
    admission = measured(1)
    entered(admission, 1, 100.0)
    hurried = Request("hurried", (1,), SamplingParams(deadline_s=1.5), arrival_s=100.0)
    checks.check_deadlines([hurried], admission, 100.0)
    checks.check_deadlines([request("patient")], admission, 100.0)
    late = Request("late", (1,), SamplingParams(deadline_s=1.5), arrival_s=99.8)
    with pytest.raises(ApiError, match=r"deadline_s is 1\.5, but the request would wait about 1\.4 s"):
        checks.check_deadlines([late], admission, 100.0)
    checks.check_deadlines([late], Admission(1, int), 100.0)


class Refusing:
    """A model that refuses all grammars but "fine"."""

    def __init__(self, kind):
        self.n_asked = 0
        self.kind = kind
        self.grammars = self

    def check(self, form):
        from concurrent.futures import Future

        self.n_asked += 1
        future = Future()
        if form.text != "fine":
            future.set_exception(self.kind(f"{form.text} is refused"))
        else:
            future.set_result("")
        return future


@pytest.mark.parametrize(("kind", "status"), [(SamplingError, 400), (EngineClosedError, 503)])
def test_a_form_that_cannot_be_held_is_refused_before_it_queues(client, kind, status):
    serving = client.app.state.serving
    serving.client.model.grammars = Refusing(kind)
    fine = client.post(PATH, json={"prompt": "a", "structured_outputs": {"regex": "fine"}})
    assert fine.status_code == 200
    for more in ({}, {"stream": True}):
        response = client.post(PATH, json={"prompt": "a", "structured_outputs": {"regex": "bad"}, **more})
        assert response.status_code == status
        assert "bad is refused" in response.json()["error"]["message"]
    assert serving.client.stats().submitted == 1
    assert serving.n_open == 0


@pytest.mark.parametrize(
    ("path", "field", "value", "says", "param"),
    [
        (PATH, "guided_regex", "bad", "guided_regex is refused", "guided_regex"),
        (PATH, "structured_outputs", {"regex": "bad"}, "regex of structured_outputs is refused", "structured_outputs"),
        (CHAT_PATH, "response_format", {"type": "json_schema", "json_schema": {"schema": {}}}, "", "response_format"),
        ("/v1/responses", "text", {"format": {"type": "json_schema", "schema": {}}}, "text.format", "text"),
        ("/api/chat", "format", {"type": "object"}, "format is refused", None),
    ],
)
def test_a_refused_form_is_named_as_the_body_has_it(client, path, field, value, says, param):
    refusing = Refusing(SamplingError)
    refusing.check = lambda form: refused(f"{form.kind} of structured_outputs is refused")
    client.app.state.serving.client.model.grammars = refusing
    words = (
        {"prompt": "a"} if path == PATH else {"input": "a"} if "responses" in path else {"messages": CHAT["messages"]}
    )
    response = client.post(path, json={**words, field: value})
    error = response.json()["error"]
    assert response.status_code == 400
    message = error if isinstance(error, str) else error["message"]
    assert (says or f"{field} is refused") in message
    assert isinstance(error, str) or error["param"] == param


def refused(text):
    from concurrent.futures import Future

    future = Future()
    future.set_exception(SamplingError(text))
    return future


def test_a_role_that_the_template_does_not_know_is_told_with_its_field(client):
    response = client.post(CHAT_PATH, json={"messages": [{"role": "usr", "content": "a"}]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert "role of messages[0] is 'usr'; did you mean 'user'?" in error["message"]


def test_each_form_is_tried_once():
    forms = [structure({"regex": each}) for each in ("a", "b", "a")]
    asked = [request(at, structured_outputs=form) for at, form in enumerate(forms)]
    assert checks.structures([*asked, request("free")]) == forms[:2]


def test_words_that_the_model_cannot_write_are_refused_before_they_queue(client):
    client.app.state.serving.client.model.tokenize = lambda text, **options: [5] if text == "a" else []
    response = client.post(PATH, json={"prompt": "a", "bad_words": ["zebra"]})
    assert response.status_code == 400
    assert "bad_words has 'zebra'" in response.json()["error"]["message"]
    assert client.app.state.serving.client.stats().submitted == 0


# --- an engine that is gone ---------------------------------------------------------------------------------------


@pytest.fixture
def gone(client, monkeypatch):
    """Returns the client of a server whose engine is gone, and the outage, which a test may change."""
    serving = client.app.state.serving
    state = {"outage": Outage("it died 9 times in a row", 7.2)}
    monkeypatch.setattr(type(serving.client), "outage", property(lambda self: state["outage"]))
    return client, state


def test_without_an_engine_the_server_has_failed_and_says_when_to_come_again(gone):
    client, state = gone
    assert client.get("/livez").status_code == 503
    for response in (client.get("/readyz"), client.post(PATH, json={"prompt": "a"}), client.get("/health")):
        assert response.status_code == 503
        assert response.headers["retry-after"] == "8"
        assert "it died 9 times in a row" in response.json()["error"]["message"]
    state["outage"] = None  # another engine has started
    assert client.get("/livez").status_code == 200
    assert client.post(PATH, json={"prompt": "a"}).status_code == 200


def test_while_an_engine_is_replaced_others_are_to_be_asked_and_requests_that_come_are_answered(client, monkeypatch):
    serving = client.app.state.serving
    beats = [Heartbeat(None, False, None, None, 0)] * 2
    monkeypatch.setattr(type(serving.client), "heartbeats", property(lambda self: beats))
    for path in ("/readyz", "/health", "/v1/health"):
        response = client.get(path)
        assert response.status_code == 503
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert (response.json()["status"], response.json()["error"]["code"]) == ("restarting", "model_restarting")
    assert client.get("/livez").json() == {"status": "ok", "state": "restarting"}
    assert "llamabatch:ready{" in (text := client.get("/metrics").text)
    assert next(line for line in text.splitlines() if line.startswith("llamabatch:ready{")).endswith(" 0.0")
    assert client.post(PATH, json={"prompt": "a"}).status_code == 200
    beats = [beats[0], Heartbeat(7, True, 0.1, None, 1)]  # one of two engines is enough
    assert client.get("/readyz").json() == {"status": "ok"}


def test_ready_is_no_server_whose_next_try_is_due(gone):
    client, state = gone
    state["outage"] = Outage("it died 9 times in a row", 0.0)
    for path in ("/readyz", "/health", "/v1/health", "/ping"):
        assert client.get(path).status_code == 503
    assert client.post(PATH, json={"prompt": "a"}).status_code == 503
    state["outage"] = Outage("it is closed")
    response = client.post(PATH, json={"prompt": "a"})
    assert (response.status_code, response.headers["retry-after"]) == (503, "30")


def submitting(application, leave_in):
    """Cancels a call while `leave_in(serving, has_begun, has_left)` holds it up. Returns the Serving."""
    has_begun, has_left = threading.Event(), threading.Event()

    async def run():
        serving = application.state.serving
        serving.start().result()
        prepare = leave_in(serving, has_begun, has_left)
        call = asyncio.create_task(serving.submit(prepare))
        await asyncio.to_thread(has_begun.wait, PATIENCE_S)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        behind_the_abort = serving._aborting.submit(lambda: None)
        await asyncio.to_thread(behind_the_abort.result, PATIENCE_S)
        has_left.set()
        await asyncio.to_thread(serving._workers.shutdown)
        return serving

    return asyncio.run(run())


def prompts(inputs):
    return inputs.prompts(["a"], SamplingParams(max_tokens=4), None, "raise")


def test_a_call_that_leaves_before_its_requests_are_submitted_submits_none():
    def leave_in(serving, has_begun, has_left):
        def prepare(inputs):
            submission = prompts(inputs)
            has_begun.set()
            assert has_left.wait(PATIENCE_S)
            return submission

        return prepare

    serving = submitting(fake_app(), leave_in)
    assert (serving.client.stats().submitted, serving.n_open, serving.admission.n_in_flight) == (0, 0, 0)
    serving.close()


def test_a_call_that_leaves_while_its_requests_are_submitted_has_them_aborted_behind_that():
    told = []

    def leave_in(serving, has_begun, has_left):
        def submit(requests, sink, *, stream):
            has_begun.set()
            assert has_left.wait(PATIENCE_S)
            told.append(("submit", [request.request_id for request in requests]))

        serving.client.submit = submit
        serving.client.abort = lambda request_ids: told.append(("abort", list(request_ids)))
        return prompts

    serving = submitting(fake_app(), leave_in)
    [(_, ids)] = [each for each in told if each[0] == "submit"]
    assert told[-1] == ("abort", ids)  # an earlier abort, if any, found nothing
    assert all(not dispatcher.request_ids for dispatcher in serving._dispatchers.values())
    serving.close()


def test_calls_that_leave_while_they_wait_leave_nothing():
    held = Held()
    application = fake_app(held, n_slots=1, max_queue=8)

    async def run():
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            serving = application.state.serving
            serving.start().result()
            calls = [asyncio.create_task(http.post(PATH, json={"prompt": "a"})) for _ in range(4)]
            await until_soon(lambda: held.n_asked >= 4)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            held.go.set()
            await until_soon(lambda: (serving.n_open, serving.admission.n_in_flight) == (0, 0))
            await serving.aclose()

    asyncio.run(run())


def test_logprobs_have_a_bound_in_one_call_and_in_all_answers_together():
    def request(**params):
        return Request("a", (1,) * 10, SamplingParams(**params))

    most = 300 * 1000
    checks.check_answer([request(logprobs=10, max_tokens=100)], 4096, 100, 0, most)
    checks.check_answer([request(max_tokens=100, n=200)], 4096, 100, 5000, most)
    for asked in ([request(logprobs=10, max_tokens=101)], [request(logprobs=10, max_tokens=60)] * 2):
        with pytest.raises(ApiError, match=r"up to 1,[0-9]{3} logprobs; allowed are 0 to 1,000") as caught:
            checks.check_answer(asked, 4096, 100, 0, most)
        assert caught.value.status == 400
    with pytest.raises(ApiError, match="answers with 1,001 logprobs are being sent") as caught:
        checks.check_answer([request(logprobs=1, max_tokens=5)], 4096, 100, 1001, most)
    assert caught.value.status == 503
    assert "Retry-After" in caught.value.headers
