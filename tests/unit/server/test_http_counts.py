"""/metrics counts HTTP requests by route and status, in a bounded number of series."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from llamabatch.server.http.counts import NO_ROUTE, OTHER_METHOD, HttpCounts
from llamabatch.server.http.request_log import RequestLog
from tests.unit.server.serving_clients import ready_client

COMPLETIONS = "/v1/completions"
KEY = {"Authorization": "Bearer right"}


def series(client, name, **labels):
    """Returns label values -> value, for the samples of a metric that have these labels."""
    text = client.get("/metrics", headers=KEY).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = [sample for sample in samples if sample.name == name and labels.items() <= sample.labels.items()]
    return {tuple(sample.labels.values()): sample.value for sample in found}


@pytest.fixture
def client():
    with ready_client(server={"api_keys": ("right",), "root_path": "/llm"}) as client:
        yield client


def test_responses_are_counted_by_route_method_and_status(client):
    for headers in (KEY, KEY, {}, {"Authorization": "Bearer wrong"}):
        client.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
    client.post("/llm" + COMPLETIONS, json={"prompt": "x"}, headers=KEY)
    client.post(COMPLETIONS, json={"prompt": "x", "n": -1}, headers=KEY)
    client.get(COMPLETIONS, headers=KEY)
    client.post(COMPLETIONS, content=b"x" * 50, headers={**KEY, "content-length": "999999999999"})
    assert series(client, "http_requests_total", handler=COMPLETIONS) == {
        (COMPLETIONS, "POST", "200"): 3,
        (COMPLETIONS, "POST", "400"): 1,
        (COMPLETIONS, "POST", "401"): 2,
        (COMPLETIONS, "POST", "413"): 1,
        (COMPLETIONS, "GET", "405"): 1,
    }
    seconds = series(client, "http_request_duration_seconds_count", handler=COMPLETIONS)
    assert seconds == {(COMPLETIONS, "POST"): 7, (COMPLETIONS, "GET"): 1}
    [total] = series(client, "http_request_duration_seconds_sum", handler=COMPLETIONS, method="POST").values()
    assert 0 < total < 60
    buckets = series(client, "http_request_duration_seconds_bucket", handler=COMPLETIONS, method="POST", le="+Inf")
    assert list(buckets.values()) == [7]


def test_paths_of_callers_make_no_series(client):
    for number in range(9):
        client.get(f"/nothing/{number}", headers=KEY)
        client.get(f"/v1/models/no-{number}", headers=KEY)
        client.request(f"METHOD{number}", "/nothing", headers=KEY)
    assert series(client, "http_requests_total", status="404") == {
        (NO_ROUTE, "GET", "404"): 9,
        (NO_ROUTE, OTHER_METHOD, "404"): 9,
        ("/v1/models/{name}", "GET", "404"): 9,
    }


def test_a_client_that_left_is_counted_and_a_stream_counts_once():
    counts = HttpCounts([Route("/a/{name:path}", print)])

    async def run(app, path, sent):
        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        await RequestLog(app, counts)(scope, None, send)

    async def streams(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(5):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})

    async def leaves(scope, receive, send):
        pass

    asyncio.run(run(streams, "/a/b/c", []))
    asyncio.run(run(leaves, "/b", []))
    counts.add_unread(431)
    assert counts.responses() == {
        ("/a/{name}", "POST", 200): 1,
        (NO_ROUTE, "POST", 499): 1,
        (NO_ROUTE, OTHER_METHOD, 431): 1,
    }
    assert {labels: each.count for labels, each in counts.durations().items()} == {
        ("/a/{name}", "POST"): 1,
        (NO_ROUTE, "POST"): 1,
    }
