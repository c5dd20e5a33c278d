"""States that cannot be cut: only their very end can be shared. Checkpoints are stored in main memory."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch.scheduler.common_prefix import MIN_SHARED, PLAIN, ShareKey
from llamabatch.scheduler.output import Limits
from llamabatch.scheduler.policies import POLICIES, policy
from llamabatch.scheduler.prefix_store import PrefixStore, StoredPrefix
from llamabatch.scheduler.scheduler import Scheduler
from tests.unit.fakes import (
    EOG,
    STATE_BYTES,
    FakeModelRunner,
    drain,
    expected_output,
    sequence,
    sometimes_abort,
    step,
    steps,
)
from tests.unit.small_prefixes import small_thresholds

ROOM = 10 * (STATE_BYTES + 9 * 512)
LIMITS = Limits(8, 512, 128, 128, can_cut=False, can_pad=False, can_shift=False, state_bytes=ROOM)
ORDINARY = Limits(8, 512, 128, 128, state_bytes=ROOM)
HEAD = tuple(range(1, 50)) * 6  # 294 tokens


def engine(limits: Limits = LIMITS, name: str = "batched", **options) -> tuple[Scheduler, FakeModelRunner]:
    return Scheduler(policy(name), limits, **options), FakeModelRunner(limits)


def computed(runner: FakeModelRunner) -> int:
    return sum(span.length for call in runner.calls for span in call.spans)


def ask(scheduler, runner, name: str, prompt: tuple[int, ...], most: int = 1, **params) -> tuple[list[int], int]:
    """Runs one request. Returns its output, and the number of tokens that were computed for it."""
    before = computed(runner)
    scheduler.add(sequence(name, prompt, most, **params))
    output = list(drain(scheduler, runner)[name].token_ids)
    assert output == expected_output(prompt, most) or params.get("ignore_eos")
    return output, computed(runner) - before


def test_a_cold_burst_computes_its_common_beginning_once():
    scheduler, runner = engine()
    for i in range(10):
        scheduler.add(sequence(f"r{i}", (*HEAD[:48], 51 + i, 60), 1))
    outputs = drain(scheduler, runner)
    assert scheduler.prefix_cache.num_shared_tokens + scheduler.prefix_cache.num_prefix_tokens == 9 * 48
    assert computed(runner) == 48 + 10 * 2
    for i in range(10):
        assert list(outputs[f"r{i}"].token_ids) == expected_output((*HEAD[:48], 51 + i, 60), 1)


def test_followers_of_different_lengths_stop_their_source_at_each():
    scheduler, runner = engine(replace(LIMITS, state_bytes=0))
    scheduler.add(sequence("source", HEAD, 4))
    for count in (40, 64, 200):
        scheduler.add(sequence(f"r{count}", (*HEAD[:count], 60, 61), 4))
    drain(scheduler, runner)
    assert scheduler.prefix_cache.num_shared_tokens == 40 + 64 + 200
    ends = {span.start + span.length for call in runner.calls for span in call.spans}
    assert {40, 64, 200} <= ends


def test_a_follower_does_not_wait_for_one_that_has_passed_the_common_end():
    scheduler, runner = engine(replace(LIMITS, state_bytes=0))
    scheduler.add(sequence("source", HEAD, 30, ignore_eos=True))
    steps(scheduler, runner, 6)
    scheduler.add(sequence("late", (*HEAD[:100], 60), 2, group=1))
    drain(scheduler, runner)
    assert scheduler.prefix_cache.num_shared_tokens == 0


@pytest.mark.parametrize("opening", [(), (EOG, 60, 61)])
def test_the_next_turn_goes_on_from_the_end_of_the_last_prompt(opening):
    """The next prompt may contain the answer, and the template's text before it, in another form."""
    scheduler, runner = engine()
    first = (*HEAD, *opening)
    ask(scheduler, runner, "one", first, 5, ignore_eos=True)
    assert runner.saved == [len(HEAD) + (1 if opening else -1)]
    _, n = ask(scheduler, runner, "two", (*first[: len(HEAD) + 1], *range(30, 40)), 1)
    assert n == len(first[: len(HEAD) + 1]) + 10 - runner.saved[0]
    assert runner.restored_tokens == runner.saved[0]


def test_the_same_prompt_again_computes_its_last_token():
    scheduler, runner = engine()
    first, _ = ask(scheduler, runner, "one", HEAD, 5, ignore_eos=True)
    again, n = ask(scheduler, runner, "two", HEAD, 5, ignore_eos=True)
    assert again == first
    assert n == 5  # the prompt's last token, and four of the answer


def test_a_burst_saves_its_common_beginning_once():
    scheduler, runner = engine()
    for i in range(8):
        scheduler.add(sequence(f"r{i}", (*HEAD, 51 + i % 8, 60), 1))
    drain(scheduler, runner)
    assert runner.saved.count(len(HEAD)) == 1


def save(store: PrefixStore, tokens, n_bytes: int, key: ShareKey = PLAIN, gain: int = 1) -> StoredPrefix | None:
    """Saves a state of `n_bytes` as a step does. Returns it, or None if the store did not accept it."""
    prefix = store.checkpoint(tokens, key, gain)
    if prefix is not None and store.make_room(prefix, n_bytes):
        prefix.state = bytes(n_bytes)
    store.settle()
    store.check_integrity()
    return prefix if prefix in store._all() else None


def test_states_that_hardly_grow_leave_room_for_those_of_long_prompts():
    store = PrefixStore(5 * 10**6, is_exact=True)
    for i, count in enumerate((300, 16_000, 300, 16_000)):
        assert save(store, [i + 1, *range(2, count + 1)], 10**6)
    assert store.n_saved == 4
    assert len(list(store._all())) == 4


def test_a_state_above_the_whole_budget_takes_no_other_ones_place():
    store = PrefixStore(10**6, is_exact=True)
    small = save(store, list(range(500)), 10**5)
    just = 10**6 - 4 * 500  # room that the tokens leave
    assert save(store, list(range(1, 501)), just + 1) is None
    assert list(store._all()) == [small]
    assert save(store, list(range(1, 501)), just)


def test_all_states_of_a_step_have_room_together():
    store = PrefixStore(10**6)
    pending = [store.checkpoint([i, *HEAD], PLAIN, 1) for i in range(4)]
    assert [store.make_room(prefix, 300_000) for prefix in pending] == [True, True, True, False]
    for prefix in pending[1:3]:
        prefix.state = bytes(300_000)
    store.settle()
    store.check_integrity()
    assert list(store._all()) == pending[1:3]
    assert save(store, [9, *HEAD], 300_000)  # the prefixes that were not saved take no room


def test_a_longer_state_takes_the_place_of_those_it_begins_with():
    store, exact = PrefixStore(10**6), PrefixStore(10**6, is_exact=True)
    other = ShareKey(cache_salt="tenant")
    for each in (store, exact):
        for tokens, key in ((HEAD[:100], PLAIN), (HEAD[:90], other), ((*HEAD[:99], 60, 60), PLAIN), (HEAD, PLAIN)):
            assert save(each, tokens, 100, key)
    assert sorted(len(prefix.token_ids) for prefix in store._all()) == [90, 101, len(HEAD)]
    assert len(list(exact._all())) == 4


def test_the_next_turn_goes_on_from_the_slot_where_the_answer_stands_as_it_was():
    scheduler, runner = engine(replace(LIMITS, state_bytes=0))
    output, _ = ask(scheduler, runner, "one", HEAD, 20)
    _, n = ask(scheduler, runner, "two", (*HEAD, *output, 40, 41), 1)
    assert n == 3


def test_what_two_prompts_have_in_common_is_kept_for_the_third():
    scheduler, runner = engine(replace(LIMITS, n_slots=1))
    ask(scheduler, runner, "a", (*HEAD, *[60] * 150))
    ask(scheduler, runner, "b", (*HEAD, *[61] * 150))
    assert len(HEAD) in runner.saved
    _, n = ask(scheduler, runner, "c", (*HEAD, *[62] * 150))
    assert n == 150


def test_a_slot_that_is_needed_moves_its_state_to_main_memory():
    scheduler, runner = engine(replace(LIMITS, n_slots=1))
    output, _ = ask(scheduler, runner, "one", HEAD, 160, ignore_eos=True)
    ask(scheduler, runner, "other", (50, 51, 52))
    assert len(HEAD) + 159 in runner.saved
    _, n = ask(scheduler, runner, "two", (*HEAD, *output, 40), 1)
    assert n == 2


def test_sixty_four_chats_in_two_slots_each_go_on_from_their_last_turn():
    room = 64 * 3 * (STATE_BYTES + 9 * 512)
    scheduler, runner = engine(replace(LIMITS, n_slots=2, state_bytes=room))
    chats = [(*(1 + (i + j) % 63 for j in range(40)), *[i + 1] * 260) for i in range(64)]
    for i, chat in enumerate(chats):
        ask(scheduler, runner, f"{i}", chat, 3)
    before = computed(runner)
    for i, chat in enumerate(chats):
        ask(scheduler, runner, f"{i}b", (*chat, 60, 61, 62))
    assert computed(runner) - before <= 64 * 300 * 0.1


@pytest.mark.parametrize("n_cells", [None, 1100], ids=["split", "unified"])
@pytest.mark.parametrize("n_alike", [0, 48])
def test_sixty_four_chats_of_ordinary_cells_in_eight_slots_compute_their_own_tokens(n_cells, n_alike):
    """Each chat has three turns, at random times. Chats that begin alike use and cut each other's slots."""
    rng = random.Random(n_alike)
    limits = replace(ORDINARY, n_cells=n_cells, state_bytes=10**6)
    scheduler, runner = engine(limits)
    chats = [(*HEAD[:n_alike], i + 1, *(rng.randrange(1, 64) for _ in range(59))) for i in range(64)]
    for turn in range(3):
        order = rng.sample(range(64), 64)
        before = computed(runner)
        for first in range(0, 64, 8):
            for i in order[first : first + 8]:
                scheduler.add(sequence(f"{turn}.{i}", chats[i], 4, group=i))
            outputs = drain(scheduler, runner)
            for i in order[first : first + 8]:
                own = expected_output(chats[i], 4)
                assert list(outputs[f"{turn}.{i}"].token_ids) == own
                chats[i] = (*chats[i], *own, *(rng.randrange(1, 64) for _ in range(36)))
        n_new = 64 * (60 + n_alike if turn == 0 else 37 + 4)
        assert computed(runner) - before <= n_new + 64 * 4
    stats = scheduler.stats()
    assert (stats["prefix_hits"] >= 128, stats["restored_tokens"] > 100 * 64) == (True, True)
    assert 0 < stats["cache_ram_bytes"] <= 10**6


def test_what_a_slot_loses_to_one_that_begins_alike_is_kept():
    scheduler, runner = engine(replace(ORDINARY, n_slots=1))
    chat = (*HEAD[:50], *[60] * 100)
    output, _ = ask(scheduler, runner, "chat", chat, 2, ignore_eos=True)
    _, n = ask(scheduler, runner, "other", (*HEAD[:50], *[61] * 40))
    assert (n, runner.saved) == (40, [151])
    _, n = ask(scheduler, runner, "next", (*chat, *output, 62))
    assert n == 2


@pytest.mark.parametrize(("salt", "adapters"), [("tenant", ()), (None, (("lora", 1.0),))], ids=["a salt", "an adapter"])
def test_a_state_serves_requests_of_its_key_alone(salt, adapters):
    scheduler, runner = engine(replace(ORDINARY, n_slots=1))

    def computes(name: str, keyed: bool) -> int:
        before = computed(runner)
        asked = sequence(name, HEAD, 1, cache_salt=salt if keyed else None)
        if keyed:
            asked.request = replace(asked.request, adapters=adapters)
        scheduler.add(asked)
        drain(scheduler, runner)
        ask(scheduler, runner, f"{name} other", (50, 51, 52))
        return computed(runner) - before - 3

    assert [computes("a", True), computes("b", False), computes("c", True)] == [len(HEAD), len(HEAD), 1]
    scheduler.forget_adapter("lora")
    assert computes("d", True) == (len(HEAD) if adapters else 1)


def test_prompts_that_only_begin_alike_are_not_worth_a_copy_each():
    """The tail of each prompt is short beside the common beginning."""
    scheduler, runner = engine(replace(ORDINARY, n_slots=2))
    for i in range(40):
        ask(scheduler, runner, f"{i}", (*HEAD, *HEAD[:100], i + 1, *[60] * 32))
    assert len(runner.saved) < 25
    before = len(runner.saved)
    for i in range(20):
        ask(scheduler, runner, f"{i}b", (*HEAD, *HEAD[:100], i + 1, *[61] * 32))
    assert len(runner.saved) == before


def test_a_state_gives_way_to_one_that_is_saved_while_its_slot_waits_for_it():
    scheduler, runner = engine(replace(ORDINARY, n_slots=1, state_bytes=STATE_BYTES + 9 * 160))  # room for one state
    chats = [(*[60 + i] * 40, *HEAD[:60]) for i in range(2)]
    for number in range(6):
        _, n = ask(scheduler, runner, f"{number}", (*chats[number % 2], *[number + 1] * number))
        assert n == (100 + number if number < 2 else number)


def test_a_prefix_that_gave_way_and_is_dropped_fills_no_slot():
    """A slot waits for the prefix meanwhile."""
    scheduler, runner = engine(replace(ORDINARY, n_slots=1))
    ask(scheduler, runner, "one", HEAD)
    ask(scheduler, runner, "other", (50, 51, 52))
    before = computed(runner)
    scheduler.add(sequence("two", (*HEAD, 60), 1))
    step(scheduler, runner)
    [stored] = scheduler.prefix_cache.store._all()
    scheduler.prefix_cache.store._free(stored)
    scheduler.reset_prefix_cache()
    assert list(drain(scheduler, runner)["two"].token_ids) == expected_output((*HEAD, 60), 1)
    assert (computed(runner) - before, runner.restored_tokens) == (len(HEAD) + 1, 0)


@pytest.mark.parametrize("limits", [LIMITS, ORDINARY], ids=["states", "cells"])
def test_a_prefix_that_llama_cpp_refuses_is_computed_from_its_beginning(limits):
    """Sequences that copied from the prefix's slot are computed, too. The refused copy is dropped."""
    scheduler, runner = Scheduler(policy("batched"), replace(limits, n_slots=2)), FakeModelRunner(limits, refuses=1)
    ask(scheduler, runner, "one", HEAD)
    for name in ("x", "y"):
        scheduler.add(sequence(name, (50, 51, ord(name) - 60), 1))
    drain(scheduler, runner)
    before = len(scheduler.prefix_cache.store._checkpoints)
    for i in range(2):
        scheduler.add(sequence(f"two {i}", (*HEAD, 60, 61 + i), 1, group=i))
    outputs = drain(scheduler, runner)
    for i in range(2):
        assert list(outputs[f"two {i}"].token_ids) == expected_output((*HEAD, 60, 61 + i), 1)
    assert (before, runner._refuses) == (1, 0)
    assert min(output.num_cached_tokens for output in outputs.values()) == 0
    assert scheduler.num_preemptions >= 1


def test_a_save_that_is_dropped_before_its_step_is_not_kept():
    store = PrefixStore(10**6)
    prefix = store.checkpoint(HEAD, ShareKey((("lora", 1.0),)), 1)
    store.drop(lambda key: bool(key.adapters))
    assert store.make_room(prefix, 100)
    prefix.state = bytes(100)
    store.settle()
    assert (list(store._all()), store.n_bytes) == ([], 0)


@pytest.mark.parametrize(("copy_s", "is_kept"), [(0.001, True), (0.02, False)])
def test_cells_are_copied_where_computing_them_takes_longer(copy_s, is_kept):
    """The saving is multiplied by the chance that a text is continued, at first an eighth."""
    limits = replace(ORDINARY, n_slots=1)
    scheduler, runner = engine(limits)
    store, times = scheduler.prefix_cache.store, scheduler._prefill_pacer.times
    times._plain.append(0.001)
    times.observe(0.001 + 0.01 * 100, 1, 100)
    store._save_times.append(copy_s)
    ask(scheduler, runner, "one", HEAD)
    ask(scheduler, runner, "other", (50, 51, 52))
    assert runner.saved == ([len(HEAD)] if is_kept else [])


@pytest.mark.parametrize(("length", "n_kept", "is_kept"), [(250, 32, True), (100, 32, False), (250, 400, False)])
def test_an_answer_is_kept_where_the_copy_takes_little_time_beside_the_prompt(length, n_kept, is_kept):
    """A copy takes as long as five tokens, and the answer has 20: less than five times eight."""
    scheduler, runner = engine(replace(LIMITS, n_slots=1, state_bytes=10**6))
    cache = scheduler.prefix_cache
    cache._token_s, cache.store.copy_s, cache.kv_cache._n_kept = lambda: 0.01, lambda count: 0.05, n_kept
    cache.store.checkpoint = lambda token_ids, key, gain: kept.append((len(token_ids), gain))
    kept = []
    scheduler.add(sequence("one", tuple(range(1, length + 1)), 20, ignore_eos=True))
    drain(scheduler, runner)
    ask(scheduler, runner, "other", (50, 51, 52))
    [(count, gain)] = kept
    assert (count, gain <= 20) == (length + 19, is_kept)


def test_a_preempted_one_goes_on_where_it_stopped():
    limits = replace(LIMITS, n_slots=1)
    scheduler, runner = engine(limits, preempt=True)
    scheduler.add(sequence("low", HEAD, 40, ignore_eos=True, priority=1))
    steps(scheduler, runner, 10)
    scheduler.add(sequence("high", (50, 51), 2, priority=-1))
    outputs = drain(scheduler, runner)
    assert scheduler.num_preemptions == 1
    assert computed(runner) <= len(HEAD) + 40 + 2 + MIN_SHARED
    assert len(outputs["low"].token_ids) == 40


@pytest.mark.parametrize(("copy_s", "is_kept"), [(0.005, True), (0.02, False)])
def test_cells_of_a_preempted_one_are_copied_where_computing_them_takes_longer(copy_s, is_kept):
    """A preempted sequence is continued for certain."""
    scheduler, runner = engine(replace(ORDINARY, n_slots=1), preempt=True)
    scheduler.add(sequence("low", HEAD, 40, ignore_eos=True, priority=1))
    steps(scheduler, runner, 10)
    scheduler.prefix_cache._token_s = lambda: 0.01
    scheduler.prefix_cache.store._save_times.append(copy_s)
    scheduler.add(sequence("high", (50, 51), 2, priority=-1))
    step(scheduler, runner)
    assert (scheduler.num_preemptions, bool(runner.saved)) == (1, is_kept)


@pytest.mark.parametrize("limits", [LIMITS, ORDINARY], ids=["exact", "cut"])
def test_turns_of_more_chats_than_slots_compute_new_tokens_only(limits):
    """Cells move and are lost in one step, and a chat goes on in the step that takes its slot."""
    scheduler, runner = engine(replace(limits, n_slots=4, state_bytes=10**6))
    rng = random.Random(5)
    texts = [tuple(rng.randrange(1, 60) for _ in range(200)) for _ in range(12)]
    for turn in range(4):
        waiting, before = rng.sample(range(12), 12), computed(runner)
        running: list[int] = []
        while waiting or running:
            while waiting and len(running) < 4:
                running.append(waiting.pop())
                scheduler.add(sequence(f"{running[-1]}", texts[running[-1]], 8, ignore_eos=True))
            for output in step(scheduler, runner):
                if output.finished is not None:
                    chat = int(output.request_id)
                    running.remove(chat)
                    texts[chat] += (*output.finished.token_ids, *(rng.randrange(1, 60) for _ in range(60)))
        assert computed(runner) - before == 12 * (60 if turn else 199) + 12 * 8, turn


def test_a_request_whose_checkpoint_could_not_be_saved_gets_another():
    scheduler, runner = engine(replace(LIMITS, n_slots=1))
    ask(scheduler, runner, "one", HEAD, 30, ignore_eos=True)
    store = scheduler.prefix_cache.store
    [saved] = store._all()
    text = (*HEAD, *expected_output(HEAD, 29), 60)
    pending = store.checkpoint(text[:-1], PLAIN, 1)
    found = sequence("two", text, 1)
    scheduler.add(found)
    steps(scheduler, runner)
    assert store.find(found, 0) == (saved, len(saved.token_ids))
    assert pending.is_dropped


def test_checkpoints_take_no_more_than_their_bytes():
    scheduler, runner = engine(replace(LIMITS, n_slots=2, state_bytes=ROOM // 4))
    for i in range(40):
        ask(scheduler, runner, f"{i}", (*HEAD[i:], *HEAD[:i], i + 1))
        assert scheduler.prefix_cache.store.n_bytes <= ROOM // 4  # check_integrity checks this after each step
    assert len(runner.saved) > 30
    assert scheduler.prefix_cache.store.n_bytes > 0
    scheduler.reset_prefix_cache()
    assert scheduler.prefix_cache.store.n_bytes == 0


def test_the_state_of_a_window_is_that_of_the_prompt_where_cells_can_be_cut():
    scheduler, runner = engine(replace(LIMITS, n_slots=1, can_cut=True, has_window=True))
    ask(scheduler, runner, "one", HEAD, 30, ignore_eos=True)
    ask(scheduler, runner, "other", (50, 51, 52))
    assert runner.saved == [len(HEAD)]
    _, n = ask(scheduler, runner, "two", (*HEAD, 40, 41), 1)
    assert n == 2
    _, n = ask(scheduler, runner, "shorter", (*HEAD[:280], 40, 41), 1)
    assert n == 282 or scheduler.prefix_cache.num_prefix_hits  # a saved state is never cut: the fake runner would fail


def test_a_state_is_not_cut_in_the_step_in_which_another_slot_copies_its_cells():
    """The follower copies cells of a source that has just ended. Another request gets the source's slot at once."""
    limits = replace(LIMITS, n_slots=2, can_cut=True, has_window=True)
    scheduler, runner = engine(limits)
    [first, _] = expected_output(HEAD, 2)
    scheduler.add(sequence("source", HEAD, 2, group=0))
    step(scheduler, runner)
    scheduler.add(sequence("follower", (*HEAD, first, 60), 2, group=1))
    scheduler.add(sequence("other", (50, 51), 2, group=2))
    outputs = drain(scheduler, runner)
    assert scheduler.prefix_cache.num_shared_tokens == len(HEAD) + 1
    assert list(outputs["follower"].token_ids) == expected_output((*HEAD, first, 60), 2)


def test_checkpoints_of_another_key_are_not_found():
    store, key = PrefixStore(10_000, is_exact=True), ShareKey(cache_salt="tenant")
    prefix = save(store, HEAD, 10, key)
    assert store.find(sequence("plain", (*HEAD, 3)), 0) is None
    assert store.longest_common(list(HEAD), key) == len(HEAD)
    store.drop(lambda other: other == key)
    assert (store.n_bytes, prefix.is_dropped) == (0, True)


def test_the_least_tokens_for_their_bytes_and_age_go_first():
    store = PrefixStore(3 * (4 * 300 + 100))
    kept = []
    for i in range(4):
        kept.append(save(store, (i + 1, *HEAD), 100))
        if i == 2:  # the first prefix is used again
            assert store.find(sequence("again", (1, *HEAD, 5)), 0) == (kept[0], len(HEAD) + 1)
    assert [prefix in store._all() for prefix in kept] == [True, False, True, True]


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sorted(POLICIES)),
    n_slots=st.integers(1, 5),
    cuts=st.sampled_from([(False, False), (False, True), (True, True), (True, False)]),
    is_unified=st.booleans(),
    room=st.sampled_from([0, ROOM // 5, ROOM]),
    no_room_every=st.sampled_from([0, 0, 5]),
    keeps=st.sampled_from([True, True, False]),
    refuses=st.sampled_from([0, 0, 3]),
)
def test_each_gets_what_it_gets_alone(seed, name, n_slots, cuts, is_unified, room, no_room_every, keeps, refuses):
    n_cells = 600 if is_unified and cuts == (True, False) else None
    with small_thresholds():
        run_chats(random.Random(seed), name, n_slots, cuts, n_cells, room, no_room_every, keeps, refuses)


def run_chats(rng, name, n_slots, cuts, n_cells, room, no_room_every, keeps, refuses):
    """Runs chats that go on, branch and come back, among arrivals, aborts and preemptions, in few slots."""
    limits = replace(
        LIMITS,
        n_slots=n_slots,
        n_cells=n_cells,
        can_cut=cuts[0],
        has_window=cuts[1],
        state_bytes=room,
        keeps_prefixes=keeps,
    )
    scheduler = Scheduler(policy(name), limits, preempt=True)
    runner = FakeModelRunner(limits, no_room_every=no_room_every, refuses=refuses)
    heads = [HEAD[: rng.choice([12, 30, 60])] for _ in range(2)]
    chats = [(*rng.choice(heads), *(rng.randrange(1, 64) for _ in range(rng.randrange(1, 60)))) for _ in range(5)]
    asked, finished = {}, {}
    for number in range(25):
        for _ in range(rng.choice([0, 1, 1, 3])):
            chat = rng.randrange(len(chats))
            prompt, most = chats[chat], rng.choice([1, 2, 9, 30])
            name_of = f"{number}.{len(asked)}"
            asked[name_of] = (prompt, most)
            scheduler.add(sequence(name_of, prompt, most, group=number, priority=rng.choice([0, 0, 1])))
            if len(prompt) < 400:
                own = [*expected_output(prompt, most), EOG] if rng.random() < 0.7 else [EOG, 7]
                chats[chat] = (*prompt, *own, *(rng.randrange(1, 64) for _ in range(rng.randrange(1, 9))))
        for _ in range(rng.randrange(1, 9)):
            finished |= {o.request_id: o.finished for o in step(scheduler, runner) if o.finished}
        sometimes_abort(rng, scheduler, asked, 0.2)
    finished |= drain(scheduler, runner, limit=5000)
    for request_id, (prompt, most) in asked.items():
        assert list(finished[request_id].token_ids) == expected_output(prompt, most)
