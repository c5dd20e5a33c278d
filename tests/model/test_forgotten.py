"""An LLM without references ends at once, without garbage collection, with its threads, processes and memory."""

import asyncio
import contextlib
import gc
import queue
import weakref

import pytest

from llamabatch import LLM, AsyncLLM, LlamaBatchError, Request, SamplingParams
from llamabatch.client.wire import Wire
from llamabatch.compat import Llama
from llamabatch.llama.model import Model
from llamabatch.utils.cancellation import is_cancelled
from tests.clients import innermost
from tests.waiting import PATIENCE_S, until, until_soon

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
TOO_LONG = "x " * 2000
PLACES = {
    "a thread": {"strategy": "batched", "instances": 1, "max_queue": 8},
    "two threads": {"strategy": "batched", "instances": 2},
    "a child": {"strategy": "batched", "isolate": True},
    "two children": {"strategy": "multi-instance", "instances": 2},
}


@pytest.fixture(autouse=True)
def no_collection():
    gc.disable()
    yield
    gc.enable()


def use(llm):
    llm.generate(["x", "y"], SHORT)
    llm.chat([{"role": "user", "content": "Hi"}], SHORT)
    llm.score("x", [" y"])
    llm.generate("x", SamplingParams(max_tokens=8, structured_outputs={"choice": ["a", "b"]}))
    pieces = llm.stream(["x"] * 3, LONG)
    next(pieces)


def fail(llm):
    for call in (
        lambda: llm.generate(TOO_LONG, SHORT),
        lambda: llm.generate([TOO_LONG, "x"], SHORT, errors="raise"),
        lambda: llm.score("x", [TOO_LONG]),
        lambda: llm.generate("x", SamplingParams(structured_outputs={"grammar": "root ::= ("})),
        lambda: llm.load_adapter("a", "nowhere.gguf"),
        lambda: llm.load_prefix("nowhere"),
        lambda: llm.chat([{"role": "user", "content": "Hi"}], chat_template="{{ raise_exception('no') }}"),
    ):
        with contextlib.suppress(LlamaBatchError):
            call()


def refuse_in_the_engine(llm):
    """Submits a request that the engine refuses. It is the last command of the engine's thread."""
    told = queue.SimpleQueue()
    llm._client.submit([Request("a", (5,) * 2000, SHORT)], told.put)
    assert told.get(timeout=PATIENCE_S)[0].finished.error is not None


USES = {"works": [use], "fails": [fail], "refuses": [refuse_in_the_engine], "all": [use, fail, refuse_in_the_engine]}


@pytest.mark.parametrize(
    ("place", "uses"),
    [*(("a thread", name) for name in USES if name != "all"), *((place, "all") for place in PLACES)],
)
def test_an_llm(place, uses, begun):
    llm = LLM("tiny", n_slots=2, n_ctx=512, **PLACES[place])
    for do in USES[uses]:
        do(llm)
    client, model = weakref.ref(llm._client), innermost(llm).model
    assert begun.threads()
    del llm
    assert_gone(begun)
    assert client() is None
    assert model.handle is None


def assert_gone(begun):
    until(lambda: not begun.threads() | begun.children(), lambda: begun.threads() | begun.children())


def test_an_engine_leaves_no_cycle_behind(begun):
    """A reference cycle would keep logits and the texts of tokens in Python's memory."""
    llm = LLM("tiny", n_slots=2, n_ctx=512, **PLACES["two threads"])
    use(llm)
    fail(llm)
    engines = [client._engine for client in innermost(llm)._clients]
    kept = [weakref.ref(each) for engine in engines for each in (engine, engine._runner, engine.model)]
    del llm, engines
    assert_gone(begun)
    assert [ref() for ref in kept] == [None] * len(kept)


@pytest.mark.parametrize("place", ["a thread", "a child"])
def test_an_async_llm(place, begun):
    async def main(left_s):
        llm = AsyncLLM("tiny", n_slots=2, n_ctx=512, **PLACES[place])
        if left_s is None:
            await llm.generate(["x", "y"], SHORT)
            for call in (lambda: llm.generate(TOO_LONG, SHORT), lambda: llm.load_adapter("a", "nowhere.gguf")):
                with contextlib.suppress(LlamaBatchError):
                    await call()
            left_s = 0.0
        task = asyncio.create_task(llm.generate("x", LONG))
        await asyncio.sleep(left_s)
        del task

    asyncio.run(main(None))
    asyncio.run(main(0.01))  # cancelled while the model loads
    assert_gone(begun)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("end", ["forgotten", "closed"])
def test_an_async_llm_whose_load_would_never_end(place, end, begun, monkeypatch, caplog):
    load, send = Model._load, Wire.send

    def load_on(model, weights):
        if weights is not None:  # the parent of a child loads only the vocabulary
            until(is_cancelled)
        load(model, weights)

    monkeypatch.setattr(Model, "_load", load_on)
    monkeypatch.setattr(Wire, "send", lambda wire, kind, *rest: None if kind == "init" else send(wire, kind, *rest))

    def names():
        return {thread.name for thread in begun.threads()}

    async def main():
        llm = AsyncLLM("tiny", n_slots=2, n_ctx=512, **PLACES[place])
        task = asyncio.create_task(llm.load())
        await until_soon(lambda: "llamabatch-engine" in names() or begun.children())
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if end == "closed":
            await llm.aclose()

    asyncio.run(main())
    assert_gone(begun)
    # asyncio logs errors that nobody fetched; other records may come from a raising sink of an earlier test
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_compat_llama(begun, reference):
    llama = Llama(str(reference._client.model.path), n_ctx=256, verbose=False)
    llama("x", max_tokens=2)
    llama.create_chat_completion([{"role": "user", "content": "Hi"}], max_tokens=2)
    next(llama("x", max_tokens=100, stream=True))
    with pytest.raises(ValueError, match="exceed context window"):
        llama(TOO_LONG)
    del llama
    assert_gone(begun)


def test_a_load_ends_one_in_a_cycle_first(begun):
    class Holder:
        pass

    holder = Holder()
    holder.itself, holder.llm = holder, LLM("tiny", n_slots=2, **PLACES["a thread"])
    threads = begun.threads()
    del holder
    with LLM("tiny", n_slots=2, **PLACES["a thread"]):
        assert not begun.threads() & threads


@pytest.mark.parametrize("end", ["close", "sleep"])
def test_states_in_main_memory_end_with_the_engine(end):
    llm = LLM("tiny", n_slots=1, cache_ram=16, instances=1, strategy="batched")
    for word in ("cats", "dogs", "cows"):
        llm.generate(f"Ada keeps three {word}. " * 12, SHORT)
    store = innermost(llm)._engine._scheduler.prefix_cache.store
    states = [weakref.ref(each.state) for each in store._all()]
    assert states
    getattr(llm, end)()
    assert [ref for ref in states if ref() is not None] == []
