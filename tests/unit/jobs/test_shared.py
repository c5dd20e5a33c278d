"""A job on an engine that others also use: its tier, its share of the queue, what it leaves behind when it ends."""

import json
import threading
import time
from types import SimpleNamespace

import pytest

from llamabatch.errors import ConfigError, EngineClosedError, QueueFull
from llamabatch.jobs import JobInterrupted, OutputOptions, Settings, run
from llamabatch.jobs.loop import Feed, Loop, Stop
from llamabatch.jobs.rows import Row
from llamabatch.jobs.shared import SharedEngine
from llamabatch.jobs.stats import Counts
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.sampling_params import SamplingParams
from tests.unit.configs import resolved
from tests.unit.jobs_fakes import N_CTX, FakeClient, FakeModel, FakeSink, finished, rows


class HeldClient:
    """An engine that ends requests when a test says so, and accepts at most `room` requests at once."""

    def __init__(self, room=10**9, max_queue=None):
        self.model = FakeModel()
        self.plan = SimpleNamespace(config=resolved("fake", n_ctx=N_CTX, n_slots=4, max_queue=max_queue))
        self.adapters = []
        self.in_flight = {}
        self.seen = []
        self.aborted = []
        self.most = 0
        self.room = room
        self.closed = False
        self.lock = threading.RLock()

    def submit(self, requests, sink, *, stream=False):
        if self.closed:
            raise EngineClosedError("the engine is closed")
        with self.lock:
            if len(self.in_flight) + len(requests) > self.room:
                raise QueueFull("no room")
            self.seen += requests
            self.in_flight |= {request.request_id: (request, sink) for request in requests}
            self.most = max(self.most, len(self.in_flight))

    def end(self, n=10**9):
        for _ in range(n):
            with self.lock:
                if not self.in_flight:
                    return
                request, sink = self.in_flight.pop(next(iter(self.in_flight)))
            sink([finished(request, text=f"of {request.prompt}")])

    def abort(self, request_ids):
        for request_id in list(request_ids):
            with self.lock:
                request, sink = self.in_flight.pop(request_id, (None, None))
            if request is not None:
                self.aborted.append(request_id)
                completion = CompletionOutput(0, "", (), FinishReason.ABORT)
                output = RequestOutput(request_id, request.prompt, request.prompt_token_ids, (completion,))
                sink([SequenceOutput(request_id, (), "", output)])

    def stats(self):
        if self.closed:
            raise EngineClosedError("the engine is closed")
        return SimpleNamespace(running=0)

    def close(self):
        raise AssertionError("a job closes no shared engine")


class Case:
    def __init__(self, client, source, most_rows=6):
        self.client, self.sink, self.counts, self.stop = client, FakeSink(), Counts(), Stop()
        self.shared = SharedEngine(client, most_rows)
        self.ticks = []
        feed = Feed(client, iter(source), 4, N_CTX, 5, None, self.stop.__bool__, self.shared)
        self.loop = Loop(client, feed, self.sink, self.counts, self.stop, self.tick, self.shared)

    def tick(self):
        if self.ticks:
            self.ticks.pop(0)()
        else:
            self.client.end()


def test_rows_are_background_whatever_they_say_and_no_more_than_asked_are_in_flight():
    source = list(rows(40))
    source[3] = Row(3, "3", "completion", "mine", SamplingParams(background=False, priority=-9, temperature=0.5))
    case = Case(HeldClient(), source)
    case.loop.run()
    assert sorted(case.sink.outputs) == list(range(40))
    assert {(r.params.background, r.params.priority) for r in case.client.seen} == {(True, 0)}
    assert [r.params.temperature for r in case.client.seen if r.prompt == "mine"] == [0.5]
    assert case.client.most <= 6


def test_promoted_rows_in_flight_go_out_again_and_end_once():
    case = Case(HeldClient(), rows(20))
    case.ticks = [lambda: None, case.shared.promote, lambda: case.client.end(2)]
    case.loop.run()
    assert sorted(case.sink.outputs) == list(range(20))
    assert case.counts.failed == 0
    assert len(case.client.aborted) == 6
    again = [r for r in case.client.seen if not r.params.background]
    assert {r.prompt for r in again} == {f"prompt {n}" for n in range(20)}
    first = {r.prompt: r.seed for r in case.client.seen if r.params.background}
    assert all(r.seed == first.get(r.prompt, r.seed) for r in again), "the texts would differ"


def test_a_full_queue_is_waited_for_and_takes_what_it_can():
    client = HeldClient(room=2)
    case = Case(client, rows(10))
    case.loop.run()
    assert sorted(case.sink.outputs) == list(range(10))
    assert case.counts.failed == 0
    assert client.most == 2


def test_promotion_reaches_rows_that_wait_for_a_place():
    client = HeldClient(room=2)
    case = Case(client, rows(10))
    case.ticks = [lambda: None, case.shared.promote]
    case.loop.run()
    assert sorted(case.sink.outputs) == list(range(10))
    assert sum(r.params.background for r in client.seen) == 2


def test_a_row_that_no_queue_would_take_is_an_error_and_not_an_endless_wait():
    source = [Row(0, "0", "completion", "many", SamplingParams(n=9)), *list(rows(2))[1:]]
    case = Case(HeldClient(max_queue=4), source)
    case.loop.run()
    assert case.sink.errors == {0: "n or best_of is 9; the engine and its queue take 8 continuations"}
    assert list(case.sink.outputs) == [1]


def test_an_engine_that_closes_writes_no_aborted_rows():
    case = Case(HeldClient(), rows(10))

    def close():
        case.client.closed = True
        case.client.abort(list(case.client.in_flight))

    case.ticks = [lambda: case.client.end(3), close]
    with pytest.raises(EngineClosedError):
        case.loop.run()
    assert len(case.sink.outputs) == 3
    assert not case.sink.errors


def test_a_stop_leaves_nothing_in_the_engine_and_the_next_run_does_the_rest(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(50)))
    settings = Settings(str(source), str(out), writing=OutputOptions(order="finished"))
    client, stop = HeldClient(), Stop()

    def serve():
        while not stop:
            if len(client.in_flight) > 1:  # one request is in flight when the job stops
                client.end(1)
            time.sleep(0.001)
            if out.exists() and out.read_bytes().count(b"\n") >= 10:
                stop.request()

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(JobInterrupted) as interrupted:
        run(settings, shared=SharedEngine(client), stop=stop)
    thread.join()
    assert client.in_flight == {}
    assert client.aborted
    done = interrupted.value.summary.counts.ok
    assert 10 <= done < 50
    engine = FakeClient()
    engine.abort = lambda ids: None
    summary = run(settings, shared=SharedEngine(engine))
    assert (summary.counts.done_before, summary.counts.ok) == (done, 50 - done)
    assert not engine.closed
    assert sorted(json.loads(line)["row"] for line in out.read_text().splitlines()) == list(range(50))


def test_most_rows_is_checked():
    assert SharedEngine(HeldClient()).most_rows == 8
    with pytest.raises(ConfigError, match="most_rows is 0"):
        SharedEngine(HeldClient(), 0)
