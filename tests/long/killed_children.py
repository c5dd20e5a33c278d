"""A child with 8 requests in flight is killed: they all finish, and no token comes twice."""

from __future__ import annotations

import os
import queue
import random
import signal
from pathlib import Path

from llamabatch.client.process_client import ChildClient
from llamabatch.config import EngineConfig
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from tests.waiting import until

HOLDS = "child killed by SIGKILL, SIGSEGV or SIGABRT with 8 in flight: all finish, none twice"
TOTAL = 50
QUICK = 3

_N = 8
_TOKENS = 220


def case(number: int, folder: Path) -> None:
    """One kill: the signals in turn, the moment drawn by the number, half of the requests streamed."""
    rng = random.Random(number)
    events: queue.SimpleQueue[SequenceOutput] = queue.SimpleQueue()
    client = ChildClient(EngineConfig("tiny", n_slots=_N, n_ctx=512))
    try:
        [killed] = client.pids
        requests = [_request(rng, f"{number}-{at}") for at in range(_N)]
        for stream in (False, True):
            client.submit(requests[stream::2], lambda told: [events.put(each) for each in told], stream=stream)
        told: dict[str, list[int]] = {request.request_id: [] for request in requests}
        ends: dict[str, SequenceOutput] = {}
        kill_after = rng.randrange(_N // 2 * 100)  # of the streamed tokens, so that all are in flight
        while len(ends) < _N:
            event = events.get(timeout=120)
            assert event.request_id not in ends, "told after its end"
            told[event.request_id] += event.token_ids
            if event.finished is not None:
                ends[event.request_id] = event
            if kill_after is not None and sum(map(len, told.values())) > kill_after:
                assert not ends, "one had ended before the kill"
                os.kill(killed, (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)[number % 3])
                kill_after = None
        until(lambda: client.stats().restarts == 1)
    finally:
        client.close()
    assert events.empty(), "told after all had ended"
    for at, request in enumerate(requests):
        output = ends[request.request_id].finished
        assert output is not None
        assert output.error is None, output.error
        assert len(output.token_ids) == _TOKENS
        if at % 2:
            assert tuple(told[request.request_id]) == output.token_ids, "the stream differs from the whole"


def _request(rng: random.Random, name: str) -> Request:
    params = SamplingParams(max_tokens=_TOKENS, ignore_eos=True, temperature=0.8, seed=rng.randrange(2**32))
    return Request(name, tuple(rng.randrange(300, 1000) for _ in range(rng.randrange(4, 40))), params)
