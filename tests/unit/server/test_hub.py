"""The hub: one wake-up for all that fast steps bring, and pieces joined where a reader sees no difference."""

import asyncio
import time

import pytest

from llamabatch.entrypoints.submission import Submission
from llamabatch.request.joining import joined
from llamabatch.request.logprobs import Logprob
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.request import Request
from llamabatch.request.tool_calls import ToolCallDelta
from llamabatch.server.hub import Hub, RequestStream


def piece(text, name="a", **more):
    return SequenceOutput(name, (len(text),), text, **more)


def last(name="a", text=""):
    completion = CompletionOutput(0, "whole", (1,), FinishReason.STOP)
    return SequenceOutput(name, (), text, RequestOutput(name, None, (1,), (completion,)))


def run(story):
    """Runs a story with a hub and the streams of two requests, "a" and "b"."""

    async def told():
        hub = Hub(asyncio.get_running_loop(), lambda ids: None)
        streams = {}
        for name in "ab":
            stream = streams[name] = RequestStream(hub, lambda ids: None)
            stream.submission = Submission([Request(name, (1,))], "prompt", "raise", None)
            hub.add(stream, [name])
        await story(hub, **streams)

    asyncio.run(told())


def test_pieces_of_fast_steps_come_together_and_those_of_slow_steps_at_once(monkeypatch):
    monkeypatch.setattr("llamabatch.server.hub._REST_PER_STREAM_S", 0.1)
    monkeypatch.setattr("llamabatch.server.hub._MOST_REST_S", 1.0)

    async def story(hub, a, b):
        hub.sink([piece("one "), piece("one ", "b")])
        begun = time.monotonic()
        [first] = await anext(a)
        assert first.text == "one "
        assert time.monotonic() - begun < 0.19  # at once
        for word in ("two ", "three "):
            hub.sink([piece(word), piece(word, "b")])
        assert hub.n_wakeups == 1  # the hub rests
        assert [each.text for each in await anext(a)] == ["two three "]
        assert time.monotonic() - begun >= 0.19  # 0.1 s for each of the two
        assert [each.text for each in await anext(b)] == ["one two three "]
        await asyncio.sleep(0.3)
        hub.sink([piece("four")])
        assert hub.n_wakeups == 2
        assert [each.text for each in await anext(a)] == ["four"]

    run(story)


def test_first_tokens_and_ends_wait_for_nothing_and_leave_the_others_where_they_are(monkeypatch):
    monkeypatch.setattr("llamabatch.server.hub._REST_PER_STREAM_S", 60.0)
    monkeypatch.setattr("llamabatch.server.hub._MOST_REST_S", 60.0)

    async def story(hub, a, b):
        hub.sink([piece("one ")])
        assert [each.text for each in await anext(a)] == ["one "]
        hub.sink([piece("two "), piece("first ", "b")])
        assert [each.text for each in await asyncio.wait_for(anext(b), 10)] == ["first "]
        hub.sink([piece("three "), piece("second", "b")])
        hub.sink([last("b")])
        assert [output.text for output in await asyncio.wait_for(b.outputs(), 10)] == ["whole"]
        waiting = asyncio.ensure_future(anext(a))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        hub.sink([last("a", "four")])
        assert "".join(each.text for each in await asyncio.wait_for(waiting, 10)) == "two three four"

    run(story)


def test_an_exception_before_outputs_are_given_leaves_them_for_the_next_look(monkeypatch):
    async def story(hub, a, b):
        raises = [RuntimeError("once")]
        later = hub._loop.call_later

        class Loop:
            def call_later(self, *args):
                if raises:
                    raise raises.pop()
                return later(*args)

        monkeypatch.setattr(hub, "_loop", Loop())
        hub._outputs.append([piece("one ")])
        with pytest.raises(RuntimeError):
            hub._drain()
        hub._drain()
        assert [each.text for each in await asyncio.wait_for(anext(a), 10)] == ["one "]

    run(story)


def test_a_reader_that_is_late_has_every_character_once():
    async def story(hub, a, b):
        for number in range(1000):
            hub.sink([piece(f"{number} "), piece(f"{number},", "b")])
        hub.sink([last("a", "end"), last("b")])
        texts = {}
        for name, stream in (("a", a), ("b", b)):
            texts[name] = "".join([each.text async for outputs in stream for each in outputs])
        assert texts["a"] == "".join(f"{number} " for number in range(1000)) + "end"
        assert texts["b"] == "".join(f"{number}," for number in range(1000))

    run(story)


def test_what_a_reader_could_tell_apart_stays_apart():
    logprobs = ({1: Logprob(-1.0, 1, "x")},)
    call = (ToolCallDelta(0, "id", "f"),)
    for apart in (
        [piece("a", logprobs=logprobs), piece("b", logprobs=logprobs)],
        [piece("a"), piece("", reasoning="thinks")],  # a piece has its thinking before its text
        [piece("a"), piece("", tool_calls=call), piece("b")],
        [piece("a", index=0), piece("b", index=1)],
        [piece("a"), piece("b", "other")],
    ):
        assert joined(apart) == apart
    together = joined([piece("", reasoning="x"), piece("", reasoning="y"), piece("a"), last(text="b")])
    assert [(each.reasoning, each.text, each.finish_reason) for each in together] == [("xy", "ab", FinishReason.STOP)]
    mixed = joined([piece("a"), piece("x", "b"), piece("b"), piece("y", "b")])
    assert [(each.request_id, each.text) for each in mixed] == [("a", "ab"), ("b", "xy")]


def test_requests_of_a_loop_that_is_closed_are_aborted():
    aborted = []

    async def made():
        hub = Hub(asyncio.get_running_loop(), aborted.append)
        hub.add(RequestStream(hub, aborted.append), ["a", "b"])
        return hub

    hub = asyncio.run(made())
    hub.sink([piece("one")])
    assert aborted == [["a", "b"]]
    assert not hub.request_ids
    hub.sink([piece("two")])
    assert aborted[1:] in ([], [[]])  # nothing is left to abort


def test_what_a_slow_reader_has_not_fetched_does_not_grow():
    async def story(hub, a, b):
        for number in range(1000):
            a.feed(piece(f"{number} "))
        assert len(a._pending) <= 64
        assert [each.text for each in await anext(a)] == ["".join(f"{number} " for number in range(1000))]

    run(story)
