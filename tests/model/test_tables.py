"""After its end, of whatever kind, a request is in no table."""

import asyncio
import contextlib
import queue
import random

import pytest

from llamabatch import QueueFull, SamplingParams
from llamabatch.chat.options import ChatOptions
from llamabatch.client.connect import connect
from llamabatch.config import EngineConfig
from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.request.request import Request
from llamabatch.server.options import ServerOptions
from llamabatch.server.serving.serving import Serving
from tests.tables import tables_of
from tests.waiting import PATIENCE_S, until, until_soon

GROUP = 50
ENGINE = {"n_slots": 8, "n_ctx": 128, "strategy": "batched", "max_queue": 4 * GROUP}
SHORT = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
LATE = SamplingParams(max_tokens=30, ignore_eos=True, deadline_s=0.02)
TWO = SamplingParams(max_tokens=2, n=2, temperature=0)
FORM = SamplingParams(max_tokens=2, structured_outputs={"choice": ["a", "b"]})
BEHIND = SamplingParams(max_tokens=2, background=True, priority=3)
HI = [{"role": "user", "content": "Hi"}]


def raises(token_ids, logits):
    raise ValueError("no")


def requests_of(inputs, number, in_process):
    """Returns a group of requests of all kinds. Some of them never end by themselves."""
    made = [
        *inputs.prompts(["x"] * 10, SHORT).requests,
        *inputs.conversations([HI] * 10, SHORT, ChatOptions()).requests,
    ]
    for params in (LONG, LATE, TWO, FORM, BEHIND):
        made += inputs.prompts([f"{number} is"] * 4, params).requests
    made.append(Request(f"too long {number}", (5,) * 500, SHORT))
    made.append(Request(f"no token {number}", (-1,), SHORT))
    if in_process:
        made += inputs.prompts(["x"] * 2, SamplingParams(max_tokens=2, logits_processors=[raises])).requests
    random.Random(number).shuffle(made)
    return made


@pytest.mark.parametrize(
    ("options", "n_groups"), [({"instances": 1}, 40), ({"instances": 2}, 20), ({"isolate": True}, 10)], ids=str
)
def test_of_an_engine(options, n_groups, steps):
    client = connect(EngineConfig.from_options("tiny", ENGINE | options))
    ids, told, reasons, tables = set(), queue.SimpleQueue(), [], set()

    def sink(outputs):
        ended = [output.finished for output in outputs if output.finished is not None]
        told.put(ended)
        if any(each.request_id.endswith("7") and each.error is None for each in ended):
            raise OSError("no")  # the request ends a second time, with this error

    try:
        inputs = InputProcessor(client)
        n_ended = 0
        for number in range(n_groups):
            asked = requests_of(inputs, number, "isolate" not in options)
            ids |= {request.request_id for request in asked}
            again = queue.SimpleQueue()
            with steps.held() if number == 1 else contextlib.nullcontext():
                client.submit(asked, told.put if number % 2 else sink, stream=number % 3 == 0)
                client.submit(asked[:1], again.put)
                if number == 1:
                    tables |= tables_of(client, ids)
            with pytest.raises(QueueFull):
                client.submit([Request(f"{number} {at}", (5,), SHORT) for at in range(300)], told.put)
            client.abort([request.request_id for request in asked if request.params is LONG])
            left = {request.request_id for request in asked}
            while left:
                for each in told.get(timeout=PATIENCE_S):
                    whole = getattr(each, "finished", each)
                    if whole is None:
                        continue
                    reasons.append(whole.outputs[0].finish_reason)
                    left.discard(whole.request_id)
            n_ended += len(asked)
        until_empty(client)
        assert {"length", "abort", "error"} <= set(reasons)
        assert n_ended > 40 * n_groups
        assert tables >= {"RequestTable._in_flight"}  # proves that the search finds tables
        del asked, again, left
        assert not tables_of(client, ids)
    finally:
        client.close()


def until_empty(client):
    """Waits until the client has no requests. An engine drops a request just after its caller gets the last output."""
    until(lambda: not ((stats := client.stats()).running or stats.waiting or len(client.in_flight)))
    client.call("reset_prefix_cache")  # runs after all earlier commands


async def call(serving, number, ids):
    """Makes one call of a client."""
    params = (SHORT, LONG, LATE, TWO)[number % 4]
    chat = number % 3 == 0

    def prepare(inputs):
        prompts = [f"{number} is"] * 4
        if chat:
            submission = inputs.conversations([HI] * 4, params, ChatOptions(), errors="return")
        else:
            submission = inputs.prompts(prompts, params, errors="return")
        ids.update(request.request_id for request in submission.requests)
        return submission

    stream = await serving.submit(prepare, 4, params.n, stream=number % 2 == 0)
    async for _ in stream:
        pass


N_GROUPS, N_CALLS = 8, 8
WANTED = {"RequestTable._in_flight", "Admission._entered", "OutputDispatcher._streams"}


@pytest.mark.parametrize("options", [{"instances": 1}, {"isolate": True}], ids=str)
def test_of_a_server(options, steps):
    ids: set[str] = set()
    tables: set[str] = set()

    async def known(n):
        await until_soon(lambda: len(ids) >= n)

    async def main():
        serving = Serving(EngineConfig.from_options("tiny", ENGINE | options), ServerOptions())

        def all_seen():
            tables.update(tables_of(serving, ids))
            return tables >= WANTED

        await asyncio.wrap_future(serving.start())
        try:
            for group in range(N_GROUPS):
                with steps.held() if group == 1 else contextlib.nullcontext():
                    calls = [asyncio.ensure_future(call(serving, group * N_CALLS + at, ids)) for at in range(N_CALLS)]
                    # a client that leaves before its prompts are read has no request in any table
                    await known((group + 1) * N_CALLS * 4)
                    if group == 1:
                        await until_soon(all_seen, lambda: tables)
                for one in calls[group % 3 :: 3]:
                    one.cancel()  # its client leaves
                ends = await asyncio.gather(*calls, return_exceptions=True)
                assert not [end for end in ends if isinstance(end, AssertionError)], ends
                del calls, ends
            await serving.on_thread(until_empty, serving.client)
            await until_soon(lambda: not tables_of(serving, ids), lambda: tables_of(serving, ids))
        finally:
            await serving.aclose()

    asyncio.run(asyncio.wait_for(main(), 4 * PATIENCE_S))
    assert len(ids) == N_GROUPS * N_CALLS * 4
