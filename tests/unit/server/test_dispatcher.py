"""The dispatcher wakes the loop once for many fast steps, and joins pieces where a reader sees no difference."""

import asyncio

import pytest

from llamabatch.entrypoints.submission import Submission
from llamabatch.request.joining import joined
from llamabatch.request.logprobs import Logprob
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.request import Request
from llamabatch.request.tool_calls import ToolCallDelta
from llamabatch.server.serving.dispatcher import OutputDispatcher, RequestStream
from tests.waiting import PATIENCE_S


def piece(text, name="a", **more):
    return SequenceOutput(name, (len(text),), text, **more)


def last(name="a", text=""):
    completion = CompletionOutput(0, "whole", (1,), FinishReason.STOP)
    return SequenceOutput(name, (), text, RequestOutput(name, None, (1,), (completion,)))


def run(story):
    """Runs a story with a dispatcher and the streams of the requests "a" and "b"."""

    async def told():
        dispatcher = OutputDispatcher(asyncio.get_running_loop(), lambda ids: None)
        streams = {}
        for name in "ab":
            stream = streams[name] = RequestStream(dispatcher, lambda ids: None)
            stream.submission = Submission([Request(name, (1,))], "prompt", "raise", None)
            dispatcher.add(stream, [name])
        await story(dispatcher, **streams)

    asyncio.run(told())


async def turns():
    for _ in range(5):
        await asyncio.sleep(0)


def test_pieces_of_fast_steps_come_together_and_those_of_slow_steps_at_once(monkeypatch):
    monkeypatch.setattr("llamabatch.server.serving.dispatcher._REST_PER_STREAM_S", 0.1)
    monkeypatch.setattr("llamabatch.server.serving.dispatcher._MOST_REST_S", 1.0)

    async def story(dispatcher, a, b):
        now, wakeups, loop = [0.0], [], asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "time", lambda: now[0])
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda call: (wakeups.append(call), wake(call)))
        dispatcher.sink([piece("one "), piece("one ", "b")])
        [first] = await anext(a)
        assert first.text == "one "
        for word in ("two ", "three "):
            dispatcher.sink([piece(word), piece(word, "b")])
        assert len(wakeups) == 1  # the dispatcher pauses
        waiting = asyncio.ensure_future(anext(a))
        now[0] = 0.19
        await turns()
        assert not waiting.done()
        now[0] = 0.21  # the pause is 0.1 s for each of two outputs
        assert [each.text for each in await waiting] == ["two three "]
        assert [each.text for each in await anext(b)] == ["one two three "]
        now[0] = 0.5
        await turns()
        dispatcher.sink([piece("four")])
        assert len(wakeups) == 2
        assert [each.text for each in await anext(a)] == ["four"]

    run(story)


def test_first_tokens_and_ends_wait_for_nothing_and_leave_the_others_where_they_are(monkeypatch):
    monkeypatch.setattr("llamabatch.server.serving.dispatcher._REST_PER_STREAM_S", 600.0)
    monkeypatch.setattr("llamabatch.server.serving.dispatcher._MOST_REST_S", 600.0)

    async def story(dispatcher, a, b):
        dispatcher.sink([piece("one ")])
        assert [each.text for each in await anext(a)] == ["one "]
        dispatcher.sink([piece("two "), piece("first ", "b")])
        assert [each.text for each in await asyncio.wait_for(anext(b), PATIENCE_S)] == ["first "]
        dispatcher.sink([piece("three "), piece("second", "b")])
        dispatcher.sink([last("b")])
        assert [output.text for output in await asyncio.wait_for(b.outputs(), PATIENCE_S)] == ["whole"]
        waiting = asyncio.ensure_future(anext(a))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        dispatcher.sink([last("a", "four")])
        assert "".join(each.text for each in await asyncio.wait_for(waiting, PATIENCE_S)) == "two three four"

    run(story)


def test_an_exception_before_outputs_are_given_leaves_them_for_the_next_look(monkeypatch):
    async def story(dispatcher, a, b):
        raises = [RuntimeError("once")]
        later = dispatcher._loop.call_later

        class Loop:
            def call_later(self, *args):
                if raises:
                    raise raises.pop()
                return later(*args)

        monkeypatch.setattr(dispatcher, "_loop", Loop())
        dispatcher._outputs.append([piece("one ")])
        with pytest.raises(RuntimeError):
            dispatcher._drain()
        dispatcher._drain()
        assert [each.text for each in await asyncio.wait_for(anext(a), PATIENCE_S)] == ["one "]

    run(story)


def test_a_reader_that_is_late_has_every_character_once():
    async def story(dispatcher, a, b):
        for number in range(1000):
            dispatcher.sink([piece(f"{number} "), piece(f"{number},", "b")])
        dispatcher.sink([last("a", "end"), last("b")])
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
        [piece("a"), piece("", reasoning="thinks")],  # a piece shows its thinking before its text
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
        dispatcher = OutputDispatcher(asyncio.get_running_loop(), aborted.append)
        dispatcher.add(RequestStream(dispatcher, aborted.append), ["a", "b"])
        return dispatcher

    dispatcher = asyncio.run(made())
    dispatcher.sink([piece("one")])
    assert aborted == [["a", "b"]]
    assert not dispatcher.request_ids
    dispatcher.sink([piece("two")])
    assert aborted[1:] in ([], [[]])  # there is nothing left to abort


def test_what_a_slow_reader_has_not_fetched_does_not_grow():
    async def story(dispatcher, a, b):
        for number in range(1000):
            a.feed(piece(f"{number} "))
        assert len(a._pending) <= 64
        assert [each.text for each in await anext(a)] == ["".join(f"{number} " for number in range(1000))]

    run(story)


def test_the_tokens_of_a_request_are_spent_once_streamed_or_not():
    async def story(dispatcher, a, b):
        spent = a.spend, b.spend = [].append, [].append
        whole = CompletionOutput(0, "one two", (1, 2, 3), FinishReason.STOP)
        b.feed(SequenceOutput("b", (3,), "", RequestOutput("b", None, (1,), (whole, whole))))
        a.feed(SequenceOutput("a", (1,), "one"))
        a.feed(SequenceOutput("a", (2, 3), " two", RequestOutput("a", None, (1,), (whole,))))
        assert [each.__self__ for each in spent] == [[1, 2], [6]]

    run(story)
