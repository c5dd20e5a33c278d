import random

from llamabatch.client.router import MAX_KNOWN, Affinity, Router
from llamabatch.engine.stats import EngineStats
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.scheduler.common_prefix import MIN_SHARED


def text(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1000) for _ in range(length))


def test_the_longest_known_beginning_is_found():
    affinity, head = Affinity(), text(0, 200)
    affinity.add((*head, *text(1, 100)), 1)
    affinity.add((*head, *text(2, 100)), 2)
    assert affinity.find((*head, *text(1, 100), *text(3, 50)))[0] == 1
    assert affinity.find((*head, *text(2, 100), *text(3, 50)))[0] == 2
    member, length = affinity.find((*head, *text(4, 100)))
    assert member == 2  # the last member that got this beginning
    assert 0.8 * 200 <= length <= 200
    assert affinity.find(text(5, 300)) is None
    assert affinity.find(head[: MIN_SHARED - 1]) is None


def test_only_so_much_is_remembered():
    affinity = Affinity()
    for seed in range(2000):
        affinity.add(text(seed, 100), 0)
    assert len(affinity._members) == MAX_KNOWN
    assert affinity.find(text(0, 100)) is None
    assert affinity.find(text(1999, 100)) is not None


class Engine:
    """Finishes all of its requests when a test calls finish()."""

    def __init__(self) -> None:
        self.alive = self.up = True
        self.taken: list[tuple[Request, object]] = []

    def submit(self, requests, sink, *, stream=False):
        self.taken += [(request, sink) for request in requests]

    def finish(self) -> None:
        for request, sink in self.taken:
            done = CompletionOutput(0, "", (1, 2, 3), FinishReason.LENGTH)
            whole = RequestOutput(request.request_id, None, request.prompt_token_ids, (done,))
            sink([SequenceOutput(request.request_id, (), "", whole)])
        self.taken.clear()

    def call(self, method, *arguments):
        return True

    def stats(self) -> EngineStats:
        return EngineStats()


def went_to(engines: list[Engine]) -> dict[str, int]:
    return {request.request_id: i for i, engine in enumerate(engines) for request, _ in engine.taken}


def rounds(keeps_prefixes: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the engines of 12 chats in their first turn and, in another order, in their second turn."""
    engines = [Engine() for _ in range(4)]
    router = Router(engines, keeps_prefixes)
    chats = {f"{i}": text(i, 300) for i in range(12)}
    placed = []
    for order in (list(chats), sorted(chats, key=lambda i: random.Random(i).random())):
        router.submit([Request(i, chats[i], SamplingParams(max_tokens=20)) for i in order], lambda outputs: None)
        placed.append(went_to(engines))
        for engine in engines:
            engine.finish()
        chats = {i: (*chats[i], 1, 2, 3, *text(99, 40)) for i in chats}
    first, second = placed
    return first, second


def test_the_next_turn_goes_where_the_last_one_was():
    first, second = rounds(keeps_prefixes=True)
    assert sum(first[i] == second[i] for i in first) >= 10
    first, second = rounds(keeps_prefixes=False)
    assert sum(first[i] == second[i] for i in first) < 6


def test_an_engine_with_too_much_to_do_is_left_alone():
    engines = [Engine(), Engine()]
    router = Router(engines, keeps_prefixes=True)
    router.submit([Request("a", text(0, 100), SamplingParams(max_tokens=5))], lambda outputs: None)
    engines[0].finish()
    more = [Request(f"{i}", text(0, 100), SamplingParams(max_tokens=100)) for i in range(8)]
    router.submit(more, lambda outputs: None)
    assert [len(engine.taken) for engine in engines] == [5, 3]


def test_after_a_reset_an_engine_is_chosen_by_its_load_alone():
    engines = [Engine(), Engine()]
    router = Router(engines, keeps_prefixes=True)
    turn = text(1, 300)

    def ask(name, prompt):
        router.submit([Request(name, prompt, SamplingParams(max_tokens=4))], lambda outputs: None)
        return went_to(engines)[name]

    router.submit([Request("busy", text(2, 300), SamplingParams(max_tokens=4))], lambda outputs: None)
    assert ask("first", turn) == 1
    engines[1].finish()
    engines[0].finish()
    assert ask("next", (*turn, 5)) == 1
    engines[1].finish()
    assert router.call("reset_prefix_cache") is True
    assert ask("anew", (*turn, 6)) == 0
