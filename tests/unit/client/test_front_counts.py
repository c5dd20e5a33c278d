"""Counts of requests: submitted = ok + errors + aborted + in flight, whatever the engine does."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamabatch.client.front_client import FrontClient
from llamabatch.errors import EngineClosedError
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput, Timings
from llamabatch.request.request import Request
from tests.unit.client.behind import Behind


def ended(request: Request, reason: FinishReason) -> SequenceOutput:
    error = "it failed" if reason is FinishReason.ERROR else None
    whole = RequestOutput(
        request.request_id, None, (), (CompletionOutput(0, "", (), reason),), error, Timings(total_s=2.0)
    )
    return SequenceOutput(request.request_id, (), "", whole)


actions = st.lists(
    st.one_of(
        st.lists(st.sampled_from("abcdefg"), max_size=4),
        st.sampled_from(FinishReason),
        st.just("close"),
        st.just("bad prompt"),
    ),
    max_size=40,
)


@given(actions)
def test_every_request_is_counted_once(actions):
    behind = Behind()
    client = FrontClient(behind)
    told: list[FinishReason] = []
    n_submitted = 0

    def sink(outputs):
        told.extend(o.finished.finish_reason for o in outputs if o.finished is not None)
        assert client.stats().in_flight >= 0  # a call from within a sink causes no deadlock

    for action in actions:
        if isinstance(action, list):
            before = len(told)
            try:
                client.submit([Request(name, (1,)) for name in action], sink)
                n_submitted += len(action)
            except EngineClosedError:
                n_submitted += len(told) - before  # a refused call counts only those of its requests that had ended
        elif action == "close":
            behind.takes = 1
        elif action == "bad prompt":
            client.count_refused([ended(Request("x", (1,)), FinishReason.ERROR)])
            told.append(FinishReason.ERROR)
            n_submitted += 1
        elif behind.in_flight:
            _, (request, sink) = behind.in_flight.popitem()
            sink([SequenceOutput(request.request_id, (1,), "a"), ended(request, action)])
        stats = client.stats()
        assert stats.submitted == n_submitted
        assert stats.finished_stop == told.count(FinishReason.STOP)
        assert stats.finished_length == told.count(FinishReason.LENGTH)
        assert stats.errors == told.count(FinishReason.ERROR)
        assert stats.aborted == told.count(FinishReason.ABORT)
        assert stats.e2e_s.count == stats.ok
        assert stats.e2e_s.sum_s == 2.0 * stats.ok
        assert stats.in_flight == len(behind.in_flight)
        assert stats.decode_rows == 3  # other figures are the engine's own


def test_an_interrupt_in_the_middle_of_a_submit_leaves_nothing_in_flight():
    behind = Behind()
    behind.submit = lambda requests, sink, stream=False: (_ for _ in ()).throw(KeyboardInterrupt)
    client = FrontClient(behind)
    with pytest.raises(KeyboardInterrupt):
        client.submit([Request("a", (1,))], print)
    assert (client.stats().submitted, client.stats().in_flight) == (0, 0)


class Watching:
    def __init__(self, order):
        self.order = order

    def stop(self):
        self.order.append("first")


def test_what_is_to_happen_at_the_end_happens_first_and_once():
    order = []
    plan = SimpleNamespace(config=SimpleNamespace(seed=None, adapters=()))
    client = FrontClient(SimpleNamespace(plan=plan, model=None, close=lambda: order.append("closed")))
    watching = Watching(order)
    client.at_close(watching.stop)
    client.at_close(Watching([]).stop)  # freed at once, so it is not called
    client.close()
    client.close()
    assert order == ["first", "closed", "closed"]
