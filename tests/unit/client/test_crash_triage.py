"""The request that ends a child process is found by trying the suspects one at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch.client.codec import pack, unpack
from llamabatch.client.crash_triage import MOST_DEATHS, CrashTriage, TrackedRequest
from llamabatch.client.restart_policy import RestartPolicy, Restarts, Silence
from llamabatch.request.logprobs import Logprob
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams


class Triage(CrashTriage):
    """A CrashTriage whose clock a test sets. `ends` has the last outputs by request id."""

    def __init__(self, *names, **params):
        super().__init__(clock=lambda: self.now)
        self.now = 0.0
        self.ends = {}
        self.put(*names, **params)

    def put(self, *names, **params):
        requests = [Request(name, (1,), SamplingParams(**params)) for name in names]
        assert self.add(requests, self.note, False, []) == []

    def note(self, outputs):
        for output in outputs:
            assert output.request_id not in self.ends, "ended twice"
            self.ends[output.request_id] = output.finished

    def sendable(self):
        return [tracked.request_id for tracked in self.pop_sendable()]

    def admit(self, request_ids, now):
        self.now = now
        self.admitted(list(request_ids))

    def finish(self, request_id):
        """Delivers the last output of a request that ends well."""
        done = CompletionOutput(0, "", (), FinishReason.STOP)
        output = SequenceOutput(request_id, (), "", RequestOutput(request_id, None, (1,), (done,)))
        assert self.deliver(unpack(pack([output])))

    def die(self, now, from_outside=False):
        """Lets the child die. Returns the ids of the requests that this ends: culprits, then aborted ones."""
        before = set(self.ends)
        self.now = now
        self.child_died("SIGSEGV", from_outside)
        ended = [name for name in self.ends if name not in before]
        culprits = [name for name in ended if self.ends[name].finish_reason is FinishReason.ERROR]
        return culprits, [name for name in ended if name not in culprits]


def test_the_last_admitted_is_tried_first_and_all_others_wait():
    triage = Triage(*"abcd")
    assert triage.sendable() == ["a", "b", "c", "d"]
    triage.admit("a", 1.0)
    triage.admit("b", 2.0)
    assert triage.die(3.0) == ([], [])
    triage.put("e")
    assert triage.sendable() == ["b"]
    assert triage.sendable() == []
    triage.finish("b")
    assert triage.sendable() == ["a"]
    triage.finish("a")
    assert triage.sendable() == ["c", "d", "e"]


def test_a_death_that_seems_to_come_from_outside_counts_half():
    triage = Triage(*"abc")
    triage.sendable()
    triage.admit("abc", 1.0)
    triage.die(2.0, from_outside=True)
    for death in range(4):
        assert triage.sendable() == ["c"]
        culprits, _ = triage.die(3.0 + death, from_outside=True)
        assert culprits == ["c"] * (death == 3)
    assert triage.sendable() == ["a", "b"]


def test_only_what_is_above_suspicion_is_handed_over():
    triage = Triage(*"abcdef")
    triage.sendable()
    triage.admit("ab", 1.0)
    assert triage.abort("e") == ["e"]
    triage.die(2.0)
    assert triage.sendable() == ["b"]
    given = []
    triage.hand_over(lambda requests, sink, stream, reason: given.extend(r.request_id for r in requests), "why")
    assert given == ["c", "d", "f"]
    assert len(triage) == 2
    assert set(triage.ends) == {"e"}
    triage.end_all("why")
    assert {name: end.error for name, end in triage.ends.items()} == {"e": None, "a": "why", "b": "why"}


@pytest.fixture
def second_trial():
    """A Triage at 41.1 s: the trial of the suspect b is over and b still runs, and the suspect a was just sent."""
    triage = Triage(*"ab")
    triage.sendable()
    triage.admit("ab", 0.0)
    triage.die(10.0)
    assert triage.sendable() == ["b"]
    triage.admit("b", 20.0)
    triage.now = 40.9
    assert triage.sendable() == []
    triage.now = 41.1
    assert triage.sendable() == ["a"]
    return triage


def test_a_suspect_that_has_run_long_enough_lets_the_next_one_in(second_trial):
    triage = second_trial
    triage.admit("a", 41.2)
    assert triage.die(50.0) == ([], [])  # a or b may be the culprit
    for death in range(MOST_DEATHS):
        assert triage.sendable() == ["a"]
        triage.admit("a", 60.0)
        triage.now = 10_000.0
        assert triage.sendable() == []
        culprits, _ = triage.die(10_001.0 + death)
    assert culprits == ["a"]


def test_a_suspect_is_not_blamed_before_it_is_admitted_while_another_runs(second_trial):
    triage = second_trial
    assert triage.die(41.2) == ([], [])  # b may be the cause
    for death in range(MOST_DEATHS):
        assert triage.sendable() == ["a"]
        triage.admit("a", 50.0)
        culprits, _ = triage.die(51.0 + death)
        assert culprits == ["a"] * (death == MOST_DEATHS - 1)


def test_with_nothing_admitted_nothing_is_suspected_at_first():
    triage = Triage(*"ab")
    triage.sendable()
    triage.die(1.0)
    assert triage.sendable() == ["a", "b"]
    triage.die(2.0)
    assert triage.sendable() == ["a"]
    triage.finish("a")
    assert triage.sendable() == ["b"]


def test_an_abort_ends_what_is_in_no_child_and_the_others_when_it_dies():
    triage = Triage(*"abc")
    triage.sendable()
    triage.admit("ab", 1.0)
    assert triage.abort(["a", "unknown"]) == ["a"]
    assert triage.die(2.0) == ([], ["a"])
    assert triage.abort(["b", "c"]) == []
    assert list(triage.ends) == ["a", "b", "c"]
    assert {end.finish_reason for end in triage.ends.values()} == {FinishReason.ABORT}
    assert triage.sendable() == []
    assert not triage.is_trying


def test_deadlines_pass_while_no_child_is_there(monkeypatch):
    triage = Triage("a", deadline_s=5.0)
    arrival = triage.pop_sendable()[0].request.arrival_s
    triage.die(1.0)
    monkeypatch.setattr("time.perf_counter", lambda: arrival + 4.9)
    triage.end_late()
    assert triage.ends == {}
    monkeypatch.setattr("time.perf_counter", lambda: arrival + 5.1)
    triage.end_late()
    assert "while no engine process had it" in triage.ends["a"].error
    assert len(triage) == 0


class World:
    """A child with some slots and a clock of steps. A request in `killers` ends the child after some of its steps."""

    def __init__(self, n, killers, n_slots, outside):
        self.triage = Triage(*map(str, range(n)))
        self.killers, self.n_slots, self.outside = killers, n_slots, set(outside)
        self.now = 0.0
        self.ended, self.culprits, self.deaths = [], [], 0
        self.waiting, self.running = [], {}

    def die(self):
        self.deaths += 1
        culprits, _ = self.triage.die(self.now)
        self.culprits += culprits
        self.waiting, self.running = [], {}

    def step(self):
        self.now += 1.0
        self.triage.now = self.now
        self.waiting += self.triage.sendable()
        while self.waiting and len(self.running) < self.n_slots:
            name = self.waiting.pop(0)
            self.running[name] = 0
            self.triage.admit([name], self.now)
        for name in list(self.running):
            self.running[name] += 1
            if self.running[name] == self.killers.get(int(name)):
                return self.die()
        if self.now in self.outside:
            return self.die()
        for name in [name for name, steps in self.running.items() if steps >= 5]:
            del self.running[name]
            self.ended.append(name)
            self.triage.finish(name)
        return None


@settings(max_examples=100)
@given(
    n=st.integers(1, 30),
    killers=st.dictionaries(st.integers(0, 29), st.integers(1, 5), max_size=3),
    n_slots=st.integers(1, 8),
    outside=st.lists(st.integers(1, 200), max_size=1),
)
def test_all_but_the_killers_finish_and_each_ends_once(n, killers, n_slots, outside):
    killers = {number: steps for number, steps in killers.items() if number < n}
    world = World(n, killers, n_slots, outside)
    for _ in range(20_000):
        if not len(world.triage):
            break
        world.step()
    assert sorted([*world.ended, *world.culprits], key=int) == [str(number) for number in range(n)]
    assert set(map(int, world.culprits)) == set(killers)
    assert world.deaths <= (MOST_DEATHS + 3) * len(killers) + 2 * len(outside)


def test_one_killer_among_a_thousand_costs_three_restarts():
    world = World(1000, {500: 3}, 32, [])
    while len(world.triage):
        world.step()
    assert (len(world.ended), world.culprits, world.deaths) == (999, ["500"], 3)


def test_restarts_wait_longer_each_time_until_there_are_too_many():
    restarts = Restarts(RestartPolicy(most=5, first_s=1.0, longest_s=3.0))
    assert [restarts.after_death() for _ in range(6)] == [0.0, 1.0, 2.0, 3.0, 3.0, None]
    restarts.worked()
    assert restarts.after_death() == 0.0
    assert restarts.total == 6
    assert Restarts(RestartPolicy(most=0)).after_death() is None


def test_silence_counts_only_while_we_are_awake_and_read():
    silence = Silence()
    assert [silence.look(1, False, now) for now in (0.0, 1.0, 2.0)] == [0.0, 1.0, 2.0]
    assert silence.look(1, False, 10_000.0) == 3.5  # after a sleep, a look counts for 1.5 s at most
    assert silence.look(1, True, 10_001.0) == 0.0
    assert silence.look(1, False, 10_002.0) == 1.0
    assert silence.look(2, False, 10_003.0) == 0.0


def streamed(**params):
    return TrackedRequest(Request("a", (1,), SamplingParams(**params)), lambda outputs: None, True, 0)


def piece(*token_ids, text="", index=0, finished=None):
    return SequenceOutput("a", token_ids, text, finished, index)


def test_nothing_is_emitted_twice():
    tracked = streamed(n=2)
    assert tracked.new_part(piece(1, 2, text="ab")).text == "ab"
    assert tracked.new_part(piece(5, text="x", index=1)).token_ids == (5,)
    tracked.child_died(1.0)
    assert tracked.new_part(piece(1, text="a")) is None
    left = tracked.new_part(piece(2, 3, text="bc"))
    assert (left.token_ids, left.text) == ((3,), "c")
    assert tracked.new_part(piece(9, text="i")).token_ids == (9,)
    assert tracked.new_part(piece(5, 6, text="xy", index=1)).text == "y"
    tracked.child_died(2.0)
    assert tracked.new_part(piece(1, 2, 3, 9, text="abci")) is None
    whole = RequestOutput("a", None, (1,), (CompletionOutput(0, "abcd", (1, 2, 3, 4), FinishReason.STOP),))
    last = tracked.new_part(piece(4, text="d", finished=whole))
    assert (last.token_ids, last.text, last.finished) == ((4,), "d", whole)


@pytest.mark.parametrize("asked", [{"logprobs": 0}, {"logprob_token_ids": [7]}])
def test_the_next_engine_resumes_after_what_was_emitted(asked):
    tracked = streamed(**asked)
    tracked.admit(1.0)
    logprobs = ({1: Logprob(-0.5, 1, "a")}, {2: Logprob(-1.5, 2, "b")})
    tracked.new_part(SequenceOutput("a", (1, 2), "ab", logprobs=logprobs))
    tracked.child_died(2.0)
    known = tracked.request.resumed
    assert (known.token_ids, known.logprobs, len(known.times_s)) == ((1, 2), logprobs, 2)
    assert known.admitted_s <= known.times_s[0]
    assert tracked.new_part(piece(3, text="c")).token_ids == (3,)
    tracked.child_died(3.0)
    assert tracked.request.resumed.token_ids == (1, 2, 3)
    assert streamed(mirostat=1).request.resumed is None


def test_the_last_output_has_what_was_emitted():
    tracked = streamed()
    tracked.new_part(piece(1, 2, text="ab"))
    output = tracked.last_output(FinishReason.ERROR, "why").finished
    assert (output.text, output.token_ids, output.error) == ("ab", (1, 2), "why")
    assert output.finish_reason is FinishReason.ERROR
    assert len(output.timings.token_times_s) == 2
