"""A server has one sink for all requests. Every kind of client calls it once for each step."""

import asyncio
import threading

import pytest

from llamabatch import SamplingParams
from llamabatch.chat.options import ChatOptions
from llamabatch.client.connect import connect
from llamabatch.config import EngineConfig
from llamabatch.engine.engine import Engine
from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.server.serving.dispatcher import OutputDispatcher, RequestStream
from tests.waiting import PATIENCE_S

N, TOKENS = 12, 150
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0)


def submit_one_by_one(client, sink):
    """Submits each request in a call of its own, with the same sink. Half of the requests have parsed answers."""
    inputs = InputProcessor(client)
    for number in range(N):
        text = f"The number {number} is"
        if number % 2:
            submission = inputs.prompts(text, PARAMS)
        else:
            submission = inputs.conversations([{"role": "user", "content": text}], PARAMS, ChatOptions())
        client.submit(submission.requests, sink, stream=True)


@pytest.mark.parametrize("options", [{}, {"isolate": True}], ids=str)
def test_the_engine_hands_over_once_a_step(options, monkeypatch, steps):
    made, step = [], Engine.step

    def counted(engine):
        made.append(1)
        return step(engine)

    monkeypatch.setattr(Engine, "step", counted)
    calls, tokens, done = [], {}, threading.Event()

    def sink(outputs):
        calls.append(len(outputs))
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if sum(map(len, tokens.values())) == N * TOKENS:
            done.set()

    client = connect(EngineConfig.from_options("tiny", {"n_slots": N, "n_ctx": 256, "instances": 1, **options}))
    try:
        with steps.held():  # so that all requests run together
            submit_one_by_one(client, sink)
        assert done.wait(PATIENCE_S)
    finally:
        client.close()
    assert [len(each) for each in tokens.values()] == [TOKENS] * N
    if options.get("isolate"):  # the steps are made in the child, so they cannot be counted here
        assert max(calls) == N
    else:
        assert len(calls) <= len(made)


@pytest.mark.parametrize("instances", [1, 2])
def test_a_hub_wakes_its_loop_at_most_once_a_hand_over(instances, steps, monkeypatch):
    client = connect(EngineConfig.from_options("tiny", {"n_slots": N, "n_ctx": 256, "instances": instances}))
    handovers, wakeups = [], []

    async def read():
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *given: (wakeups.append(given), wake(*given)))
        dispatcher = OutputDispatcher(loop, client.abort)

        def sink(outputs):
            handovers.append(outputs)
            dispatcher.sink(outputs)

        streams = []
        with steps.held():
            for number in range(N):
                stream = RequestStream(dispatcher, client.abort)
                stream.submission = InputProcessor(client).prompts(f"The number {number} is", PARAMS)
                dispatcher.add(stream, [request.request_id for request in stream.submission.requests])
                client.submit(stream.submission.requests, sink, stream=True)
                streams.append(stream)

        async def tokens(stream):
            return [token_id async for outputs in stream for each in outputs for token_id in each.token_ids]

        return await asyncio.gather(*map(tokens, streams))

    try:
        tokens = asyncio.run(read())
        whole = client.stats()
    finally:
        client.close()
    assert [len(each) for each in tokens] == [TOKENS] * N
    assert whole.generated_tokens == N * TOKENS
    assert len(wakeups) <= len(handovers) <= instances * (TOKENS + 2 * N)
