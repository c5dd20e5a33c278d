"""One of 1,000 requests always kills the engine. It ends as an error, and the others finish."""

from __future__ import annotations

import queue
import random
from pathlib import Path

from llamabatch.client.process_client import ChildClient
from llamabatch.config import EngineConfig
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from tests.workers.poisoned_worker import POISON

HOLDS = "a request that always kills the engine, among 1,000: 999 results and 1 error, at most 3 restarts"
TOTAL = 3
QUICK = 1

_N = 1000
_PROGRAM = "tests.workers.poisoned_worker"


def case(number: int, folder: Path) -> None:
    """Runs the requests. The number draws the place of the request that kills."""
    rng = random.Random(number)
    culprit = rng.randrange(_N)
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
    prompts = [tuple(rng.randrange(300, 1000) for _ in range(rng.randrange(3, 12))) for _ in range(_N)]
    prompts[culprit] = (*POISON, *prompts[culprit])
    events: queue.SimpleQueue[list[SequenceOutput]] = queue.SimpleQueue()
    client = ChildClient(EngineConfig("tiny", n_slots=32, n_ctx=256), _PROGRAM)
    try:
        client.submit([Request(str(at), prompt, params) for at, prompt in enumerate(prompts)], events.put)
        errors: dict[str, str | None] = {}
        while len(errors) < _N:
            for event in events.get(timeout=300):
                assert event.finished is not None
                assert event.request_id not in errors, "ended twice"
                errors[event.request_id] = event.finished.error
        restarts = client.stats().restarts
    finally:
        client.close()
    failed = {request_id: error for request_id, error in errors.items() if error is not None}
    assert list(failed) == [str(culprit)], failed
    assert "SIGSEGV" in str(failed[str(culprit)])
    assert restarts <= 3, restarts
