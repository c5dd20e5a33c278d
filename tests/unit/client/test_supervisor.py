"""A supervisor over fake children: every request, question and close is completed."""

import itertools
import queue
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import replace

import pytest

from llamabatch.client import supervisor
from llamabatch.client.base import Heartbeat, Outage
from llamabatch.client.codec import pack, unpack
from llamabatch.client.restart_policy import RestartPolicy, gave_up
from llamabatch.client.router import Router
from llamabatch.client.supervisor import Supervisor
from llamabatch.config import EngineConfig
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import AdapterError, EngineClosedError, EngineError, ModelFileError
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.request import Request
from tests.waiting import PATIENCE_S, until

QUICK = RestartPolicy(most=3, first_s=0.01, longest_s=0.02, hang_s=0.1)


class FakeChild:
    """A child that a test controls. The first methods are those of Child."""

    def __init__(self, config, listener, number):
        self.config, self.listener, self.pid = config, listener, number
        self.ready = Future()
        self.exit_reason, self.n_received, self.reader_is_busy = "", 0, True
        self.has_beaten, self.from_outside = True, False
        self.sent = queue.SimpleQueue()
        self.dead = False
        self.killed_because = None

    def submit(self, requests, *, stream):
        for request in requests:
            self.sent.put(("submit", request, stream))
        return {}

    def abort(self, request_ids):
        self.sent.put(("abort", *request_ids))

    def ask(self, kind, *arguments):
        if self.dead:
            raise EngineClosedError(self.exit_reason)
        answer = Future()
        self.sent.put((kind, *arguments, answer))
        return answer

    def heartbeat(self, up, restarts):
        return Heartbeat(self.pid, up, None, None, restarts)

    def ask_to_end(self):
        self.die("close")

    def kill(self, reason=None):
        self.killed_because = reason
        self.die(reason or "SIGKILL")

    def end(self):
        self.die("SIGKILL")

    # Methods for a test.

    def start(self):
        self.ready.set_result(None)
        self.listener.on_ready(self)

    def die(self, reason="SIGSEGV"):
        if not self.dead:
            self.dead, self.exit_reason = True, reason
            if not self.ready.done():
                self.ready.set_exception(EngineError(f"while it started: {reason}"))
            self.listener.on_exit(self)

    def got(self, *kinds):
        """Receives the next messages. Returns their arguments; for a submit, the id of its request."""
        found = []
        for kind in kinds:
            message = self.sent.get(timeout=60)
            assert message[0] == kind, message
            found.append(message[1].request_id if kind == "submit" else message[1:])
        return found

    def admit(self, *request_ids):
        self.listener.on_admitted(self, list(request_ids))

    def emit(self, request_id, *token_ids, error=None, done=True):
        completion = CompletionOutput(0, "", token_ids, FinishReason.ERROR if error else FinishReason.LENGTH)
        whole = RequestOutput(request_id, None, (1,), (completion,), error) if done else None
        self.listener.on_outputs(self, unpack(pack([SequenceOutput(request_id, token_ids, "", whole)])))


class World:
    """A supervisor, the children that it starts, and what it told its callers."""

    def __init__(self, policy=QUICK, adapters=(), clock=time.monotonic):
        self.children = queue.SimpleQueue()
        numbers = itertools.count(1)

        def start_child(config, environment, program, listener):
            child = FakeChild(config, listener, next(numbers))
            self.children.put(child)
            return child

        config = EngineConfig("tiny", adapters=adapters)
        self.supervisor = Supervisor(config, policy=policy, start_child=start_child, clock=clock)
        self.told = queue.SimpleQueue()
        self.supervisor.start()

    def newest(self):
        return self._newest

    def child(self, started=True):
        child = self._newest = self.children.get(timeout=60)
        if started:
            child.start()
            until(lambda: self.supervisor.up)
        return child

    def submit(self, *names, stream=False):
        self.supervisor.submit([Request(name, (1,)) for name in names], self.told.put, stream=stream)

    def end_of(self, name):
        [output] = self.told.get(timeout=60)
        assert output.request_id == name
        return output.finished


@pytest.fixture
def world():
    world = World()
    yield world
    world.supervisor.end()
    assert world.supervisor.ended


def test_requests_of_a_child_that_dies_go_to_the_next_one(world):
    first = world.child()
    assert world.supervisor.outage is None
    world.submit("a", "b", "c")
    assert first.got("submit", "submit", "submit") == ["a", "b", "c"]
    first.emit("a", 5)
    assert world.end_of("a").token_ids == (5,)
    first.die()
    second = world.child()
    assert second.got("submit", "submit") == ["b", "c"]
    second.emit("a", 6)  # the caller has the output already
    second.emit("b", 7)
    assert world.end_of("b").token_ids == (7,)
    assert world.supervisor.heartbeat == Heartbeat(2, True, None, None, 1)


def test_suspects_are_tried_alone_and_the_culprit_ends(world):
    child = world.child()
    world.submit("a", "b", "c")
    child.got("submit", "submit", "submit")
    child.admit("a", "b")
    child.die()
    for _ in range(2):
        child = world.child()
        assert child.got("submit") == ["b"]
        child.admit("b")
        assert child.sent.empty()
        child.die("SIGABRT")
    assert "2 times while it computed this request alone, at last with SIGABRT" in world.end_of("b").error
    child = world.child()
    assert child.got("submit", "submit") == ["a", "c"]
    for name in "ac":
        child.emit(name, 1)
        assert world.end_of(name).error is None
    assert world.supervisor.heartbeat.restarts == 3


def test_a_stream_is_taken_up_with_its_tokens(world):
    first = world.child()
    world.submit("a", stream=True)
    first.got("submit")
    first.admit("a")
    first.emit("a", 3, 4, done=False)
    assert world.told.get(timeout=60)[0].token_ids == (3, 4)
    first.die()
    second = world.child()
    _, request, stream = second.sent.get(timeout=60)
    assert stream
    assert request.resumed.token_ids == (3, 4)
    second.emit("a", 5)
    assert world.told.get(timeout=60)[0].token_ids == (5,)


def test_the_limit_of_restarts_ends_everything():
    world = given_up()
    until(lambda: not world.supervisor.alive)
    outage = world.supervisor.outage
    assert "4 times in a row" in outage.reason
    assert outage.retry_in_s == AGAIN.retry_s
    for call in (lambda: world.submit("b"), lambda: world.supervisor.call("load_prefix", "x")):
        with pytest.raises(EngineClosedError, match="4 times in a row"):
            call()
    assert world.supervisor.stats().restarts == 3  # the supervisor is not closed, so monitors can still ask
    world.supervisor.end()


def test_no_engine_is_started_on_another_file_of_the_same_name(monkeypatch):
    found = ["the first"]
    monkeypatch.setattr(supervisor, "model_identity", lambda path: {"sha256": found[-1]})
    world = World(AGAIN)
    child = world.child()
    world.submit("a")
    found.append("another")
    child.die()
    assert "replaced since the start" in world.end_of("a").error
    with pytest.raises(EngineClosedError, match="replaced since the start"):
        world.submit("b")
    assert world.children.empty()
    world.supervisor.end()


def test_nobody_waits_for_more_tries_where_the_file_is_gone():
    world = World(AGAIN, clock=Clock())
    world.child().die()
    world.submit("a")
    child = world.child(started=False)
    child.ready.set_exception(ModelFileError("x.gguf does not exist"))
    child.die("exit code 1")
    assert world.end_of("a").error == "the engine process ended, and no other one can start: x.gguf does not exist"
    assert gave_up("the engine process ended, and no other one can start: x.gguf does not exist")
    assert world.supervisor.outage.retry_in_s == AGAIN.retry_s
    pass_time(world, AGAIN.retry_s)
    child = world.child()  # the file is there again
    world.submit("b")
    assert child.got("submit") == ["b"]
    world.supervisor.end()


def test_a_result_sets_the_limit_back(world):
    child = world.child()
    for number in range(8):
        world.submit(str(number))
        child.got("submit")
        child.emit(str(number), 1)
        world.end_of(str(number))
        child.die()
        child = world.child()
    assert world.supervisor.heartbeat.restarts == 8


def test_what_was_loaded_goes_before_what_is_asked():
    world = World(adapters=(("first", "/first.gguf"),))
    child = world.child()
    assert child.config.adapters == (("first", "/first.gguf"),)
    answers = queue.SimpleQueue()

    def ask():
        for kind, *arguments in (("load_adapter", "a", "a.gguf"), ("load_prefix", "p"), ("unload_adapter", "first")):
            answers.put(world.supervisor.call(kind, *arguments))

    threading.Thread(target=ask).start()
    for _ in range(3):
        *_, answer = child.sent.get(timeout=60)
        answer.set_result(7)
        assert answers.get(timeout=60) == 7
    world.submit("r")
    child.got("submit")
    child.die()
    child = world.child()
    assert child.config.adapters == ()
    assert [message[:-1] for message in child.got("load_adapter", "load_prefix")] == [("a", "a.gguf"), ("p",)]
    assert child.got("submit") == ["r"]
    world.supervisor.end()


def test_a_refusal_is_its_askers_and_nothing_is_loaded_again(world):
    child = world.child()
    raised = queue.SimpleQueue()

    def ask():
        with pytest.raises(AdapterError):
            world.supervisor.call("load_adapter", "a", "a.gguf")
        raised.put(True)

    threading.Thread(target=ask).start()
    *_, answer = child.sent.get(timeout=60)
    answer.set_exception(AdapterError("no"))
    assert raised.get(timeout=60)
    child.die()
    assert world.child().sent.empty()


def test_an_abort_is_told_where_the_request_is(world):
    child = world.child()
    world.submit("a")
    child.got("submit")
    world.supervisor.abort(["a", "unknown"])
    assert child.got("abort") == [("a",)]
    child.die()  # the child has not answered the abort
    assert world.end_of("a").finish_reason is FinishReason.ABORT
    loading = world.child(started=False)
    world.submit("b")
    world.supervisor.abort(["b"])
    assert world.end_of("b").finish_reason is FinishReason.ABORT
    loading.start()
    until(lambda: world.supervisor.up)
    assert loading.sent.empty()


@pytest.mark.parametrize("when", ["loading", "up", "dead"])
def test_an_end_at_any_time_leaves_nothing(when):
    world = World(RestartPolicy(first_s=600.0, longest_s=600.0))
    child = world.child(started=False)
    if when != "loading":
        child.start()
        world.supervisor.wait_until_ready()
        world.submit("a")
    if when == "dead":
        child.die()
        world.child().die()  # the next child starts after 600 s
        until(lambda: not world.supervisor.up)
    world.supervisor.ask_to_end()
    world.supervisor.wait(time.monotonic() + PATIENCE_S)
    assert world.supervisor.ended
    if when == "loading":
        with pytest.raises(EngineError):
            world.supervisor.wait_until_ready()
    else:
        assert world.end_of("a").error == "the engine is closed"
    with pytest.raises(EngineClosedError, match="the engine is closed"):
        world.submit("b")
    assert world.supervisor.outage == Outage("the engine is closed")


def test_the_outage_of_several_engines_is_that_of_the_one_which_may_come_back_first():
    class Member:
        outage = None

    members = [Member(), Member(), Member()]
    router = Router(members)
    members[0].outage = Outage("closed")
    members[1].outage = Outage("in a row", 3.0)
    assert router.outage is None
    members[2].outage = Outage("in a row", 2.0)
    assert router.outage == Outage("in a row", 2.0)


def test_what_the_first_child_raises_is_raised():
    world = World()
    world.child(started=False).die("SIGBUS")
    with pytest.raises(EngineError, match="SIGBUS"):
        world.supervisor.wait_until_ready()
    until(lambda: world.supervisor.ended)
    assert world.children.empty()


def test_a_silent_child_is_killed(world, monkeypatch):
    monkeypatch.setattr("llamabatch.client.supervisor._TICK_S", 0.02)
    child = world.child()
    child.reader_is_busy = False
    until(lambda: child.killed_because is not None)
    assert child.killed_because == "it gave no sign of life for 0.1 s"
    assert world.child().pid == 2


def test_figures_of_dead_children_stay(world):
    child = world.child()
    child.listener.on_stats(child, EngineStats(running=3, decode_calls=10).to_wire())
    child.die()
    child = world.child()
    got = queue.SimpleQueue()
    threading.Thread(target=lambda: got.put(world.supervisor.stats())).start()
    *_, answer = child.sent.get(timeout=60)
    child.listener.on_stats(child, EngineStats(running=1, decode_calls=5).to_wire())
    answer.set_result(None)
    stats = got.get(timeout=60)
    assert (stats.running, stats.decode_calls, stats.restarts) == (1, 15, 1)


def test_the_router_keeps_the_figures_of_a_member_that_is_gone_and_sends_nothing_to_one_that_is_down():
    class Member:
        alive = up = True
        given = 0

        def submit(self, requests, sink, *, stream=False):
            self.given += len(requests)

        def stats(self):
            return EngineStats(running=1, decode_calls=10)

    one, other = Member(), Member()
    router = Router([one, other])
    assert router.stats().decode_calls == 20
    one.up = False
    router.submit([Request(str(number), (1,)) for number in range(4)], lambda outputs: None)
    assert (one.given, other.given) == (0, 4)
    other.up = False  # both are down, so one that is alive must do
    router.submit([Request(str(number), (1,)) for number in range(4, 8)], lambda outputs: None)
    assert (one.given, other.given) == (4, 4)
    one.alive = False
    stats = router.stats()
    assert (stats.decode_calls, stats.running) == (20, 1)


def test_a_child_that_never_beats_is_killed_after_longer(monkeypatch):
    monkeypatch.setattr("llamabatch.client.supervisor._TICK_S", 0.02)
    world = World(RestartPolicy(hang_s=0.01, start_s=0.1))
    child = world.child(started=False)
    child.reader_is_busy = child.has_beaten = False
    until(lambda: child.killed_because is not None)
    assert child.killed_because == "it gave no sign of life for 0.1 s"
    world.supervisor.end()


def test_what_no_child_had_begun_goes_to_another_instance():
    worlds = [World(), World()]
    gone, living = (world.supervisor for world in worlds)
    first, second = (world.child() for world in worlds)
    router = Router([gone, living])
    gone.failover = weakref.WeakMethod(router.take_over)
    told = queue.SimpleQueue()
    requests = [Request(str(number), (1,)) for number in range(6)]
    router.submit(requests, told.put, stream=True)
    assert first.got(*["submit"] * 3) == ["0", "2", "4"]
    assert second.got(*["submit"] * 3) == ["1", "3", "5"]
    first.admit("0")
    first.die()
    for _ in range(3):
        worlds[0].child(started=False).die()
    [output] = told.get(timeout=60)
    assert (output.request_id, "4 times in a row" in output.finished.error) == ("0", True)
    assert second.got("submit", "submit") == ["2", "4"]
    assert router._owners["2"][0] == router._owners["4"][0] == 1
    router.abort(["4"])
    assert second.got("abort") == [("4",)]
    for name in "24135":
        second.emit(name, 5)
        [output] = told.get(timeout=60)
        assert (output.request_id, output.finished.error) == (name, None)
    assert router._loads == [0, 0]
    for world in worlds:
        world.supervisor.end()


def test_an_abort_reaches_a_request_that_is_moving():
    """The request has left one engine, and the next engine has not accepted it."""

    class Member:
        alive = up = True
        aborted = ()

        def submit(self, requests, sink, *, stream=False):
            router.abort(["a"])
            self.aborted = ()  # the abort came too early

        def abort(self, request_ids):
            self.aborted += tuple(request_ids)

    member = Member()
    router = Router([member])
    router.take_over([Request("a", (1,))], print, False, "why")
    assert member.aborted == ("a",)
    assert not router._moving
    assert not router._aborted_on_move
    member.alive = False
    told = []
    router.take_over([Request("b", (1,))], told.extend, False, "why")
    assert told[0].finished.error == "why"


# A supervisor that gave up tries again later.


AGAIN = replace(QUICK, retry_s=10.0, longest_s=30.0, first_s=0.0)


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def given_up():
    world = World(AGAIN, clock=Clock())
    world.child()
    world.submit("a")
    for _ in range(3):
        world.newest().die()
        world.child(started=False)
    world.newest().die("SIGILL")
    assert "4 times in a row without a result, at last with while it started: SIGILL" in world.end_of("a").error
    until(lambda: world.supervisor.outage is not None)
    return world


def pass_time(world, seconds):
    world.supervisor._clock.now += seconds


def test_another_child_is_started_after_a_pause_without_a_call():
    world = given_up()
    with pytest.raises(EngineClosedError, match="SIGILL; another one is started in 10 s"):
        world.submit("early")
    assert world.supervisor.outage.retry_in_s == 10.0
    pass_time(world, 9.0)
    assert world.supervisor.outage.retry_in_s == 1.0
    assert world.children.empty()
    pass_time(world, 1.0)
    child = world.child()
    assert world.supervisor.outage is None
    world.submit("b", "c")
    assert child.got("submit", "submit") == ["b", "c"]
    child.emit("b", 5)
    assert world.end_of("b").token_ids == (5,)
    child.die()  # the count of deaths begins at one again
    child = world.child()
    assert child.got("submit") == ["c"]
    child.emit("c", 6)
    assert world.end_of("c").error is None
    world.supervisor.end()


def test_a_question_waits_for_the_child_that_loads():
    world = given_up()
    pass_time(world, 10.0)
    child = world.child(started=False)
    answers = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(world.supervisor.call("load_prefix", "p"))).start()
    child.start()
    [(_, answer)] = child.got("load_prefix")
    answer.set_result(7)
    assert answers.get(timeout=60) == 7
    world.supervisor.end()


def test_what_kills_each_child_fails_fast_and_the_pauses_grow():
    world = given_up()
    before = world.supervisor.heartbeat.restarts
    wait_s = 10.0
    for number, next_s in enumerate((20.0, 30.0, 30.0)):
        pass_time(world, wait_s)
        child = world.child(started=False)
        world.submit(str(number))  # the request waits for the child
        child.die()  # one death is enough now, not four
        assert f"{5 + number} times in a row" in world.end_of(str(number)).error
        until(lambda: world.supervisor.outage is not None)
        with pytest.raises(EngineClosedError, match=f"another one is started in {next_s:.0f} s"):
            world.submit("early")
        wait_s = next_s
    assert world.children.empty()
    assert world.supervisor.heartbeat.restarts == before + 3
    world.supervisor.end()
    with pytest.raises(EngineClosedError):
        world.submit("late")


def test_closing_ends_one_that_has_given_up():
    world = given_up()
    world.supervisor.ask_to_end()
    world.supervisor.wait(time.monotonic() + PATIENCE_S)
    assert world.supervisor.ended
    assert not world.supervisor.alive


def test_a_router_uses_the_one_that_gave_up_once_another_child_is_there():
    worlds = [given_up(), World()]
    second = worlds[1].child()
    router = Router([world.supervisor for world in worlds])
    told = queue.SimpleQueue()
    router.submit([Request("x", (1,))], told.put)
    assert second.got("submit") == ["x"]  # the request goes to the engine that is up
    pass_time(worlds[0], 10.0)
    child = worlds[0].child()
    router.submit([Request("y", (1,))], told.put)
    assert child.got("submit") == ["y"]
    for world in worlds:
        world.supervisor.end()


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("can't start new thread")])
def test_a_child_that_cannot_be_started_counts_as_one_that_died(error):
    world = World(AGAIN, clock=Clock())
    child = world.child()
    start = world.supervisor._start_child

    def fail(*arguments):
        raise error

    world.supervisor._start_child = fail
    world.submit("a")
    child.die()
    assert "could not be started" in (told := world.end_of("a").error)
    assert str(error) in told
    world.supervisor._start_child = start
    pass_time(world, 10.0)
    child = world.child()
    world.submit("b")
    assert child.got("submit") == ["b"]
    child.emit("b", 1)
    assert world.end_of("b").error is None
    world.supervisor.end()


# Errors while something is sent.


def ends_of(world, n):
    ends = {}
    while len(ends) < n:
        for output in world.told.get(timeout=60):
            if output.finished is not None:
                ends[output.request_id] = output.finished
    return ends


def test_what_cannot_be_sent_is_the_error_of_its_request(world, monkeypatch):
    child = world.child()
    monkeypatch.setattr(child, "submit", lambda requests, *, stream: {"b": "TypeError: no"})
    world.submit("a", "b")
    assert world.end_of("b").error == "TypeError: no"
    child.emit("a", 1)
    assert world.end_of("a").error is None


def test_an_output_that_cannot_be_read_is_the_error_of_its_request(world):
    child = world.child()
    world.submit("a", "b")
    child.got("submit", "submit")
    child.listener.on_outputs(child, (("a", "not numbers", "", 5, 0, 0, None),))
    assert "its output could not be read: " in world.end_of("a").error
    assert child.got("abort") == [("a",)]
    child.emit("b", 1)
    assert world.end_of("b").error is None


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_a_sink_that_raises_ends_its_request_and_no_other(world, error):
    child = world.child()
    told = queue.SimpleQueue()

    def sink(outputs):
        for output in outputs:
            if output.request_id == "a" and output.finished is None:
                raise error
            told.put(output)

    world.supervisor.submit([Request(name, (1,)) for name in "ab"], sink, stream=True)
    child.got("submit", "submit")
    both = unpack(pack([SequenceOutput(name, (5,), "x") for name in "ab"]))
    child.listener.on_outputs(child, both)
    assert told.get(timeout=60).request_id == "b"
    last = told.get(timeout=60)
    assert last.request_id == "a"
    assert f"the result could not be delivered: {type(error).__name__}" in last.finished.error
    assert child.got("abort") == [("a",)]
    child.emit("b", 6)
    assert told.get(timeout=60).finished.error is None


def test_what_an_exception_has_lost_is_answered_when_its_child_has_gone(world, monkeypatch):
    child = world.child()
    world.submit("a", "b")
    child.got("submit", "submit")
    monkeypatch.setattr("llamabatch.client.crash_triage.CrashTriage._emit", lambda self, outputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        child.emit("a", 1)
    monkeypatch.undo()
    child.die()
    assert "has lost the request" in world.end_of("a").error
    child = world.child()
    assert child.got("submit") == ["b"]
    child.emit("b", 1)
    assert world.end_of("b").error is None
