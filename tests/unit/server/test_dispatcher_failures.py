"""Failures in a dispatcher: each reader still gets an answer, and all outputs from before the failure."""

import asyncio

import pytest

from llamabatch.entrypoints.submission import Submission
from llamabatch.errors import EngineError
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.request import Request
from llamabatch.server.serving import dispatcher as dispatcher_module
from llamabatch.server.serving.dispatcher import OutputDispatcher, RequestStream, before_failure
from tests.waiting import until_soon


def ended(name, text="", *, error=None, reason=FinishReason.STOP):
    whole = RequestOutput(name, None, (1,), (CompletionOutput(0, text, (), reason),), error)
    return SequenceOutput(name, (), text, whole)


def piece(name, text):
    return SequenceOutput(name, (7,), text)


class World:
    """A dispatcher on the running loop, and the ids of aborted requests."""

    def __init__(self):
        self.aborted = []
        self.dispatcher = OutputDispatcher(asyncio.get_running_loop(), self.aborted.extend)

    def stream(self, *names, errors="raise"):
        requests = [Request(name, (1,)) for name in names]
        stream = RequestStream(self.dispatcher, self.aborted.extend)
        stream.submission = Submission(requests, "prompt", errors, (lambda i: f"prompts[{i}]") if names[1:] else None)
        self.dispatcher.add(stream, names)
        stream.started()
        return stream


async def texts_of(stream):
    return "".join([output.text async for outputs in stream for output in outputs])


def run(main):
    asyncio.run(asyncio.wait_for(main(), 20))


def test_the_text_before_an_error_comes_before_it():
    async def main():
        world = World()
        stream, seen = world.stream("a", "b"), []
        world.dispatcher.sink([piece("a", "one "), piece("b", "two "), ended("b", "three", error="it failed")])

        async def read():
            async for outputs in stream:
                seen.extend((output.request_id, output.text) for output in outputs)

        with pytest.raises(EngineError, match=r"prompts\[1\]: it failed"):
            await read()
        assert seen == [("a", "one "), ("b", "two three")]
        assert world.aborted == ["a"]

    run(main)


def test_outputs_are_cut_before_the_first_bad_end_only():
    good = [piece("a", "x"), ended("b", "y"), piece("a", "z")]
    assert before_failure(good) == (good, [])
    bare = ended("c", error="late")
    assert before_failure([bare, *good]) == ([bare, *good], [])
    aborted = ended("c", "text", reason=FinishReason.ABORT)
    ready, rest = before_failure([good[0], aborted, *good])
    assert [(output.text, output.finished) for output in ready] == [("x", None), ("text", None)]
    assert rest[0].text == ""
    assert rest[0].finished is aborted.finished
    assert rest[1:] == good


@pytest.mark.parametrize("first", [piece("bad", "x"), ended("bad", "x")])
@pytest.mark.parametrize("error", [TypeError, type("Odd", (BaseException,), {})])
def test_an_output_that_cannot_be_given_is_the_error_of_its_reader_alone(error, first, monkeypatch):
    async def main():
        world = World()
        bad, good = world.stream("bad"), world.stream("good")
        feed = RequestStream.feed

        def failing(self, output):
            if output.request_id == "bad":
                raise error("injected")
            feed(self, output)

        monkeypatch.setattr(RequestStream, "feed", failing)
        world.dispatcher.sink([first, piece("good", "one "), ended("good", "two")])
        assert await texts_of(good) == "one two"
        with pytest.raises(EngineError, match=r"an output was lost: .*injected"):
            await texts_of(bad)
        assert world.aborted == ["bad"]

    run(main)


def test_outputs_of_a_wake_up_that_was_lost_come_with_the_next_look(monkeypatch):
    monkeypatch.setattr(dispatcher_module, "_LOOK_S", 0.02)

    async def main():
        world = World()
        stream = world.stream("a")
        world.dispatcher._is_due = True  # the drain that was scheduled never ran
        world.dispatcher.sink([ended("a", "whole")])
        assert await texts_of(stream) == "whole"
        await until_soon(lambda: world.dispatcher._timer is None)  # no more looks are scheduled

    run(main)


def test_a_rest_that_never_ends_is_ended_by_the_next_look(monkeypatch):
    monkeypatch.setattr(dispatcher_module, "_LOOK_S", 0.02)

    async def main():
        world = World()
        stream = world.stream("a")
        world.dispatcher._is_resting = True  # the call that ends the pause has failed
        world.dispatcher.sink([piece("a", "one")])
        assert [output.text for output in await anext(stream)] == ["one"]
        await until_soon(lambda: not world.dispatcher._is_resting)
        world.dispatcher.sink([ended("a", "two")])
        assert await texts_of(stream) == "two"

    run(main)


def test_a_wake_up_that_raises_gives_no_output_twice(monkeypatch):
    async def main():
        world = World()
        stream = world.stream("a")
        loop = asyncio.get_running_loop()
        wake, failures = loop.call_soon_threadsafe, [MemoryError("no memory")]

        def failing(callback):
            if failures:
                raise failures.pop()
            return wake(callback)

        monkeypatch.setattr(loop, "call_soon_threadsafe", failing)
        outputs = [piece("a", "one "), ended("a", "two")]
        with pytest.raises(MemoryError):
            world.dispatcher.sink(outputs)
        for output in outputs:  # emit sends outputs one by one, too
            world.dispatcher.sink([output])
        assert await texts_of(stream) == "one two"

    run(main)
