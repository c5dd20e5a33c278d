"""Slots, and cells that finished sequences leave for later ones: lookup, eviction, and texts that stay the same."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch.scheduler.common_prefix import MIN_SHARED
from llamabatch.scheduler.kv_cache import COPY_IN_TOKENS, KVCacheManager, SlotPool
from llamabatch.scheduler.output import Limits
from llamabatch.scheduler.policies import POLICIES, policy
from llamabatch.scheduler.prefix_cache import PASS_IN_TOKENS
from llamabatch.scheduler.scheduler import Scheduler
from tests.unit.fakes import FakeModelRunner, drain, expected_output, sequence, step

LIMITS = Limits(n_slots=8, n_batch=512, n_ubatch=128, prefill_budget=64)


def engine(limits: Limits = LIMITS, name: str = "batched", **faults):
    return Scheduler(policy(name), limits), FakeModelRunner(limits, **faults)


def ask(scheduler, runner, *items):
    """Runs sequences to their end. Returns their outputs, and the number of tokens that were computed."""
    runner.calls.clear()
    for item in items:
        scheduler.add(item)
    outputs = drain(scheduler, runner)
    return outputs, sum(span.length for call in runner.calls for span in call.spans)


def prompt_of(start: int, length: int) -> tuple[int, ...]:
    return tuple(1 + (start * 7 + i * start) % 63 for i in range(length))


def test_a_turn_computes_its_own_tokens_only():
    scheduler, runner = engine()
    text, computed = prompt_of(5, 100), []
    for turn in range(4):
        outputs, n = ask(scheduler, runner, sequence(f"t{turn}", text, 10, ignore_eos=True))
        assert list(outputs[f"t{turn}"].token_ids) == expected_output(text, 10, ignore_eos=True)
        computed.append(n)
        text = (*text, *outputs[f"t{turn}"].token_ids, *prompt_of(turn + 2, 20))
    # 20 new tokens, the last token of the previous answer, which had no cell yet, and 9 tokens of the new answer
    assert computed == [100 + 9, 20 + 1 + 9, 20 + 1 + 9, 20 + 1 + 9]
    assert runner.copied_tokens == 0
    assert (scheduler.prefix_cache.num_prefix_hits, scheduler.prefix_cache.num_prefix_tokens) == (3, 109 + 139 + 169)


def test_cached_tokens_of_a_prompt_are_counted_where_they_come_from():
    scheduler, runner = engine()
    text = prompt_of(5, 100)
    outputs, _ = ask(scheduler, runner, sequence("first", text, 1))
    assert outputs["first"].num_cached_tokens == 0
    outputs, _ = ask(scheduler, runner, sequence("again", text, 1), sequence("more", (*text, 7, 8), 1))
    # one uses the slot of the finished sequence, and the other copies from that slot
    assert [outputs[name].num_cached_tokens for name in ("again", "more")] == [99, 100]
    scheduler.load_prefix("file", prompt_of(3, 120), bytes(prompt_of(3, 120)))
    outputs, _ = ask(scheduler, runner, sequence("loaded", (*prompt_of(3, 120), 5), 1))
    assert outputs["loaded"].num_cached_tokens == 120


@pytest.mark.parametrize("preempted", [False, True])
def test_a_request_may_compute_its_whole_prompt_and_shares_it_with_its_own_continuations_alone(preempted):
    scheduler, runner = engine()
    text = prompt_of(5, 100)
    ask(scheduler, runner, sequence("first", text, 1))
    scheduler.load_prefix("file", prompt_of(3, 120), bytes(prompt_of(3, 120)))
    scheduler.add(sequence("running", prompt_of(7, 90), 60, ignore_eos=True))
    step(scheduler, runner)
    own = {"skip_reading_prefix_cache": True}
    items = [sequence(f"copies\x00{index}", text, 2, ignore_eos=True, **own) for index in range(3)]
    items += [sequence("loaded", prompt_of(3, 120), 1, **own), sequence("beside", prompt_of(7, 90), 1, **own)]
    for item in items:
        scheduler.add(item)
    early = {}
    if preempted:
        early = {each.request_id: each.finished for each in step(scheduler, runner) if each.finished is not None}
        for one in list(scheduler.running):
            if one.request.request_id.startswith("copies"):
                scheduler._preempt(one)
    outputs = early | drain(scheduler, runner)
    assert [outputs[name].num_cached_tokens for name in ("copies\x000", "loaded", "beside")] == [0, 0, 0]
    for index in range(3):
        assert list(outputs[f"copies\x00{index}"].token_ids) == expected_output(text, 2, ignore_eos=True)
    if not preempted:
        assert [outputs[f"copies\x00{index}"].num_cached_tokens for index in range(3)] == [0, 99, 99]
    outputs, _ = ask(scheduler, runner, sequence("later", text, 1))
    assert outputs["later"].num_cached_tokens >= 99  # a later sequence finds the computed cells


def test_requests_of_different_salts_share_no_cells_in_flight_finished_or_from_files():
    scheduler, runner = engine()
    text = prompt_of(5, 100)
    ask(scheduler, runner, sequence("first", text, 1, cache_salt="red"))
    scheduler.load_prefix("file", text, bytes(text))
    salts = {"red": 99, "blue": 0, None: 99}  # the file serves requests without a salt
    for salt, cached in salts.items():
        outputs, _ = ask(scheduler, runner, sequence("one", text, 1, cache_salt=salt))
        assert outputs["one"].num_cached_tokens == cached
    scheduler.reset_prefix_cache()
    scheduler.unload_prefix("file")
    pairs = [sequence(f"{salt} {index}", text, 2, cache_salt=salt) for salt in salts for index in range(2)]
    outputs, _ = ask(scheduler, runner, *pairs)  # in flight together, the two of a pair share their cells
    for salt in salts:
        assert sorted(outputs[f"{salt} {index}"].num_cached_tokens for index in range(2)) == [0, 99]
    assert len({tuple(output.token_ids) for output in outputs.values()}) == 1
    for salt in salts:  # save_prefix writes no cells of a tenant
        scheduler.reset_prefix_cache()
        ask(scheduler, runner, sequence("one", text, 1, cache_salt=salt))
        assert (scheduler.cached_slot(text) is None) == (salt is not None)


def test_tokens_found_again_after_a_preemption_are_not_cached_ones():
    scheduler, runner = engine()
    text = prompt_of(5, 100)
    scheduler.add(sequence("first", text, 3, ignore_eos=True))
    step(scheduler, runner)
    [first] = scheduler.running
    scheduler._preempt(first)
    scheduler.load_prefix("file", text, bytes(text))
    outputs = drain(scheduler, runner)
    assert scheduler.prefix_cache.num_prefix_tokens == 100  # computed once more: found in the file
    assert outputs["first"].num_cached_tokens == 0


@pytest.mark.parametrize("kv", ["split", "unified"])
def test_a_reset_cache_gives_nothing_to_later_requests_and_touches_no_running_one(kv):
    scheduler, runner = engine(LIMITS if kv == "split" else replace(LIMITS, n_cells=1500))
    text = prompt_of(5, 100)
    ask(scheduler, runner, sequence("first", text, 1))
    scheduler.load_prefix("file", prompt_of(3, 120), bytes(prompt_of(3, 120)))
    scheduler.add(sequence("running", prompt_of(7, 90), 40, ignore_eos=True))
    step(scheduler, runner)
    scheduler.reset_prefix_cache()
    scheduler.check_integrity()
    items = [sequence("again", text, 1), sequence("loaded", (*prompt_of(3, 120), 5), 1)]
    outputs, _ = ask(scheduler, runner, *items, sequence("beside", (*prompt_of(7, 90), 5), 1))
    assert [outputs[name].num_cached_tokens for name in ("again", "loaded", "beside")] == [0, 120, 90]
    assert list(outputs["running"].token_ids) == expected_output(prompt_of(7, 90), 40, ignore_eos=True)


def test_turned_off_everything_is_computed():
    scheduler, runner = engine(Limits(8, 512, 128, 64, keeps_prefixes=False))
    text = prompt_of(5, 100)
    assert [ask(scheduler, runner, sequence(f"t{i}", text, 1))[1] for i in range(2)] == [100, 100]
    assert scheduler.prefix_cache.num_prefix_hits == 0


def test_who_wants_the_rows_of_its_prompt_has_them_computed():
    scheduler, runner = engine()
    text = prompt_of(5, 100)
    ask(scheduler, runner, sequence("first", text, 1))
    assert ask(scheduler, runner, sequence("scored", text, 1, prompt_logprobs=0))[1] == 100
    assert ask(scheduler, runner, sequence("plain", text, 1))[1] == 1


def test_every_chat_of_a_list_finds_its_own_cells():
    scheduler, runner = engine()
    texts = [prompt_of(i + 2, 60 + i) for i in range(8)]
    outputs, _ = ask(scheduler, runner, *[sequence(f"{i}", t, 10 + i, ignore_eos=True) for i, t in enumerate(texts)])
    texts = [(*t, *outputs[f"{i}"].token_ids, 9) for i, t in enumerate(texts)]
    runner.copied_tokens = 0
    _, computed = ask(scheduler, runner, *[sequence(f"{i}", t, 1) for i, t in enumerate(texts)])
    # a sequence of the first list may have been evicted when others moved into the hole that it left
    assert computed <= 7 * 2 + len(texts[-1])
    assert scheduler.prefix_cache.num_prefix_hits >= 7


def kept_prompts(scheduler, runner, *lengths):
    """Runs prompts of these lengths at the same time, so that each leaves its cells in a slot of its own."""
    prompts = [prompt_of(i + 2, length) for i, length in enumerate(lengths)]
    for i, prompt in enumerate(prompts):
        scheduler.add(sequence(f"k{i}", prompt, 1))
    drain(scheduler, runner)
    assert sorted(kept.count for kept in scheduler._kv_cache.cached.values()) == sorted(lengths)
    return prompts


def test_the_longest_match_wins():
    scheduler, runner = engine()
    head = prompt_of(3, 80)
    ask(scheduler, runner, sequence("short", (*head, 1, 2), 1), sequence("long", (*head, 3, 4, 5, 6), 1))
    _, computed = ask(scheduler, runner, sequence("asks", (*head, 3, 4, 5, 9), 1))
    assert computed == 1


def test_a_beginning_that_others_may_want_is_copied_while_a_slot_is_free():
    scheduler, runner = engine()
    head = prompt_of(3, 80)
    ask(scheduler, runner, sequence("a", (*head, *prompt_of(4, 100)), 1), sequence("b", prompt_of(9, 200), 1))
    assert ask(scheduler, runner, sequence("c", (*head, *prompt_of(5, 100)), 1))[1] == 100
    assert ask(scheduler, runner, sequence("a again", (*head, *prompt_of(4, 100), 7), 1))[1] == 1
    assert ask(scheduler, runner, sequence("c again", (*head, *prompt_of(5, 100), 7), 1))[1] == 1


def test_strangers_take_the_slot_with_the_least_valuable_prefix():
    scheduler, runner = engine(Limits(4, 512, 128, 64))
    # longest first to enter and to end: 200 / 4, 60 / 3, 50 / 2, 40 / 1
    prompts = kept_prompts(scheduler, runner, 40, 200, 60, 50)
    ask(scheduler, runner, sequence("s", prompt_of(20, 300), 1))
    assert sorted(kept.count for kept in scheduler._kv_cache.cached.values()) == [40, 50, 200, 300]
    assert ask(scheduler, runner, sequence("again", (*prompts[1], 9), 1))[1] == 1


def test_strangers_take_empty_slots_first():
    scheduler, runner = engine(Limits(4, 512, 128, 64))
    kept_prompts(scheduler, runner, 40, 200, 60, 50)
    scheduler._kv_cache.evict(next(slot for slot, kept in scheduler._kv_cache.cached.items() if kept.count == 200))
    ask(scheduler, runner, sequence("s", prompt_of(20, 300), 1))
    assert sorted(kept.count for kept in scheduler._kv_cache.cached.values()) == [40, 50, 60, 300]


def test_a_prefix_in_the_way_moves_to_an_empty_slot():
    limits = Limits(4, 512, 128, 64)
    cells = KVCacheManager(4, limits)
    for _ in range(3):
        cells.slots.lease()
    length = 9 * COPY_IN_TOKENS  # one cached token in nine is expected to be used again
    long = sequence("long", prompt_of(3, length), 1)
    long.num_computed = length
    cells.cache(1, long)
    assert cells.lease() == 1  # the slot between two that are leased
    (copy,), cuts = cells.pop_actions()
    assert (copy.source, copy.target, copy.count) == (1, 3, length)
    assert [(cut.slot, cut.count) for cut in cuts] == [(1, 0)]
    assert cells.cached.keys() == {3}
    cells.check_integrity()


def test_what_is_never_used_again_moves_no_more():
    cells = KVCacheManager(4, Limits(4, 512, 128, 64))
    for _ in range(3):
        cells.slots.lease()
    long = sequence("long", prompt_of(3, 300), 1)
    long.num_computed = 300
    moved = []
    for _ in range(30):
        cells.cache(1, long)
        cells.lease_this(1)
        moved.append(len(cells.pop_actions()[0]))
        for slot in list(cells.cached):
            cells.evict(slot)
    assert (moved[0], moved[-1]) == (1, 0)


@pytest.mark.parametrize(("length", "stays"), [(100, False), (400, True)])
def test_a_prefix_between_rows_gives_way_unless_a_second_pass_is_cheaper(length, stays):
    limits = Limits(4, 512, 128, 64)
    scheduler, runner = engine(limits, "static")  # the shortest prompt enters first
    scheduler._kv_cache._n_used_again = 1000  # all cached tokens are expected to be used again
    prompts = [prompt_of(i + 2, n) for i, n in enumerate((50, length, length + 1))]
    # the middle sequence ends first, and the others have too few steps left for a move
    for i, prompt in enumerate(prompts):
        scheduler.add(sequence(f"{i}", prompt, 1 if i == 1 else 14, ignore_eos=True))
    while len(scheduler.running) != 2:
        step(scheduler, runner)
    runner.calls.clear()
    step(scheduler, runner)
    steps_left = max(s.most_steps_left for s in scheduler.running) + 1
    assert (length < PASS_IN_TOKENS * steps_left) is not stays
    assert [len(call.dummy_slots) for call in runner.calls] == [0 if stays else 1]
    drain(scheduler, runner)
    assert ask(scheduler, runner, sequence("again", (*prompts[1], 9), 1))[1] == (1 if stays else length + 1)


def test_a_list_with_nothing_in_common_takes_no_more_calls_dummy_rows_and_copies():
    def costs(keeps: bool):
        limits = Limits(8, 512, 128, 64, keeps_prefixes=keeps)
        scheduler, runner = engine(limits)
        rng, calls = random.Random(4), []
        for i in range(30):
            scheduler.add(sequence(f"{i}", tuple(rng.randrange(1, 64) for _ in range(20 + i)), rng.randrange(1, 60)))
        while scheduler.has_work:
            runner.calls.clear()
            step(scheduler, runner)
            calls += runner.calls
        for call in calls:
            ids = [span.slot for span in call.spans] + list(call.dummy_slots)
            assert max(ids) - min(ids) == len(ids) - 1, "a second pass"
        return len(calls), sum(len(call.dummy_slots) for call in calls), runner.copied_tokens

    keeping, without = costs(True), costs(False)
    assert all(a <= b for a, b in zip(keeping, without, strict=True)), (keeping, without)


def test_in_a_unified_cache_what_is_kept_makes_room():
    limits = Limits(8, 512, 128, 64, n_cells=600, can_pad=False)
    scheduler, runner = engine(limits)
    prompts = kept_prompts(scheduler, runner, 150, 140, 130)
    _, computed = ask(scheduler, runner, sequence("big", prompt_of(30, 400), 50, ignore_eos=True))  # n_cells is checked
    assert computed == 449
    assert scheduler._kv_cache.n_cached_cells <= 600
    assert ask(scheduler, runner, sequence("again", (*prompts[2], 9), 1))[1] == 1  # the youngest prefix stayed


def test_no_room_in_a_unified_cache_costs_what_is_kept_before_anybody_is_preempted():
    limits = Limits(8, 512, 128, 64, n_cells=2000, can_pad=False)
    scheduler, runner = engine(limits)
    kept_prompts(scheduler, runner, 50, 60, 70, 80)
    for i in range(2):
        scheduler.add(sequence(f"{i}", prompt_of(40 + i, 30), 9, ignore_eos=True))
    step(scheduler, runner)
    assert scheduler._kv_cache.cached
    runner._no_room_every = 1
    step(scheduler, runner)
    runner._no_room_every = 0
    assert not scheduler._kv_cache.cached
    assert len(drain(scheduler, runner)) == 2
    assert scheduler.num_preemptions == 0


def test_what_failed_leaves_nothing():
    scheduler, runner = engine(bad_token=200)
    head = prompt_of(3, 100)
    ask(scheduler, runner, sequence("bad", (*head, 200), 5))
    assert not scheduler._kv_cache.cached


def test_too_little_is_not_kept():
    scheduler, runner = engine()
    ask(scheduler, runner, sequence("a", prompt_of(3, MIN_SHARED - 1), 1), sequence("b", prompt_of(4, MIN_SHARED), 1))
    assert [kept.count for kept in scheduler._kv_cache.cached.values()] == [MIN_SHARED]


def test_a_loaded_prefix_fills_a_slot_and_others_copy_from_there():
    scheduler, runner = engine()
    scheduler.load_prefix("file", prompt_of(3, 120), bytes(prompt_of(3, 120)))
    items = [sequence(f"{i}", (*prompt_of(3, 120), 5 + i, 6), 1) for i in range(3)]
    outputs, computed = ask(scheduler, runner, *items)
    assert computed == 3 * 2
    assert (scheduler.prefix_cache.num_prefix_hits, scheduler.prefix_cache.num_prefix_tokens) == (1, 120)
    for i in range(3):
        assert list(outputs[f"{i}"].token_ids) == expected_output((*prompt_of(3, 120), 5 + i, 6), 1)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sorted(POLICIES)),
    n_slots=st.integers(1, 6),
    n_cells=st.sampled_from([None, None, 700, 1500]),
    start_slots=st.integers(1, 6),
    memory_for=st.sampled_from([None, None, 1, 3]),
    growth=st.sampled_from([(0, True), (1, True), (7, True), (2, False)]),
    no_room_every=st.sampled_from([0, 0, 5]),
    can_pad=st.booleans(),
)
def test_turns_of_many_chats_get_what_they_get_alone(
    seed, name, n_slots, n_cells, start_slots, memory_for, growth, no_room_every, can_pad
):
    """Chats go on from all of their text or a part of it, or begin again, with aborts, preemption, growth and eviction.

    The runner checks each cell of each row.
    """
    rng = random.Random(seed)
    limits = Limits(n_slots, 256, 64, 32, n_cells=n_cells, can_pad=can_pad and n_cells is None)
    limits = replace(limits, start_slots=min(start_slots, n_slots))
    faults = {"memory_for": memory_for, "growth_steps": growth[0], "carries": growth[1]}
    scheduler, runner = engine(limits, name, no_room_every=no_room_every, **faults)
    texts = {chat: prompt_of(3 + chat % 3, rng.randrange(1, 150)) for chat in range(7)}
    if rng.random() < 0.5:
        scheduler.load_prefix("file", prompt_of(3, 120), bytes(prompt_of(3, 120)))
    asked, chats, n = {}, {}, 0
    for _ in range(80):
        if rng.random() < 0.4:
            chat = rng.choice([c for c in texts if c not in chats.values()] or [None])
            if chat is not None:
                n += 1
                texts[chat] = texts[chat][: rng.choice([400, 400, 400, 90, 45])]
                texts[chat] += tuple(rng.randrange(1, 64) for _ in range(rng.randrange(1, 30)))
                most = rng.choice([1, 2, 25])
                asked[f"{n}"], chats[f"{n}"] = (texts[chat], most), chat
                scheduler.add(sequence(f"{n}", texts[chat], most, group=rng.choice([0, n])))
        if chats and rng.random() < 0.08:
            victim = rng.choice(list(chats))
            scheduler.abort(victim)
            del asked[victim], chats[victim]
        for output in step(scheduler, runner):
            if output.finished:
                check(output.finished, asked)
                texts[chats.pop(output.request_id)] += output.finished.token_ids
    for output in drain(scheduler, runner).values():
        check(output, asked)
    assert scheduler.slots.n_free == scheduler.slots.n_slots


def test_what_is_kept_outlives_a_growing_context():
    scheduler, runner = engine(replace(LIMITS, start_slots=2))
    text = prompt_of(5, 100)
    ask(scheduler, runner, sequence("kept", text, 1))
    ask(scheduler, runner, *[sequence(f"{i}", (i + 1, 2), 1) for i in range(3)])
    assert scheduler.slots.n_slots == 8
    _, computed = ask(scheduler, runner, sequence("again", (*text, 3), 1))
    assert computed <= 2
    assert scheduler.prefix_cache.num_prefix_tokens >= 99


def check(output, asked):
    prompt, most = asked[output.request_id]
    assert output.error is None
    assert list(output.token_ids) == expected_output(prompt, most)


@given(st.integers(1, 20), st.lists(st.integers(0, 99)))
def test_the_lowest_free_id_is_leased(n_slots, moves):
    pool, leased = SlotPool(n_slots), set()
    for move in moves:
        if move % 2 and leased:
            slot = sorted(leased)[move % len(leased)]
            leased.remove(slot)
            pool.release(slot)
        elif pool.n_free:
            slot = pool.lease()
            assert slot == min(set(range(n_slots)) - leased)
            leased.add(slot)
        pool.check_integrity()
        assert pool.leased == leased
        assert pool.n_free == n_slots - len(leased)


def test_misuse_of_slots_is_refused():
    pool = SlotPool(1)
    with pytest.raises(ValueError, match="slot 0 is not leased"):
        pool.release(0)
    pool.lease()
    with pytest.raises(ValueError, match="no slot is free"):
        pool.lease()
