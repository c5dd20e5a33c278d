"""Measures one strategy: fresh processes, a warm-up, then all prompts at once."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from llamabatch.client.process_client import ChildClient, RouterClient
from llamabatch.client.restart_policy import NO_RESTART
from llamabatch.config import EngineConfig
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import EngineClosedError, EngineError
from llamabatch.planning.plan import Plan
from llamabatch.request.outputs import RequestOutput, SequenceOutput
from llamabatch.request.request import Request, new_group
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.scheduler.policies import has_one_slot
from llamabatch.tools.processes import PeakMemory, no_child_left

BASELINE = "baseline"
BASELINE_PROGRAM = "llamabatch.tools.compare.baseline"
_WARM_UP_TOKENS = 4

OnDone = Callable[[RequestOutput], None]


@dataclass(frozen=True)
class Measurement:
    """The result of one run of all prompts.

    Attributes:
        outputs: one output per prompt, in the order of the prompts.
        wall_s: seconds from the submission to the last output.
        peak_memory_bytes: sum of the processes' peaks of resident memory; None where the system does not report them.
        stats: what the engines counted (requests, tokens, steps), without the warm-up.
        plan: the plan of the engines.
    """

    outputs: tuple[RequestOutput, ...]
    wall_s: float
    peak_memory_bytes: int | None
    stats: EngineStats
    plan: Plan


def measure(
    config: EngineConfig, prompts: tuple[tuple[int, ...], ...], max_tokens: int, on_done: OnDone, *, baseline: bool
) -> Measurement:
    """Runs all prompts at once with greedy sampling, in new child processes.

    Args:
        config: options of the engines; "multi-instance" starts several children, every other strategy one.
        prompts: token ids of each prompt.
        on_done: called with the output of each request that finishes.
        baseline: run the loop over llama_cpp.Llama instead of an engine.

    Raises:
        EngineError: no request succeeded.
        Other errors, if an engine cannot start.
    """
    with contextlib.ExitStack() as stack, no_child_left():  # after an error, kills the children before client.close
        client = _client(config, baseline)
        stack.callback(client.close)
        slots = 1 if baseline else slots_of(client.plan) * client.plan.config.instances
        warm = _run(client, _warm_up(prompts, 2 if slots == 1 else slots), lambda output: None)
        before = _stats(client, warm)
        with PeakMemory(client.pids) as peak:
            start = time.perf_counter()
            requests = _requests(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))
            outputs = _run(client, requests, on_done)
            wall_s = time.perf_counter() - start
            after, peak_memory = _stats(client, outputs), peak.read()
        if all(output.error for output in outputs):
            raise EngineError(f"no request succeeded: {outputs[0].error}")
        return Measurement(outputs, wall_s, peak_memory, after.since(before), client.plan)


def slots_of(plan: Plan) -> int:
    """Returns the number of sequences that one engine of this plan computes at once."""
    config = plan.config.for_one_engine()
    inner = config.instance_strategy if config.strategy == "multi-instance" else config.strategy
    return 1 if has_one_slot(inner) else config.n_slots


def _stats(client: ChildClient | RouterClient, outputs: tuple[RequestOutput, ...]) -> EngineStats:
    """Returns what the engines have counted. Raises EngineError if an engine has ended. The error has the text of the
    first error of `outputs`, if there is one."""
    try:
        return client.stats()
    except EngineClosedError as error:
        last_words = [output.error for output in outputs if output.error]
        raise EngineError(last_words[0] if last_words else str(error)) from error


def _client(config: EngineConfig, baseline: bool) -> ChildClient | RouterClient:
    """Starts a client that never restarts a child. So the death of a child is reported as an error of the row, and no
    restart distorts a figure."""
    if baseline:
        return ChildClient(config, BASELINE_PROGRAM, NO_RESTART)
    if config.strategy == "multi-instance":
        return RouterClient(config, NO_RESTART)
    return ChildClient(replace(config, isolate=True), policy=NO_RESTART)


def _warm_up(prompts: tuple[tuple[int, ...], ...], most: int) -> list[Request]:
    """Returns requests that load weights, caches and buffers into memory. Their prompts are measured prompts with the
    tokens in reverse order: the lengths are the same, but the measured prompts find no prefix in the cache."""
    chosen = tuple(tuple(reversed(prompt)) for prompt in prompts[:most])
    return _requests(chosen, SamplingParams(temperature=0, max_tokens=_WARM_UP_TOKENS, ignore_eos=True))


def _requests(prompts: tuple[tuple[int, ...], ...], params: SamplingParams) -> list[Request]:
    group, now = new_group(), time.perf_counter()
    return [
        Request(f"{group}-{number}", prompt, params, arrival_s=now, group=group)
        for number, prompt in enumerate(prompts)
    ]


def _run(client: ChildClient | RouterClient, requests: list[Request], on_done: OnDone) -> tuple[RequestOutput, ...]:
    """Submits all requests, waits for them, and returns the outputs in the order of the requests."""
    done: dict[str, RequestOutput] = {}
    events: queue.SimpleQueue[list[SequenceOutput]] = queue.SimpleQueue()
    client.submit(requests, events.put)
    while len(done) < len(requests):
        for event in events.get():
            assert event.finished is not None
            done[event.request_id] = event.finished
            on_done(event.finished)
    return tuple(done[request.request_id] for request in requests)
