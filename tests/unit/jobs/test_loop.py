"""The loop of a job: every row once, whatever happens to rows, the engine, the input, and the user's patience."""

import itertools
import os
import signal
import threading

import pytest

from llamabatch.chat import template as chat_template
from llamabatch.errors import EngineClosedError, InputError
from llamabatch.jobs.input.reader import ReadAhead
from llamabatch.jobs.loop import Feed, Loop, Stop, seed_of
from llamabatch.jobs.rows import Row
from llamabatch.jobs.stats import Counts
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.utils import interrupts
from tests.unit.jobs_fakes import N_CTX, FakeClient, FakeSink, rows
from tests.waiting import PATIENCE_S, until


class Case:
    def __init__(self, client, source, stop=None, tick=lambda: None, slots=8, seed=5):
        self.sink, self.counts, self.stop = FakeSink(), Counts(), Stop() if stop is None else stop
        self.feed = Feed(client, iter(source), slots, N_CTX, seed, cancelled=self.stop.__bool__)
        self.loop = Loop(client, self.feed, self.sink, self.counts, self.stop, tick)


def test_every_row_ends_once_in_whatever_order_the_engine_finishes():
    case = Case(FakeClient(held=5), rows(1000, bad={3, 999}))
    case.loop.run()
    assert sorted(case.sink.outputs) == [n for n in range(1000) if n not in (3, 999)]
    assert case.sink.errors == {3: "rows, line 4: bad", 999: "rows, line 1000: bad"}
    assert all(output.text == f"of prompt {number}" for number, output in case.sink.outputs.items())
    assert (case.counts.ok, case.counts.failed, case.counts.generated_tokens) == (998, 2, 998 * 3)


def test_a_row_that_cannot_be_run_is_an_error_of_its_own():
    source = list(rows(5))
    source[1] = Row(1, "1", "completion", "x" * (N_CTX + 1), place="rows, line 2")
    source[2] = Row(2, "2", "chat", [{"role": "user", "content": "hi"}])
    source[3] = Row(3, "3", "embedding", "text")
    source[4] = Row(4, "4", "completion", "\ud800")
    case = Case(FakeClient(), source)
    case.loop.run()
    assert list(case.sink.outputs) == [0]
    assert case.counts.errors[0] == f"rows, line 2: {case.sink.errors[1]}"
    assert f"{N_CTX + 1} tokens" in case.sink.errors[1]
    assert "no chat template" in case.sink.errors[2]
    assert "gives no embeddings" in case.sink.errors[3]
    assert "surrogates" in case.sink.errors[4]


def test_an_error_from_the_engine_is_the_rows_own_while_the_engine_lives():
    case = Case(FakeClient(failing={"prompt 2"}), rows(5))
    case.loop.run()
    assert case.sink.outputs[2].error == "it cannot be run"
    assert (case.counts.ok, case.counts.failed) == (4, 1)
    assert case.counts.errors == ["rows, line 3: it cannot be run"]


@pytest.mark.parametrize("dies_after", [0, 1, 32, 100])
def test_an_engine_that_is_gone_writes_no_errors_and_loses_nothing(dies_after):
    case = Case(FakeClient(held=3, dies_after=dies_after), rows(200))
    with pytest.raises(EngineClosedError):
        case.loop.run()
    assert len(case.sink.outputs) == dies_after
    assert all(output.error is None for output in case.sink.outputs.values())


def test_an_engine_that_was_given_up_writes_no_errors_even_if_another_one_is_there_by_now():
    error = "the engine process ended 9 times in a row without a result, at last with SIGKILL"
    case = Case(FakeClient(failing={"prompt 2"}, error=error), rows(5))
    with pytest.raises(EngineClosedError, match="9 times in a row"):
        case.loop.run()
    assert sorted(case.sink.outputs) == [0, 1, 3, 4]


def test_what_is_in_flight_is_bounded():
    consumed = 0

    def counted():
        nonlocal consumed
        for row in rows(5000):
            consumed += 1
            yield row

    client = FakeClient(held=10**6)
    case = Case(client, counted(), slots=8)
    case.loop.run()
    assert consumed == 5000 == len(case.sink.outputs)
    assert client.most_in_flight <= 2 * 64


def test_long_prompts_count_by_their_tokens():
    feed = Feed(FakeClient(), (Row(n, str(n), "completion", "x" * 100) for n in range(10**6)), 4096, N_CTX, 0)
    while feed.wants_more:
        feed.next_requests()
    assert feed.n_in_flight * 100 <= 2 * 4096 * N_CTX + 100
    for request_id in feed.in_flight:
        feed.pop(request_id)
    assert feed.wants_more
    assert len(feed.next_requests()[0]) > 1


def test_groups_keep_the_order_of_the_rows():
    client = FakeClient()
    Case(client, rows(300), slots=16).loop.run()
    groups = [request.group for request in client.requests]
    assert groups == sorted(groups)
    assert [len(list(same)) for _, same in itertools.groupby(groups)] == [64, 64, 64, 64, 44]


def test_seeds_follow_from_the_row_not_from_when_it_runs():
    client = FakeClient()
    source = list(rows(3))
    source[1] = Row(1, "1", "completion", "own", SamplingParams(seed=77))
    Case(client, source[1:], seed=9).loop.run()
    assert [request.seed for request in client.requests] == [77, seed_of(9, 2)]


def test_seeds_of_neighbours_have_nothing_in_common():
    seeds = [seed_of(job, number) for job in range(4) for number in range(1000)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    flips = [bin(a ^ b).count("1") for a, b in itertools.pairwise(seeds)]
    assert 30 < sum(flips) / len(flips) < 34
    assert seed_of(0, 0) == 0xE220A8397B1DCDAF  # the generator's published first output for seed 0


def test_an_input_that_breaks_off_is_an_error_after_the_rows_before_it():
    def breaking():
        yield from rows(40)
        raise InputError("rows cannot be read: Input/output error")

    case = Case(FakeClient(held=5), breaking())
    with pytest.raises(InputError, match="cannot be read"):
        case.loop.run()
    assert len(case.sink.outputs) == 40


def test_a_slow_input_holds_up_neither_results_nor_the_end():
    gate = threading.Event()

    def slow():
        yield from rows(3)
        gate.wait(PATIENCE_S)

    case = Case(FakeClient(), ReadAhead(slow()))
    thread = threading.Thread(target=case.loop.run)
    thread.start()
    until(lambda: len(case.sink.outputs) >= 3)
    gate.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_read_ahead_gives_errors_and_the_end():
    def failing():
        yield 1
        raise InputError("no")

    ahead = ReadAhead(failing())
    with pytest.raises(InputError):
        [next(ahead) for _ in range(10**6)]
    with pytest.raises(InputError):
        next(ahead)
    assert [item for item in ReadAhead(iter([1, 2])) if item is not None] == [1, 2]


def test_stop_ends_it_at_once_with_what_is_finished():
    stop = Stop()
    case = Case(FakeClient(held=20), rows(10**6), stop, tick=lambda: len(case.sink.outputs) > 500 and stop.request())
    case.loop.run()
    assert 500 < len(case.sink.outputs) < 5000


def test_stop_reaches_a_row_whose_chat_template_takes_long(monkeypatch):
    monkeypatch.setattr(chat_template, "BUDGET", 2**60)  # for ever, as far as a test can tell
    monkeypatch.setattr(chat_template, "MAX_BUDGET", 2**60)
    client, stop = FakeClient(), Stop()
    monkeypatch.setattr(client.model, "chat_template", "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3)
    timer = threading.Timer(0.1, stop.request)

    def source():
        yield from rows(150)
        timer.start()
        yield Row(150, "150", "chat", [{"role": "user", "content": "hi"}])
        yield from list(rows(200))[151:]

    case = Case(client, source(), stop)
    case.loop.run()
    timer.join()
    assert stop
    assert 0 < len(case.sink.outputs) <= 150
    assert not case.sink.errors, "the row is still to run"


def test_a_signal_that_is_sent_twice_is_one():
    """`timeout` signals the process and then its group: the second must not end the closing that the first began."""
    stop = Stop()
    with stop.listening():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
    assert stop.signum == signal.SIGTERM


def test_signals_are_noted_while_the_job_runs_and_raised_around_it(monkeypatch):
    monkeypatch.setattr(interrupts, "SAME_S", 0.0)  # as a user's signals, one after another
    stop, woken = Stop(), []
    with stop.listening():
        with stop.noted(lambda: woken.append(True)):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.signum == signal.SIGTERM
        assert len(woken) == 2
        with pytest.raises(KeyboardInterrupt), stop.noted(lambda: None):
            os.kill(os.getpid(), signal.SIGINT)  # the third signal
    early = Stop()
    with early.listening(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGHUP)
    assert early.signum == signal.SIGHUP
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = Stop()
        with stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop
    finally:
        signal.signal(signal.SIGHUP, before)
