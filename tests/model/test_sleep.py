"""LLM.sleep frees the model. The next use loads it again, with the same state."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
from random import Random

import pytest

from llamabatch import LLM, AsyncLLM, EngineClosedError, EngineError, ModelFileError, SamplingParams
from llamabatch.compat import vllm
from llamabatch.testing import FakeLLM
from llamabatch.utils.paths import bundled_model
from tests.model.adapter_files import write_lora
from tests.model.conftest import questions
from tests.waiting import until

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.mark.parametrize("options", [{}, {"instances": 2}, {"isolate": True}], ids=str)
def test_the_next_use_has_the_model_as_it_was(options, tmp_path):
    with LLM("tiny", n_slots=4, seed=7, **options) as llm:
        llm.load_adapter("a", write_lora(tmp_path / "a.gguf", seed=1, size=0.6))
        llm.save_prefix("Once upon a time " * 12, tmp_path / "p.bin")
        llm.load_prefix(tmp_path / "p.bin")
        asked, changed = questions()[:6], {"adapters": {"a": 1.0}}
        first, other = llm.generate(asked, GREEDY), llm.generate(asked, GREEDY, **changed)
        before, plan = llm.stats(), llm.plan
        llm.sleep()
        llm.sleep()
        assert llm.is_asleep
        assert repr(llm) == "LLM('tiny', asleep)"
        assert llm.heartbeats == []
        assert (llm.adapters, llm.plan, llm.n_ctx) == (["a"], plan, plan.config.n_ctx)
        assert llm.stats().generated_tokens == before.generated_tokens  # stats() wakes nothing
        assert llm.metadata["general.architecture"]
        assert llm.is_asleep
        assert [o.text for o in llm.generate(asked, GREEDY)] == [o.text for o in first]
        assert not llm.is_asleep
        assert (
            [o.text for o in llm.generate(asked, GREEDY, **changed)]
            == [o.text for o in other]
            != [o.text for o in first]
        )
        after = llm.stats()
        assert after.submitted == before.submitted + 12
        assert after.generated_tokens > before.generated_tokens
        llm.unload_prefix(tmp_path / "p.bin")  # works, because the prefix was loaded again


MEASURE = """
import psutil
from llamabatch import LLM
own = psutil.Process()
llm = LLM("tiny", isolate={isolate})
llm.generate("Once", {{"max_tokens": 4}})
llm.sleep()
print(sum(process.memory_info().rss for process in (own, *own.children(recursive=True))))
"""


@pytest.mark.parametrize("isolate", [False, True])
def test_asleep_all_its_processes_are_under_150_mb(isolate):
    code = MEASURE.format(isolate=isolate)
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert int(printed) < 150e6


def test_each_use_wakes_and_looks_do_not():
    with LLM("tiny", n_slots=2) as llm:
        vocab, text = llm.vocab, "Once upon a time"
        for use in (
            lambda: llm.tokenize(text),
            lambda: llm.detokenize([5, 6]),
            lambda: llm.apply_chat_template([{"role": "user", "content": text}]),
            lambda: llm.score(text, [" there"]),
            lambda: list(llm.stream(text, GREEDY)),
            lambda: llm.embed(text),
            llm.reset_prefix_cache,
            llm.wake,
        ):
            llm.sleep()
            assert llm.is_asleep
            use()
            assert not llm.is_asleep
        llm.sleep()
        assert llm.vocab.bytes(5) == llm.vocab.bytes(5)
        assert llm.vocab is not vocab
        with pytest.raises(EngineClosedError):
            vocab.bytes(7)


def test_a_model_in_use_does_not_sleep():
    with LLM("tiny", n_slots=2) as llm:
        pieces = llm.stream("Once upon a time", SamplingParams(max_tokens=200, ignore_eos=True))
        next(pieces)
        with pytest.raises(EngineError, match="in use by 1 request"):
            llm.sleep()
        assert not llm.is_asleep
        pieces.close()
    with pytest.raises(EngineClosedError):
        llm.sleep()


def test_closed_while_asleep():
    llm = LLM("tiny", n_slots=2)
    llm.sleep()
    llm.close()
    assert not llm.is_asleep
    for use in (llm.stats, llm.wake, lambda: llm.generate("a")):
        with pytest.raises(EngineClosedError):
            use()


def test_a_file_that_is_gone_or_another_one(tmp_path):
    path = tmp_path / "m.gguf"
    shutil.copy(bundled_model(), path)
    with LLM(path, n_slots=2) as llm:
        path.rename(tmp_path / "away.gguf")
        llm.sleep()
        with pytest.raises(ModelFileError):
            llm.generate("Once")
        assert llm.is_asleep
        (tmp_path / "away.gguf").rename(path)
        assert llm.generate("Once", GREEDY)[0].text
        llm.sleep()
        path.write_bytes(bundled_model().read_bytes() + bytes(32))
        with pytest.raises(EngineError, match="has been changed or replaced"):
            llm.wake()


def test_threads_that_use_it_while_another_puts_it_to_sleep():
    with LLM("tiny", n_slots=8) as llm:
        expected = [o.text for o in llm.generate(questions()[:3], GREEDY)]
        found, enough = [], threading.Event()

        def use(seed):
            random = Random(seed)
            while not enough.wait(random.random() / 50):  # so that sometimes nobody uses the LLM
                found.append([o.text for o in llm.generate(questions()[:3], GREEDY)])

        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()

        def sleeps():
            try:
                llm.sleep()
            except EngineError:
                return False
            return True

        try:
            for _ in range(5):
                until(sleeps)
                n = len(found)
                until(lambda n=n: len(found) > n)
        finally:
            enough.set()
            for thread in threads:
                thread.join()
        assert all(texts == expected for texts in found)


def test_async():
    asyncio.run(_use_an_async_llm())


async def _use_an_async_llm():
    async with AsyncLLM("tiny", n_slots=2) as llm:
        [first] = await llm.generate("Once upon a time", GREEDY)
        of_5 = (await llm.vocab()).bytes(5)
        await llm.sleep()
        assert llm.is_asleep
        assert "asleep" in repr(llm)
        assert (await llm.stats()).submitted == 1
        assert llm.is_asleep
        assert await llm.tokenize("Once")
        assert not llm.is_asleep
        await llm.sleep()
        assert (await llm.vocab()).bytes(5) == of_5
        await llm.sleep()
        [again] = await llm.generate("Once upon a time", GREEDY)
        assert again.text == first.text
        await llm.sleep()
        await llm.wake()
        assert not llm.is_asleep
    unused = AsyncLLM("tiny")
    await unused.sleep()
    assert not unused.is_asleep
    await unused.aclose()


def test_under_the_names_of_vllm_and_without_a_model():
    fake = FakeLLM(answers="a stone")
    llm = vllm.LLM._over(fake)
    llm.sleep(level=0)
    assert not fake.is_asleep
    llm.sleep(level=1)
    assert fake.is_asleep
    llm.wake_up(tags=["weights"])
    assert not fake.is_asleep
    llm.sleep(2)
    assert llm.generate("What?")[0].outputs[0].text == "a stone"
    with pytest.raises(ValueError, match="level is 3"):
        llm.sleep(3)
