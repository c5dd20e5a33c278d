"""FrontClient, the one owner of a request: ids, calls that are rolled back, sinks that raise, and the watcher."""

import contextlib
import gc
import logging
import threading
import time
import weakref

import pytest

from llamabatch.client.base import emit, failure
from llamabatch.client.front_client import FrontClient
from llamabatch.errors import EngineClosedError, EngineError, MemoryPlanError
from llamabatch.request.delta import Delta
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.request import Request
from llamabatch.utils.cancellation import is_cancelled
from tests.unit.client.behind import Behind


class Parser:
    """Returns each piece in capitals. The end repeats all that it read, so that a piece that is read twice shows."""

    has_reasoned = has_called = False

    def __init__(self):
        self.read = ""

    def feed(self, text):
        if text == "bad":
            raise ValueError("a bad piece")
        self.read += text
        return Delta(text=text.upper())

    def finish(self, text):
        self.read += text
        return Delta(text=text.upper() + f"({self.read})")


def parsed(name):
    return Request(name, (1,), make_parser=lambda request, index: Parser())


def last(name, text):
    whole = RequestOutput(name, None, (), (CompletionOutput(0, text, (1,), FinishReason.STOP),))
    return SequenceOutput(name, (1,), text, whole)


def piece(name, text):
    return SequenceOutput(name, (1,), text)


def raising(times, told):
    """Returns a sink that raises `times` times before it accepts outputs."""
    calls = []

    def sink(outputs):
        calls.append(outputs)
        if len(calls) <= times:
            raise OSError("not now")
        told.extend(outputs)

    return sink


def test_an_id_in_flight_is_refused_and_the_first_goes_on():
    behind, first, second = Behind(), [], []
    client = FrontClient(behind)
    client.submit([Request("a", (1,))], first.extend)
    client.submit([Request("a", (2,)), Request("b", (2,)), Request("b", (3,))], second.extend)
    assert [(r.request_id, r.prompt_token_ids) for r in behind.requests] == [("a", (1,)), ("b", (2,))]
    assert [output.finished.error for output in second] == [
        "request id 'a' is already in flight",
        "request id 'b' is already in flight",
    ]
    behind.sinks[0]([last("a", "x")])
    assert [output.finished.text for output in first] == ["x"]
    counts = client.in_flight.figures()
    assert (counts["submitted"], counts["errors"], counts["finished_stop"], len(client.in_flight)) == (4, 2, 1, 1)


def test_an_id_may_come_again_as_soon_as_its_caller_has_the_last_output():
    behind, told = Behind(), []
    client = FrontClient(behind)

    def again(outputs):
        told.extend(outputs)
        if len(told) == 1:
            client.submit([Request("a", (2,))], again)

    client.submit([Request("a", (1,))], again)
    behind.sinks[0]([last("a", "x")])
    assert [r.prompt_token_ids for r in behind.requests] == [(1,), (2,)]
    assert [output.finished.error for output in told] == [None]


def test_a_call_that_is_refused_leaves_the_requests_of_others_alone():
    behind, told = Behind(), []
    client = FrontClient(behind)
    client.submit([Request("a", (1,))], told.extend)
    behind.takes = 0
    with pytest.raises(EngineClosedError):
        client.submit([Request("a", (2,)), Request("b", (2,))], told.extend)
    assert (len(client.in_flight), client.in_flight.figures()["submitted"], told) == (1, 1, [])


def test_pieces_of_unparsed_requests_go_on_as_the_list_that_came():
    behind, told = Behind(), []
    client = FrontClient(behind)
    client.submit([Request("a", (1,)), parsed("b")], told.append, stream=True)
    for outputs in ([piece("a", "x")], [last("a", "x")]):
        behind.sinks[0](outputs)
        assert told[-1] is outputs


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_sink_that_raises_at_the_end_gets_the_parsed_end_again(times):
    behind, told = Behind(), []
    client = FrontClient(behind)
    client.submit([parsed("a"), parsed("b")], raising(times, told), stream=True)
    emit(behind.sinks[0], [piece("a", "x"), piece("b", "y"), last("a", "z")])
    if times < 2:  # after two errors, the engine has ended a request whose piece raised alone
        assert [output.text for output in told] == ["X", "Y", "Z(xz)"]
    counts = client.in_flight.figures()
    assert (counts["finished_stop"], len(client.in_flight)) == (1, 1)
    emit(behind.sinks[0], [failure(parsed("a"), "given up"), last("b", "!")])
    assert told[-1].text == "!(y!)"
    assert not behind.sinks[0]._kept
    assert not len(client.in_flight)


def test_a_parser_that_raises_lets_no_other_read_a_piece_twice():
    behind, told = Behind(), []
    client = FrontClient(behind)
    client.submit([parsed("a"), parsed("b"), parsed("c")], told.extend, stream=True)
    failed = emit(behind.sinks[0], [piece("a", "x"), piece("b", "bad"), piece("c", "y")])
    assert list(failed) == ["b"]
    emit(behind.sinks[0], [last("a", "."), failure(parsed("b"), failed["b"]), last("c", ".")])
    assert [output.text for output in told] == ["X", "Y", ".(x.)", "()", ".(y.)"]
    assert not behind.sinks[0]._kept


def test_a_sink_that_always_raises_fills_no_memory(caplog):
    caplog.set_level(logging.CRITICAL + 1, "llamabatch")  # formatting 10,000 tracebacks would take 20 seconds
    behind = Behind()
    client = FrontClient(behind)
    client.submit([parsed(str(at)) for at in range(5000)], raising(10**9, []), stream=True)
    for at in range(5000):
        emit(behind.sinks[0], [piece(str(at), "x")])
        emit(behind.sinks[0], [failure(parsed(str(at)), "given up")])
    assert len(behind.sinks[0]._kept) <= 4096
    assert not len(client.in_flight)


class Watching:
    def __init__(self):
        self.told, self.raises = [], 0

    def enter(self, requests, now):
        self.told += [("in", each.request_id) for each in requests]

    def leave(self, request_id, output, now):
        if self.raises:
            self.raises -= 1
            raise ValueError("not now")
        self.told.append(("out" if output is None else "ended", request_id))


def test_a_watcher_is_told_of_each_begin_and_end_once():
    behind, watching, told = Behind(), Watching(), []
    client = FrontClient(behind)
    client.in_flight.watch(watching)
    client.submit([Request("a", (1,)), Request("b", (1,))], told.extend)
    client.submit([Request("a", (1,))], told.extend)
    watching.raises = 1
    behind.sinks[0]([last("a", "x")])
    behind.takes = 0
    with pytest.raises(EngineClosedError):
        client.submit([Request("c", (1,))], told.extend)
    assert watching.told == [("in", "a"), ("in", "b"), ("ended", "a"), ("in", "c"), ("out", "c")]
    watching.raises = 99  # a watcher that raises at each end costs no output
    behind.sinks[0]([last("b", "y")])
    assert (told[-1].finished.text, len(client.in_flight)) == ("y", 0)


def test_a_watcher_that_is_gone_is_not_told():
    behind = Behind()
    client = FrontClient(behind)
    client.in_flight.watch(Watching())
    client.submit([Request("a", (1,))], print)


def test_the_front_is_freed_at_once_also_with_requests_in_flight():
    gc.disable()
    try:
        behind = Behind()
        client = FrontClient(behind)
        client.submit([parsed("a")], [].extend, stream=True)
        gone = weakref.ref(client)
        del client
        assert gone() is None
        behind.sinks[0]([last("a", "x")])
    finally:
        gc.enable()


class Sleeper(Behind):
    """An engine that can be closed, and made again."""

    closed = False

    def close(self):
        self.closed = True


def sleeping(connect):
    client = FrontClient(Sleeper(), connect=connect)
    client.sleep()
    return client


def test_what_wakes_waits_for_the_load_and_looks_do_not_wake():
    made = []
    client = sleeping(lambda config: made.append(Sleeper()) or made[-1])
    assert client.stats().waiting == 0
    assert client.states() == []
    assert client.outage is None
    assert not made
    client.submit([Request("a", (1,))], [].extend)
    assert list(made[0].in_flight) == ["a"]
    assert client.stats().decode_rows == 6  # 3 of each of the two engines
    with pytest.raises(EngineError, match="in use by 1 request"):
        client.sleep()


def test_a_load_that_fails_leaves_it_asleep_and_the_next_use_tries_again():
    made = [Sleeper()]

    def connect(config):
        if len(made) == 1:
            made.append(None)
            raise MemoryPlanError("too large by now")
        return made[0]

    client = sleeping(connect)
    for expected in (MemoryPlanError, None):
        with contextlib.nullcontext() if expected is None else pytest.raises(expected):
            client.submit([Request("a", (1,))], [].extend)
        assert client.is_asleep == (expected is not None)
        assert len(client.in_flight) == (expected is None)


def test_a_sink_neither_puts_to_sleep_nor_wakes():
    told = []
    client = FrontClient(Sleeper(), connect=lambda config: Sleeper())

    def sink(outputs):
        with pytest.raises(EngineError, match="a sink cannot put"):
            client.sleep()
        told.extend(outputs)

    client.submit([Request("a", (1,))], sink)
    behind = client.inner
    emit(behind.sinks[0], [last("a", "x")])
    client.sleep()

    def late(outputs):
        with pytest.raises(EngineClosedError, match="a sink cannot wake it"):
            client.submit([Request("b", (1,))], sink)
        told.extend(outputs)

    emit(late, [last("a", "x")])
    assert len(told) == 2
    assert client.is_asleep


def test_closing_cancels_the_load_that_wakes():
    entered, seen = threading.Event(), []

    def connect(config):
        entered.set()
        while not is_cancelled():
            time.sleep(0.001)
        raise EngineClosedError("the load was cancelled")

    client = sleeping(connect)

    def wake():
        try:
            client.submit([Request("a", (1,))], [].extend)
        except EngineClosedError as error:
            seen.append(str(error))

    waking = threading.Thread(target=wake)
    waking.start()
    assert entered.wait(60)
    client.close()
    waking.join(60)
    assert seen == ["the load was cancelled"]
    with pytest.raises(EngineClosedError):
        client.stats()
