"""Who is to blame for the end of a child: found by trying the suspects one at a time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch.client.crash_triage import FROM_OUTSIDE, MOST_DEATHS, CrashTriage
from llamabatch.client.restart_policy import RestartPolicy, Restarts, Silence
from llamabatch.request.logprobs import Logprob
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams


def told(outputs):
    pass


def filled(*names, **params):
    ledger = CrashTriage()
    for name in names:
        ledger.add(Request(name, (1,), SamplingParams(**params)), told, False)
    return ledger


def names(tickets):
    return [ticket.request.request_id for ticket in tickets]


def test_the_last_admitted_is_tried_first_and_everybody_else_waits():
    ledger = filled(*"abcd")
    assert names(ledger.take()) == ["a", "b", "c", "d"]
    ledger.admitted(["a"], 1.0)
    ledger.admitted(["b"], 2.0)
    assert ledger.died(3.0) == ([], [])
    ledger.add(Request("e", (1,)), told, False)
    assert names(ledger.take()) == ["b"]
    assert ledger.take() == []
    ledger.end(ledger.get("b"))
    assert names(ledger.take()) == ["a"]
    ledger.end(ledger.get("a"))
    assert names(ledger.take()) == ["c", "d", "e"]


def test_who_is_alone_in_two_deaths_is_the_culprit_and_the_others_go_on_together():
    ledger = filled(*"abc")
    ledger.take()
    ledger.admitted("abc", 1.0)
    ledger.died(2.0)
    for death in range(MOST_DEATHS):
        assert names(ledger.take()) == ["c"]
        culprits, _ = ledger.died(3.0 + death)
    assert names(culprits) == ["c"]
    assert "c" not in ledger
    assert names(ledger.take()) == ["a", "b"]


def test_a_death_from_outside_is_forgiven():
    ledger = filled("a")
    ledger.take()
    ledger.admitted("a", 1.0)
    assert ledger.died(2.0) == ([], [])
    assert names(ledger.take()) == ["a"]
    ledger.end(ledger.get("a"))
    assert len(ledger) == 0


def test_a_death_that_seems_to_come_from_outside_counts_half():
    ledger = filled(*"abc")
    ledger.take()
    ledger.admitted("abc", 1.0)
    ledger.died(2.0, FROM_OUTSIDE)
    for death in range(4):
        assert names(ledger.take()) == ["c"]
        culprits, _ = ledger.died(3.0 + death, FROM_OUTSIDE)
        assert names(culprits) == ["c"] * (death == 3)
    assert names(ledger.take()) == ["a", "b"]


def test_only_what_is_above_suspicion_is_given_away():
    ledger = filled(*"abcdef")
    ledger.take()
    ledger.admitted("ab", 1.0)
    ledger.abort("e")
    ledger.died(2.0)
    assert names(ledger.take()) == ["b"]
    assert names(ledger.release()) == ["c", "d", "f"]
    assert len(ledger) == 2


def test_a_suspect_that_has_run_long_enough_lets_the_next_one_in():
    ledger = filled(*"ab")
    ledger.take()
    ledger.admitted("ab", 0.0)
    ledger.died(10.0)
    assert names(ledger.take()) == ["b"]
    ledger.admitted("b", 20.0)
    ledger.clear(40.9)
    assert ledger.take() == []
    ledger.clear(41.1)
    assert names(ledger.take()) == ["a"]
    ledger.admitted("a", 41.2)
    assert ledger.died(50.0) == ([], [])  # either of them
    for death in range(MOST_DEATHS):
        assert names(ledger.take()) == ["a"]
        ledger.admitted("a", 60.0)
        ledger.clear(10_000.0)
        assert ledger.take() == []
        culprits, _ = ledger.died(10_001.0 + death)
    assert names(culprits) == ["a"]


def test_with_nobody_admitted_nobody_is_suspected_at_first():
    ledger = filled(*"ab")
    ledger.take()
    ledger.died(1.0)
    assert names(ledger.take()) == ["a", "b"]
    ledger.died(2.0)
    assert names(ledger.take()) == ["a"]
    ledger.end(ledger.get("a"))
    ledger.worked()
    assert names(ledger.take()) == ["b"]


def test_an_abort_ends_what_is_in_no_child_and_the_others_when_it_dies():
    ledger = filled(*"abc")
    ledger.take()
    ledger.admitted("ab", 1.0)
    assert ledger.abort(["a", "nobody"]) == (["a"], [])
    culprits, aborted = ledger.died(2.0)
    assert (culprits, names(aborted)) == ([], ["a"])
    inside, ended = ledger.abort(["b", "c"])
    assert (inside, names(ended)) == ([], ["b", "c"])
    assert ledger.take() == []
    assert not ledger.is_trying


def test_deadlines_pass_while_no_child_is_there():
    ledger = filled("a", deadline_s=5.0)
    arrival = ledger.get("a").request.arrival_s
    assert ledger.late(arrival + 4.9) == []
    assert names(ledger.late(arrival + 5.1)) == ["a"]
    assert len(ledger) == 0


class World:
    """A child with some slots, whose clock goes by steps: killers end it when they have run for some steps."""

    def __init__(self, n, killers, n_slots, outside):
        self.ledger = filled(*map(str, range(n)))
        self.killers, self.n_slots, self.outside = killers, n_slots, set(outside)
        self.now = 0.0
        self.ended, self.culprits, self.deaths = [], [], 0
        self.waiting, self.running = [], {}

    def die(self):
        self.deaths += 1
        culprits, _ = self.ledger.died(self.now)
        self.culprits += names(culprits)
        self.waiting, self.running = [], {}

    def step(self):
        self.now += 1.0
        self.ledger.clear(self.now)
        self.waiting += names(self.ledger.take())
        while self.waiting and len(self.running) < self.n_slots:
            name = self.waiting.pop(0)
            self.running[name] = 0
            self.ledger.admitted([name], self.now)
        for name in list(self.running):
            self.running[name] += 1
            if self.running[name] == self.killers.get(int(name)):
                return self.die()
        if self.now in self.outside:
            return self.die()
        for name in [name for name, steps in self.running.items() if steps >= 5]:
            del self.running[name]
            self.ended.append(name)
            self.ledger.worked()
            self.ledger.end(self.ledger.get(name))
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
        if not len(world.ledger):
            break
        world.step()
    assert sorted([*world.ended, *world.culprits], key=int) == [str(number) for number in range(n)]
    assert set(map(int, world.culprits)) == set(killers)
    assert world.deaths <= (MOST_DEATHS + 3) * len(killers) + 2 * len(outside)


def test_one_killer_among_a_thousand_costs_three_restarts():
    world = World(1000, {500: 3}, 32, [])
    while len(world.ledger):
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
    assert silence.look(1, False, 10_000.0) == 3.5  # asleep: one look counts for a second and a half at most
    assert silence.look(1, True, 10_001.0) == 0.0
    assert silence.look(1, False, 10_002.0) == 1.0
    assert silence.look(2, False, 10_003.0) == 0.0


def streamed(**params):
    ledger = CrashTriage()
    ledger.add(Request("a", (1,), SamplingParams(**params)), told, True)
    return ledger.get("a")


def piece(*token_ids, text="", index=0, finished=None):
    return SequenceOutput("a", token_ids, text, finished, index)


def test_nothing_is_told_twice():
    ticket = streamed(n=2)
    assert ticket.take(piece(1, 2, text="ab")).text == "ab"
    assert ticket.take(piece(5, text="x", index=1)).token_ids == (5,)
    ticket.leave(1.0)
    assert ticket.take(piece(1, text="a")) is None
    left = ticket.take(piece(2, 3, text="bc"))
    assert (left.token_ids, left.text) == ((3,), "c")
    assert ticket.take(piece(9, text="i")).token_ids == (9,)
    assert ticket.take(piece(5, 6, text="xy", index=1)).text == "y"
    ticket.leave(2.0)
    assert ticket.take(piece(1, 2, 3, 9, text="abci")) is None
    whole = RequestOutput("a", None, (1,), (CompletionOutput(0, "abcd", (1, 2, 3, 4), FinishReason.STOP),))
    last = ticket.take(piece(4, text="d", finished=whole))
    assert (last.token_ids, last.text, last.finished) == ((4,), "d", whole)


def test_what_was_told_is_known_to_the_next_engine():
    ticket = streamed(logprobs=0)
    ticket.admit(1.0)
    told = ({1: Logprob(-0.5, 1, "a")}, {2: Logprob(-1.5, 2, "b")})
    ticket.take(SequenceOutput("a", (1, 2), "ab", logprobs=told))
    ticket.leave(2.0)
    known = ticket.request.known
    assert (known.token_ids, known.logprobs, len(known.times_s)) == ((1, 2), told, 2)
    assert known.admitted_s <= known.times_s[0]
    assert ticket.take(piece(3, text="c")).token_ids == (3,)
    ticket.leave(3.0)
    assert ticket.request.known.token_ids == (1, 2, 3)
    assert streamed(mirostat=1).request.known is None


def test_who_is_ended_keeps_what_was_told():
    ticket = streamed()
    ticket.take(piece(1, 2, text="ab"))
    output = ticket.ended(FinishReason.ERROR, "why").finished
    assert (output.text, output.token_ids, output.error) == ("ab", (1, 2), "why")
    assert output.finish_reason is FinishReason.ERROR
    assert len(output.timings.token_times_s) == 2
