"""The waiting queue: order, families of prefixes, overtaking."""

import random

from llamabatch.scheduler.common_prefix import MIN_SHARED, prefix_families
from llamabatch.scheduler.policies import POLICIES
from llamabatch.scheduler.request_queue import LOOK_AHEAD, MAX_OVERTAKEN, RequestQueue
from tests.unit.fakes import sequence

BATCHED = POLICIES["batched"]


def names(queue: RequestQueue) -> list[str]:
    order = []
    while (found := queue.pop(lambda s: True)) is not None:
        order.append(found.request.request_id)
    return order


def queue_of(*sequences) -> RequestQueue:
    queue = RequestQueue(BATCHED.key, find_families=True)
    for one in sequences:
        queue.add(one)
    return queue


def test_longest_expected_first_inside_a_list_and_lists_in_order_of_arrival():
    queue = queue_of(
        sequence("short", (1,) * 4, 8, group=1),
        sequence("long", (1,) * 4, 90, group=1),
        sequence("later but longer", (1,) * 4, 200, group=2),
    )
    assert names(queue) == ["long", "short", "later but longer"]


def test_prompts_that_begin_alike_stay_together():
    a, b = tuple(range(1, 61)), tuple(range(61, 121))
    queue = queue_of(
        sequence("a1", (*a, 1), 10),
        sequence("b1", (*b, 1), 90),
        sequence("a2", (*a, 2), 50),
        sequence("alone", (7,) * 60, 60),
        sequence("b2", (*b, 2), 5),
    )
    assert names(queue) == ["b1", "b2", "alone", "a2", "a1"]


def test_families_are_those_that_share_half_of_the_shorter_prompt():
    head = list(range(MIN_SHARED))
    together, apart = [*head, *[1] * MIN_SHARED], [*head, *[2] * (MIN_SHARED + 1)]
    assert prefix_families([together, [9] * 50, [*head, *[3] * MIN_SHARED]]) == [[0, 2], [1]]
    assert prefix_families([[*apart, 5], [*together, 4, 4]]) == [[0], [1]]
    assert prefix_families([head, head]) == [[0, 1]]
    assert prefix_families([head[:-1], head[:-1]]) == [[0], [1]]  # the common prefix is too short for a copy
    assert prefix_families([]) == []


def test_families_do_not_depend_on_the_order_of_the_prompts():
    rng = random.Random(3)
    heads = [tuple(rng.randrange(100) for _ in range(50)) for _ in range(5)]
    prompts = [rng.choice(heads) + tuple(rng.randrange(100) for _ in range(rng.randrange(40))) for _ in range(60)]
    by_head = {frozenset(i for i, p in enumerate(prompts) if p[:50] == head) for head in heads}
    assert {frozenset(family) for family in prefix_families(prompts)} == by_head - {frozenset()}


def test_an_ended_one_is_passed_over():
    first, second = sequence("first", (1,), 9), sequence("second", (1,), 5)
    queue = queue_of(first, second)
    first.abort()
    queue.forget(first)
    assert len(queue) == 1
    assert names(queue) == ["second"]
    assert len(queue) == 0


def test_what_does_not_fit_is_overtaken_a_bounded_number_of_times():
    queue = queue_of(sequence("large", (1,) * 400, 100), *(sequence(f"s{i}", (1,), 4, group=1) for i in range(99)))

    def only_small(one) -> bool:
        return one.num_prompt < 100

    passed = 0
    while queue.pop(only_small) is not None:
        passed += 1
    assert passed == MAX_OVERTAKEN
    assert queue.pop(lambda s: True).request.request_id == "large"  # it cannot be overtaken any more
    assert queue.pop(only_small).request.request_id == f"s{MAX_OVERTAKEN}"


def test_a_look_at_a_long_queue_is_bounded():
    looked_at = []
    queue = queue_of(*(sequence(f"{i}", (1,) * 9, 4) for i in range(1000)))
    assert queue.pop(lambda s: bool(looked_at.append(s))) is None
    assert len(looked_at) == LOOK_AHEAD
    assert len(queue) == 1000
