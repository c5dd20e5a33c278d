"""max_queue: which calls are refused, and that no request of a refused call is queued."""

import pytest

from llamabatch.client.front_client import FrontClient
from llamabatch.errors import EngineClosedError, LlamaBatchError, QueueFull
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from tests.unit.client.behind import Behind


def requests(*names: str, **params) -> list[Request]:
    return [Request(name, (1, 2), SamplingParams(**params)) for name in names]


def bounded(max_queue: int, **options) -> tuple[FrontClient, Behind]:
    behind = Behind(**({"n_slots": 2, "instances": 1, "strategy": "batched"} | options))
    return FrontClient(behind, max_queue), behind


def test_what_would_wait_too_many_is_refused_as_a_whole():
    client, behind = bounded(1)
    client.submit(requests("a", "b"), print)
    with pytest.raises(QueueFull, match="2 more would be 4 in flight; allowed are 2 that run and max_queue=1"):
        client.submit(requests("c", "d"), print)
    assert set(behind.in_flight) == {"a", "b"}, "a part of it was queued"
    client.submit(requests("c"), print)
    assert (client.stats().waiting, client.stats().rejected, client.stats().submitted) == (1, 2, 3)
    assert issubclass(QueueFull, LlamaBatchError)


def test_a_request_that_ends_makes_room_before_its_caller_has_the_output():
    client, behind = bounded(0)
    retried = []

    def again(outputs) -> None:
        client.submit(requests(f"{outputs[0].request_id}2"), retried.extend)

    client.submit(requests("a", "b"), again)
    behind.end("a")
    assert set(behind.in_flight) == {"b", "a2"}
    with pytest.raises(QueueFull):
        client.submit(requests("c"), print)


def test_each_continuation_counts():
    client, behind = bounded(2)
    with pytest.raises(QueueFull):
        client.submit(requests("a", n=2, best_of=5), print)
    client.submit(requests("a", n=4), print)
    assert client.in_flight.n_continuations == 4
    with pytest.raises(QueueFull):
        client.submit(requests("b"), print)
    behind.end("a")
    client.submit(requests("b", n=4), print)


def test_a_submit_that_fails_takes_no_room():
    client, behind = bounded(0)
    behind.takes = 0
    for _ in range(3):
        with pytest.raises(EngineClosedError):
            client.submit(requests("a", "b"), print)
    behind.takes = 2
    client.submit(requests("a", "b"), print)


def test_an_id_that_is_in_flight_takes_no_room():
    client, behind = bounded(1)
    client.submit(requests("a", "b", "c"), print)
    told = []
    client.submit(requests("a"), told.extend)
    assert told[0].finished.error == "request id 'a' is already in flight"
    behind.end("a")
    client.submit(requests("a"), print)
    with pytest.raises(QueueFull):
        client.submit(requests("d"), print)


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"n_slots": 4, "strategy": "batched", "instances": 2}, 4),  # the instances share the 4 slots
        ({"n_slots": 4, "strategy": "sequential"}, 1),
        ({"n_slots": 4, "strategy": "multi-instance", "instances": 3}, 12),
        ({"n_slots": 4, "strategy": "multi-instance", "instances": 3, "instance_strategy": "length-sorted"}, 3),
    ],
)
def test_what_can_run_does_not_count_as_waiting(options, most):
    client, _ = bounded(0, **options)
    client.submit(requests(*map(str, range(most))), print)
    with pytest.raises(QueueFull):
        client.submit(requests("one more"), print)


def test_background_requests_have_a_queue_of_their_own():
    client, behind = bounded(1)
    client.submit(requests("a", "b", "c", background=True), print)
    with pytest.raises(QueueFull, match="1 more would be 4 in flight in the background; allowed are 2 that run"):
        client.submit(requests("d", background=True), print)
    client.submit(requests("e", "f", "g"), print)  # requests in the background do not count for these
    with pytest.raises(QueueFull, match="1 more would be 4 in flight; allowed"):
        client.submit(requests("h"), print)
    behind.end("a", "e")
    client.submit([*requests("i"), *requests("j", background=True)], print)
    with pytest.raises(QueueFull, match="background"):
        client.submit(requests("k", background=True), print)
