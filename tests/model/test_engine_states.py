"""states() of every kind of client shows slots and queue while the engine computes, and waits for no step."""

import threading
import time

import pytest

from llamabatch import LLM, EngineClosedError, SamplingParams
from llamabatch.sampling.grammar_compiler import Grammars
from tests.waiting import PATIENCE_S, until

KINDS = {
    "thread": {"n_slots": 2, "instances": 1, "n_threads": 1},
    "threads": {"n_slots": 4, "instances": 2},
    "child": {"n_slots": 2, "isolate": True, "n_threads": 1},
    "children": {"n_slots": 2, "strategy": "multi-instance", "instances": 2, "n_threads": 1},
}
LONG = SamplingParams(max_tokens=3000, ignore_eos=True)


def states_until(client, wanted):
    return until(lambda: wanted(states := client.states()) and states, client.states)


@pytest.mark.parametrize("kind", KINDS)
def test_slots_and_queue_are_seen_while_requests_run(kind, steps):
    with LLM("tiny", **KINDS[kind]) as llm, steps.each_takes(0.02):
        client, n_engines = llm._client, 2 if kind in ("threads", "children") else 1
        assert sum(len(state.slots) for state in client.states()) == 2 * n_engines
        assert all(slot.request_id is None for state in client.states() for slot in state.slots)
        prompts = [f"Item {number} of a list" for number in range(2 * n_engines + 2)]
        done = threading.Event()

        def run():
            for _ in llm.stream(prompts, LONG):
                if done.is_set():
                    break

        thread, began = threading.Thread(target=run), time.monotonic()
        thread.start()
        try:
            states = states_until(
                client, lambda states: sum(s.n_output > 3 for e in states for s in e.slots) == 2 * n_engines
            )
            busy = [slot for state in states for slot in state.slots]
            assert sum(state.n_waiting for state in states) == 2
            waiting = [one for state in states for one in state.waiting]
            assert len(waiting) == 2
            assert {one.reason for one in waiting} == {"slot"}
            assert len({slot.request_id for slot in busy} | {one.request_id for one in waiting}) == len(prompts)
            assert all(0 < slot.n_prompt_done == slot.n_prompt for slot in busy)
            assert all(0 < slot.running_s <= slot.age_s < time.monotonic() - began for slot in busy)
            assert all(state.n_ctx == llm.plan.config.n_ctx and state.steps > 3 for state in states)
            with steps.held():
                first, *_, last = [client.states() for _ in range(4)]
            for one, other in zip(first, last, strict=True):  # one step may have been under way
                assert other.steps <= one.steps + 1, "it waited for the steps"
        finally:
            done.set()
            thread.join()
        states_until(client, lambda states: not any(slot.request_id for e in states for slot in e.slots))
    with pytest.raises(EngineClosedError):
        client.states()


def test_continuations_and_background_requests_are_told_apart(steps):
    with LLM("tiny", n_slots=4, instances=1) as llm, steps.each_takes(0.02):
        done = threading.Event()

        def run():
            params = SamplingParams(n=3, max_tokens=3000, ignore_eos=True, background=True, priority=2)
            for _ in llm.stream(["Once"], params):
                if done.is_set():
                    break

        thread = threading.Thread(target=run)
        thread.start()
        try:
            [state] = states_until(llm._client, lambda states: sum(slot.n_output > 0 for slot in states[0].slots) == 3)
        finally:
            done.set()
            thread.join()
    busy = [slot for slot in state.slots if slot.request_id is not None]
    assert sorted(slot.index for slot in busy) == [0, 1, 2]
    assert len({slot.request_id for slot in busy}) == 1
    assert all(slot.background and slot.priority == 2 for slot in busy)
    assert "\0" not in busy[0].request_id


def test_a_request_whose_grammar_is_compiled_stands_in_the_queue(monkeypatch):
    compiles, go_on = Grammars._compile, threading.Event()

    def held(self, structure):
        assert go_on.wait(PATIENCE_S)
        return compiles(self, structure)

    monkeypatch.setattr(Grammars, "_compile", held)
    with LLM("tiny", n_slots=2, instances=1) as llm:
        stream = llm.stream(["x"], SamplingParams(max_tokens=4, structured_outputs={"regex": "[a-z]+"}))
        thread = threading.Thread(target=lambda: list(stream))
        thread.start()
        states_until(llm._client, lambda states: [one.reason for one in states[0].waiting] == ["grammar"])
        go_on.set()
        thread.join()
