"""AsyncLLM gives what LLM gives, can be cancelled, ends cleanly, and never blocks the event loop."""

import asyncio
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from llamabatch import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineClosedError,
    EngineError,
    FinishReason,
    InputError,
    LlamaBatchError,
    ModelFileError,
    PromptError,
    PromptWarning,
    QueueFull,
    SamplingParams,
)
from llamabatch.chat import template as chat_template
from llamabatch.llama.model import Model
from tests.waiting import PATIENCE_S, until, until_soon

HI = [{"role": "user", "content": "What is the capital of France?"}]
LONG = SamplingParams(max_tokens=900, ignore_eos=True)


@pytest.fixture(scope="module")
def sync():
    with LLM("tiny", n_slots=8) as llm:
        yield llm


async def until_idle(llm: AsyncLLM) -> None:
    """Waits until no request runs or waits."""
    stats = (await llm._client()).stats
    await until_soon(lambda: (now := stats()).running + now.waiting == 0, stats)


async def until_running(llm: AsyncLLM) -> None:
    stats = (await llm._client()).stats
    await until_soon(lambda: stats().running)


def test_gives_what_llm_gives(sync, greedy):
    async def main():
        async with AsyncLLM("tiny", n_slots=8) as llm:
            assert llm.plan.config.n_slots == 8
            texts = [o.text for o in await llm.generate(["Once upon a time", "", "The sea"], greedy, errors="return")]
            [answer] = await llm.chat(HI, {"temperature": 0, "max_tokens": 48})
            pieces = [p async for p in llm.stream(["Once upon a time", HI], greedy)]
            done = [pair async for pair in llm.as_completed(["a", "b"], SamplingParams(max_tokens=3))]
            ids = await llm.tokenize("Once")
            assert await llm.detokenize(ids) == "Once"
            lists = await llm.tokenize(["Once", "upon"])
            assert lists == sync.tokenize(["Once", "upon"])
            assert await llm.detokenize(lists) == ["Once", "upon"]
            assert await llm.adapters() == []
            with pytest.raises(PromptError, match="empty"):
                await llm.generate("")
            return texts, answer.text, pieces, done

    texts, answer, pieces, done = asyncio.run(main())
    expected = [o.text for o in sync.generate(["Once upon a time", "", "The sea"], greedy, errors="return")]
    assert texts == expected
    assert answer == sync.chat(HI, greedy)[0].text
    assert "".join(p.text for p in pieces if p.prompt_index == 0) == expected[0]
    assert "".join(p.text for p in pieces if p.prompt_index == 1) == answer
    assert {index for index, _ in done} == {0, 1}


def test_failures_are_told_as_llm_tells_them():
    one = SamplingParams(max_tokens=1)

    async def main():
        async with AsyncLLM("tiny", n_slots=4) as llm:
            with pytest.warns(PromptWarning, match=r"^1 of 2 prompts failed, first: prompts\[1\]: ") as warned:
                outputs = await llm.generate(["a", None], one)
            assert warned[0].filename == __file__
            assert [output.error is None for output in outputs] == [True, False]
            with pytest.warns(PromptWarning, match="1 of 2 conversations failed"):
                await llm.chat([HI, None], one)
            for call in (llm.stream, llm.as_completed):
                with pytest.warns(PromptWarning, match="1 of 2 prompts failed") as warned:
                    assert len([piece async for piece in call(["a", None], one)]) == 2
                assert warned[0].filename == __file__
                for prompts, errors in ((["a", None], "raise"), ([None], "warn")):
                    with pytest.raises(PromptError, match=r"^prompts\["):
                        [piece async for piece in call(prompts, one, errors=errors)]
            with pytest.warns(PromptWarning, match=r"1 of 2 continuations failed, first: continuations\[1\]"):
                assert [score.error is None for score in await llm.score("a", [" b", ""])] == [True, False]
            assert (await llm.generate([None], errors="return"))[0].error is not None
            assert (await llm.chat([None], errors="return"))[0].error is not None
            assert isinstance((await llm.embed([None], errors="return"))[0], LlamaBatchError)
            for call in (llm.generate, llm.chat, llm.embed):
                with pytest.raises(PromptError, match=r"\[0\]: "):
                    await call([None])
            with pytest.raises(PromptError, match=r"conversations go to chat\(\)"):
                await llm.generate(HI, errors="return")
            with pytest.warns(PromptWarning, match="1 of 2 texts failed"):
                assert isinstance((await llm.embed(["a", None], errors="warn"))[1], LlamaBatchError)

    asyncio.run(main())


def test_many_tasks_share_batches(greedy, steps):
    async def main():
        async with AsyncLLM("tiny", n_slots=16, instances=1) as llm:
            stats = (await llm._client()).stats
            with steps.held():
                outputs = asyncio.gather(*(llm.generate(f"Chapter {i}.", greedy) for i in range(100)))
                await until_soon(lambda: stats().in_flight == 100)
            return await outputs, stats()

    outputs, stats = asyncio.run(main())
    assert all(output.finish_reason is not FinishReason.ERROR for [output] in outputs)
    assert stats.rows_per_step > 4


@pytest.mark.parametrize("options", [{}, {"isolate": True}])
def test_cancelling_a_task_frees_its_slots_and_disturbs_no_other(options, greedy, steps):
    async def main():
        async with AsyncLLM("tiny", n_slots=4, **options) as llm:
            [alone] = await llm.generate("Once upon a time", greedy)
            with steps.each_takes(0.02):
                doomed = asyncio.create_task(llm.generate(["a"] * 20, LONG))
                await until_running(llm)
                other = asyncio.create_task(llm.generate("Once upon a time", greedy))
                doomed.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await doomed
            assert (await other)[0].text == alone.text
            await until_idle(llm)

    asyncio.run(main())


def test_cancelled_before_it_is_submitted_it_never_runs(steps):
    async def main():
        async with AsyncLLM("tiny", n_slots=2, instances=1) as llm:
            ids = await llm.tokenize("a " * 400)
            before = (await llm.stats()).prefill_tokens
            # at the cancel, the requests are on their way to the engine, or have just arrived
            for delay in (0.0, 0.0, 0.001, 0.005):
                task = asyncio.create_task(llm.generate([ids] * 50, LONG))
                await asyncio.sleep(delay)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await until_idle(llm)
            return before, (await llm.stats()).prefill_tokens, len(ids)

    with steps.each_takes(0.01):
        before, after, one = asyncio.run(main())
    assert after - before < 100 * one


def test_leaving_a_stream_frees_its_slots(steps):
    async def main():
        async with AsyncLLM("tiny", n_slots=4) as llm:
            async for _ in llm.stream(["a", "b"], LONG):
                break
            await until_idle(llm)
            params = [SamplingParams(max_tokens=1), LONG, LONG]
            async for index, _ in llm.as_completed(["a", "b", "c"], params):
                assert index == 0
                break
            await until_idle(llm)

    with steps.each_takes(0.02):
        asyncio.run(main())


def test_cancelling_reaches_a_chat_template_and_a_list_that_is_being_made(monkeypatch):
    monkeypatch.setattr(chat_template, "BUDGET", 2**60)  # long enough to seem endless
    monkeypatch.setattr(chat_template, "MAX_BUDGET", 2**60)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    endless = loops + "{% endfor %}" * 3
    rendering, look = set(), chat_template.Meter.look
    monkeypatch.setattr(chat_template.Meter, "look", lambda meter: (rendering.add(meter), look(meter)))
    text, tokenized, go_on, tokenize = "a b c " * 1000, [], threading.Event(), Model._tokenize

    def held(model, data, *options):
        tokenized.append(data)
        assert go_on.wait(PATIENCE_S)
        return tokenize(model, data, *options)

    async def main():
        async with AsyncLLM("tiny", n_slots=2, instances=1) as llm:
            [out] = await llm.chat(HI, SamplingParams(max_tokens=1))
            model = (await llm._client()).model
            own, model.metadata = model.metadata, {**model.metadata, "tokenizer.chat_template": endless}
            for number, asked in enumerate([HI] * 6 + [[HI] * 2] * 6):  # more chats than the AsyncLLM has threads
                chat = asyncio.create_task(llm.chat(asked))
                await until_soon(lambda number=number: len(rendering) > number)
                chat.cancel()
                await asyncio.wait([chat])
                assert chat.cancelled()
            model.metadata = own
            monkeypatch.setattr(Model, "_tokenize", held)
            long = asyncio.create_task(llm.generate([text] * 20_000))
            await until_soon(lambda: tokenized)
            long.cancel()
            await asyncio.wait([long])
            go_on.set()
            assert await llm.tokenize("a")
            assert (await llm.chat(HI, SamplingParams(max_tokens=1)))[0].prompt == out.prompt

    asyncio.run(main())
    assert tokenized.count(text.encode()) == 1


def test_closing_ends_what_runs_and_what_comes_after_is_refused(steps):
    async def main():
        llm = AsyncLLM("tiny", n_slots=2)
        task = asyncio.create_task(llm.generate(["a"] * 20, LONG))
        await until_running(llm)
        await llm.aclose()
        await llm.aclose()
        assert {o.finish_reason for o in await task} == {FinishReason.ABORT}
        for call in (llm.generate("x"), llm.stats(), llm.tokenize("x"), llm.load()):
            with pytest.raises(EngineClosedError):
                await call

    with steps.each_takes(0.02):
        asyncio.run(main())


def test_the_loop_may_be_closed_first_and_another_may_follow(steps):
    # asyncio itself warns of the task that is left, so this is a program of its own
    code = """
        import asyncio
        from llamabatch import AsyncLLM, SamplingParams

        llm = AsyncLLM("tiny", n_slots=4, instances=1)
        long = SamplingParams(max_tokens=1500, ignore_eos=True)

        async def until(busy):
            while bool((await llm.stats()).running) is not busy:
                await asyncio.sleep(0.002)

        loop = asyncio.new_event_loop()
        short = SamplingParams(max_tokens=20, ignore_eos=True)
        task = loop.create_task(llm.generate(["a"] * 4, [short, long, long, long]))
        loop.run_until_complete(until(True))
        loop.close()  # without a word to the task; the first event that cannot be told ends the others
        asyncio.run(until(False))
        print(asyncio.run(llm.stats()).decode_rows < 4 * 1500)
        print(len(asyncio.run(llm.generate("x", SamplingParams(max_tokens=1)))[0].token_ids))
        llm.close()
        print("closed", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with steps.each_takes(0.02):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n1\nclosed\n", done.stderr
    assert "could not be delivered" not in done.stderr


def test_options_are_checked_at_once_and_a_failed_load_is_told_and_tried_again(tmp_path):
    with pytest.raises(ConfigError, match="n_slotz"):
        AsyncLLM("tiny", n_slotz=1)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"nothing")
    llm = AsyncLLM(path)
    with pytest.raises(EngineError, match="not loaded"):
        llm.plan  # noqa: B018

    async def main():
        for _ in range(2):
            with pytest.raises(ModelFileError):
                await llm.generate("x")
        with pytest.raises(ModelFileError):
            async with AsyncLLM(path):
                pass
        await llm.aclose()

    asyncio.run(main())


def test_a_full_queue_is_an_error_of_the_call(steps):
    async def main():
        async with AsyncLLM("tiny", n_slots=2, max_queue=2) as llm:
            tasks = [asyncio.create_task(llm.generate("a", LONG)) for _ in range(4)]
            stats = (await llm._client()).stats
            await until_soon(lambda: stats().in_flight == 4)
            with pytest.raises(QueueFull, match="max_queue=2"):
                await llm.generate("a", LONG)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until_soon(lambda: not stats().in_flight)
            await llm.generate("a", SamplingParams(max_tokens=1))
            assert stats().rejected == 1

    with steps.each_takes(0.02):
        asyncio.run(main())


class Ticker:
    """A task of the event loop. `turns` counts its turns. `computed` is the longest CPU time of the loop's thread
    between two turns."""

    async def __aenter__(self):
        self.turns = 0
        self.computed = 0.0
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *exc):
        self._task.cancel()

    async def _tick(self):
        computed = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            self.turns += 1
            self.computed, computed = max(self.computed, time.thread_time() - computed), time.thread_time()

    def goes_on_during(self, call):
        """Wraps `call`, so that it first waits until the loop has had ten more turns. The test fails if the loop is
        blocked by the call."""

        def held(*args):
            wanted = self.turns + 10
            until(lambda: self.turns >= wanted, "the loop waits for this call")
            return call(*args)

        return held


def test_the_loop_goes_on_while_a_megabyte_is_tokenized_and_while_the_model_is_loaded(monkeypatch):
    text = "Once upon a time there was a fox. " * 31_000

    async def main():
        async with Ticker() as ticker:
            with monkeypatch.context() as patch:
                patch.setattr(Model, "_load", ticker.goes_on_during(Model._load))
                llm = AsyncLLM("tiny")
                await llm.load()
            loading = ticker
        async with llm, Ticker() as ticker:
            with monkeypatch.context() as patch:
                patch.setattr(Model, "_tokenize", ticker.goes_on_during(Model._tokenize))
                [output] = await llm.generate([text], errors="return")
                assert "n_ctx allows" in output.error
                await llm.generate([text, text, "x"], SamplingParams(max_tokens=2), errors="return")
        return loading, ticker

    for ticker in asyncio.run(main()):
        assert ticker.turns > 10
        assert ticker.computed < 0.05


def test_a_forgotten_one_ends_with_the_program():
    code = """
        import asyncio
        from llamabatch import AsyncLLM, SamplingParams

        llm = AsyncLLM("tiny", n_slots=2)

        async def main():
            task = asyncio.create_task(llm.generate(["a"] * 9, SamplingParams(max_tokens=900, ignore_eos=True)))
            while not (await llm.stats()).running:
                await asyncio.sleep(0.002)
            print("done")

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_prefixes_are_saved_and_loaded(tmp_path):
    prefix, path = (
        "Once upon a time there was a king who had three daughters and a garden. " * 3,
        tmp_path / "prefix.kv",
    )
    greedy = SamplingParams(temperature=0, max_tokens=8)

    async def saved():
        async with AsyncLLM("tiny", n_ctx=512) as llm:
            with pytest.raises(InputError, match="at least 32"):
                await llm.save_prefix("Hello", path)
            [output] = await llm.generate([prefix + "One day"], greedy)
            return await llm.save_prefix(prefix, path), output

    async def loaded():
        async with AsyncLLM("tiny", n_ctx=512) as llm:
            count = await llm.load_prefix(path)
            [output] = await llm.generate([prefix + "One day"], greedy)
            stats = await llm.stats()
            await llm.unload_prefix(path)
            with pytest.raises(InputError, match="is loaded"):
                await llm.unload_prefix(path)
            return count, output, stats

    n_saved, first = asyncio.run(saved())
    count, second, stats = asyncio.run(loaded())
    assert count == n_saved
    assert stats.prefix_tokens >= count - 2
    assert second.token_ids == first.token_ids
