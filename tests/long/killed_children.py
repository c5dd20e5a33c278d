"""A child with 8 requests in flight is killed. All requests finish with their texts, and no token comes twice."""

from __future__ import annotations

import atexit
import os
import queue
import random
import signal
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from llamabatch.client.process_client import ChildClient
from llamabatch.config import EngineConfig
from llamabatch.request.outputs import SequenceOutput
from tests.archs import models
from tests.model.state_copies import N_CTX, N_VOCAB, SIZES, Fresh, request, text_of
from tests.waiting import until

HOLDS = (
    "child killed by SIGKILL, SIGSEGV or SIGABRT with 8 in flight, on a transformer, hybrids, recurrent and "
    "sliding-window models: all finish with the logprobs of a fresh engine (the same bits where the plan promises "
    "them), none twice"
)
EACH = 125
QUICK = 8

_N = 8
_N_TOKENS = 140
_HEAD = 60  # tokens at the beginning of most prompts, so that states are forked before the kill
# architecture or model, options of the engine, tolerance of logprobs (0: equal bits)
_KINDS: list[tuple[str, dict[str, Any], float]] = [
    ("tiny", {}, 0.0),
    ("qwen35", {}, 0.0),
    ("granitehybrid", {}, 0.0),
    ("mamba2", {}, 0.0),
    ("lfm2", {}, 1e-4),
    ("gpt-oss", {"swa_full": False}, 1e-4),
    ("qwen35", {"speculate": "lookup", "speculate_always": True, "n_draft": 3}, 0.0),
    ("qwen35", {"kv": "unified", "kv_cells": 8 * N_CTX}, 1e-4),
]
TOTAL = EACH * len(_KINDS)


def case(number: int, folder: Path) -> None:
    """Kills the child once. Signals take turns, the number draws the moment, and half of the requests are streamed."""
    del folder
    kind = number % len(_KINDS)
    path, fresh = _fresh(kind)
    rng = random.Random(number)
    prompts = rng.sample(_prompts(kind), _N)
    requests = [request(f"{number}-{at}", prompt, _N_TOKENS) for at, prompt in enumerate(prompts)]
    events: queue.SimpleQueue[SequenceOutput] = queue.SimpleQueue()
    client = ChildClient(EngineConfig(path, n_slots=_N, strategy="batched", **SIZES, **_KINDS[kind][1]))
    try:
        [killed] = client.pids
        for stream in (False, True):
            client.submit(requests[stream::2], lambda told: [events.put(each) for each in told], stream=stream)
        told: dict[str, list[int]] = {each.request_id: [] for each in requests}
        ends: dict[str, SequenceOutput] = {}
        kill_after = rng.randrange(_N // 2 * 70)  # number of streamed tokens before the kill: half of them at most
        while len(ends) < _N:
            event = events.get(timeout=120)
            assert event.request_id not in ends, "told after its end"
            told[event.request_id] += event.token_ids
            if event.finished is not None:
                ends[event.request_id] = event
            if kill_after is not None and sum(map(len, told.values())) > kill_after:
                os.kill(killed, (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)[number // len(_KINDS) % 3])
                kill_after = None
        until(lambda: client.stats().restarts == 1)
    finally:
        client.close()
    assert events.empty(), "told after all had ended"
    for at, each in enumerate(requests):
        output = ends[each.request_id].finished
        assert output is not None
        if at % 2:
            assert tuple(told[each.request_id]) == output.token_ids, "the stream differs from the whole"
        fresh.compare(prompts[at], text_of(output))


@cache
def _fresh(kind: int) -> tuple[str, Fresh]:
    name, options, tolerance = _KINDS[kind]
    path = name
    if name != "tiny":
        place = tempfile.TemporaryDirectory(prefix="llamabatch-states-")
        atexit.register(place.cleanup)
        path = str(models.write(Path(place.name), [name])[0])
    return path, Fresh(path, tolerance, _N_TOKENS, options)


@cache
def _prompts(kind: int) -> list[tuple[int, ...]]:
    """Returns few prompts, so that a fresh engine computes their texts only once for many cases."""
    rng = random.Random(kind)
    head = [rng.randrange(N_VOCAB) for _ in range(_HEAD)]
    tails = ([rng.randrange(N_VOCAB) for _ in range(rng.randint(4, 40))] for _ in range(32))
    return [tuple(head + tail) if rng.random() < 0.7 else tuple(tail) for tail in tails]
