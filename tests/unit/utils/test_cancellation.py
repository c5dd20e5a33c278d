"""Cancelled loads: the child of a trial load ends, and so does the loading thread."""

import asyncio
import subprocess
import threading

import pytest

from llamabatch import AsyncLLM
from llamabatch.client import thread_client
from llamabatch.client.thread_client import ThreadClient
from llamabatch.config import EngineConfig
from llamabatch.errors import EngineClosedError
from llamabatch.llama import vetting
from llamabatch.utils import cancellation
from llamabatch.utils.cancellation import can_be_cancelled, cancelled_by, is_cancelled
from llamabatch.utils.subprogram import run_program
from tests.waiting import PATIENCE_S, until


class SlowLoad:
    """Replaces Engine by a load that ends only when it is cancelled."""

    def __init__(self):
        self.begun, self.ended = threading.Event(), threading.Event()

    def __call__(self, *_arguments, **_options):
        self.begun.set()
        until(is_cancelled)
        self.ended.set()
        raise EngineClosedError("cancelled")


@pytest.fixture
def slow_load(monkeypatch):
    load = SlowLoad()
    monkeypatch.setattr(thread_client, "Engine", load)
    return load


def test_events_of_all_callers_count():
    outer, inner = threading.Event(), threading.Event()
    assert not can_be_cancelled()
    with cancelled_by(outer):
        with cancelled_by(inner):
            outer.set()
            assert is_cancelled()
        assert can_be_cancelled()
    assert not is_cancelled()
    assert cancellation._events.get() == ()


def test_a_program_of_a_cancelled_load_is_killed():
    cancelled = threading.Event()
    threading.Timer(0.1, cancelled.set).start()
    with cancelled_by(cancelled), pytest.raises(subprocess.TimeoutExpired):
        run_program("http.server", "0", timeout_s=1e6)  # this program never ends by itself


def test_a_trial_that_is_cancelled_says_nothing_of_the_file(monkeypatch, tmp_path):
    def expire(*_arguments, **_options):
        raise subprocess.TimeoutExpired("trial", 1)

    arguments = (tmp_path / "m.gguf", 1, vetting.PROGRAM, [])
    monkeypatch.setattr(vetting, "run_program", expire)
    cancelled = threading.Event()
    with cancelled_by(cancelled):
        assert "could not be loaded" in vetting._tried(*arguments)["why"]
        cancelled.set()
        with pytest.raises(EngineClosedError, match=r"the load of .* was cancelled"):
            vetting._tried(*arguments)


def test_an_interrupt_ends_the_load_that_it_came_in(slow_load, monkeypatch):
    class Interrupted(thread_client.Future):
        def result(self, timeout=None):
            assert slow_load.begun.wait(PATIENCE_S)
            raise KeyboardInterrupt

    monkeypatch.setattr(thread_client, "Future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        ThreadClient(EngineConfig("tiny"))
    assert slow_load.ended.wait(PATIENCE_S)


def test_closing_an_async_llm_ends_its_load(slow_load):
    async def close_while_it_loads():
        llm = AsyncLLM("tiny")
        load = asyncio.ensure_future(llm.load())
        assert await asyncio.to_thread(slow_load.begun.wait, PATIENCE_S)
        await llm.aclose()
        with pytest.raises(EngineClosedError):
            await load

    asyncio.run(close_while_it_loads())
    assert slow_load.ended.is_set()
