"""The engine, stepped by hand: lengths, limits, stops, aborts, counts."""

import ctypes
import random
import threading
from dataclasses import replace

import pytest

from llamabatch import (
    Engine,
    EngineClosedError,
    EngineConfig,
    FinishReason,
    PromptError,
    Request,
    SamplingError,
    SamplingParams,
)
from llamabatch.gguf.resolve import resolve
from llamabatch.llama import library
from llamabatch.llama.batch import Batch, count_passes
from llamabatch.llama.context import Context
from llamabatch.llama.library import load
from llamabatch.llama.model import Model
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.output import Call, ScheduledSpan
from tests.model.conftest import mixed_conversations


@pytest.fixture(scope="module")
def engine():
    with Engine(EngineConfig("tiny", n_slots=4, n_ctx=300, n_batch=64, n_ubatch=32)) as made:
        yield made


def finish(engine, limit=5000):
    finished = {}
    for _ in range(limit):
        if not engine.has_work:
            break
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output.finished
    engine.check_integrity()
    assert not engine.has_work
    return finished


def ids(engine, n, seed=0):
    rng = random.Random(seed)
    return tuple(rng.randrange(300, 900) for _ in range(n))


@pytest.mark.parametrize("length", [1, 32, 33, 64, 65, 299, 300])
def test_prompts_of_any_length_that_fits(engine, length):
    engine.add(Request("r", ids(engine, length), SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)))
    output = finish(engine)["r"]
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.token_ids) == min(5, 300 + 1 - length)


def test_prompts_that_do_not_fit_are_refused_before_anything_native(engine):
    for prompt, message in [
        ((), "empty"),
        (ids(engine, 301), "301 tokens; n_ctx allows 1 to 300"),
        ((5, -1), "token id -1"),
        ((5, 2**31 - 1), "token id 2147483647"),
    ]:
        with pytest.raises(PromptError, match=message):
            engine.add(Request("bad", prompt))
    assert not engine.has_work


def test_a_sampler_state_lives_as_long_as_its_sequence(engine):
    def in_flight():
        engine.check_integrity()
        return len(engine._runner.request_ids)

    long = SamplingParams(max_tokens=30, seed=1, repetition_penalty=1.1, ignore_eos=True)
    with pytest.raises(SamplingError, match="token id"):
        engine.add(Request("bad", (500,), replace(long, allowed_token_ids=[2**20 - 1])))
    assert in_flight() == 0
    engine.add(Request("several", ids(engine, 9), replace(long, n=3)))
    engine.add(Request("formed", ids(engine, 9), SamplingParams(structured_outputs={"regex": "[a-z]{5,40}"})))
    for number in range(4):
        engine.add(Request(f"r{number}", ids(engine, 9, seed=number), long))
    assert in_flight() == 8
    for _ in range(5):
        engine.step()
        in_flight()
    for request_id in ("several", "r3", "unknown"):  # "several" runs with n copies, "r3" waits
        engine.abort(request_id)
        in_flight()
    assert set(finish(engine)) == {"formed", "r0", "r1", "r2"}
    assert in_flight() == 0


def test_abort_in_every_state(engine):
    long = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    for i in range(6):
        engine.add(Request(f"r{i}", ids(engine, 200, seed=i), long))
    assert engine.abort("r5").finished.finish_reason is FinishReason.ABORT  # r5 waits
    engine.step()
    assert engine.abort("r0").finished.finish_reason is FinishReason.ABORT  # r0 is in prefill
    for _ in range(30):
        engine.step()
    aborted = engine.abort("r1").finished  # r1 decodes
    assert aborted.finish_reason is FinishReason.ABORT
    assert engine.abort("r1") is None
    assert engine.abort("never heard of") is None
    assert finish(engine).keys() == {"r2", "r3", "r4"}
    assert engine.stats().free_slots == 4


def test_eog_ends_and_is_counted_but_not_shown(reference):
    output = reference.chat(mixed_conversations(1)[0], SamplingParams(temperature=0, max_tokens=200))[0]
    assert output.finish_reason is FinishReason.STOP
    assert output.outputs[0].stop_reason == output.token_ids[-1]
    assert "<|im_end|>" not in output.text


def test_one_decode_step_is_one_pass_over_the_weights():
    with Engine(EngineConfig("tiny", n_slots=16)) as engine:
        for i in range(16):
            engine.add(Request(f"r{i}", ids(engine, 10, seed=i), SamplingParams(max_tokens=10 + i, ignore_eos=True)))
        finish(engine)
        stats = engine.stats()
    assert stats.passes_per_step == 1
    assert stats.decode_rows == sum(10 + i - 1 for i in range(16))


def test_after_close(engine):
    closed = Engine(EngineConfig("tiny", n_slots=1))
    closed.close()
    closed.close()
    with pytest.raises(EngineClosedError):
        closed.step()
    with pytest.raises(EngineClosedError):
        closed.add(Request("r", (1,)))
    with pytest.raises(EngineClosedError):
        closed.model.tokenize("x")


@pytest.mark.parametrize("unified", [False, True])
def test_counted_passes_are_llama_cpps(unified):
    """Compares count_passes with the number of graphs that llama.cpp computes. Its evaluation callback counts them."""
    lib = load()
    config = EngineConfig("tiny")
    model = Model(resolve("tiny"), config)
    seen = []

    @ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
    def watch(tensor, ask, _data):
        # The struct contains the tensor's name. llama.cpp asks once for each node; each graph has one "result_norm".
        if ask and ctypes.string_at(tensor, 400).find(b"result_norm\0") >= 0:
            seen.append(1)
        return False

    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 16 * 256, 512, 32, 16
    params.kv_unified = unified
    params.cb_eval = ctypes.cast(watch, type(params.cb_eval))
    context = lib.llama_init_from_model(model.handle, params)
    ragged = not unified and library.takes_ragged(context)
    assert ragged == (library._has_patch(library.RAGGED_PATCH) and not unified)
    batch, rng = Batch(lib, 512), random.Random(1)
    try:
        for _ in range(60):
            slots = sorted(rng.sample(range(16), rng.randrange(1, 16)))
            lengths = [rng.choice([1, 1, 1, 2, 7, 40]) for _ in slots]
            spans = []
            for slot, length in zip(slots, lengths, strict=True):
                sequence = Sequence(Request("r", tuple([5] * length)), model.vocabulary, 256)
                spans.append(ScheduledSpan(sequence, slot, 0, length, True))
            free = [s for s in range(16) if s not in slots]
            dummies = () if unified else rng.sample(free, rng.randrange(0, len(free) + 1))
            call = Call(tuple(spans), tuple(dummies))
            if rng.random() < 0.4:  # a call that checks draft tokens
                n = rng.choice([1, 3, 9])
                spans = [span._replace(length=1 + n, draft=(7,) * rng.randrange(n + 1)) for span in spans]
                call = Call(tuple(spans), tuple(dummies), n)
            lib.llama_memory_clear(lib.llama_get_memory(context), False)
            seen.clear()
            assert lib.llama_decode(context, batch.fill(call)[0]) == 0
            assert count_passes(call, 32, unified, ragged) == len(seen), call
    finally:
        lib.llama_free(context)
        model.close()


@pytest.mark.parametrize("options", [{}, {"kv": "unified", "kv_cells": 2048}], ids=["split", "unified"])
def test_two_that_arrive_cost_those_that_run_nothing(options):
    """Each token is computed once, in one pass a step, with all slots from the start and with a growing context."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for start in ({}, {"start_slots": 8}):
        with Engine(EngineConfig("tiny", n_slots=10, n_ctx=256, cache_prefix=False, **start, **options)) as engine:
            assert engine._runner._context.n_slots == start.get("start_slots", 10)
            for i in range(8):
                engine.add(Request(f"r{i}", ids(engine, 20, seed=i), params))
            for _ in range(20):
                engine.step()
            before = engine.stats()
            for i in (8, 9):
                engine.add(Request(f"r{i}", ids(engine, 16, seed=i), params))
            while len(engine._scheduler.running) < 10:
                running = {f"r{i}" for i in range(8)}
                assert running <= {output.request_id for output in engine.step()}, "a running one has to wait"
            outputs = finish(engine)
            stats = engine.stats()
            assert engine._runner._context.n_slots == 10
        assert (stats.preemptions, len(outputs)) == (0, 10)
        assert stats.prefill_tokens - before.prefill_tokens == 2 * 16
        assert stats.decode_rows == 10 * 59


def test_the_context_grows_and_loses_nothing(reference, greedy, assert_equal_by_the_rule):
    """Requests that come while others run need more slots, so the running ones move to a larger context."""
    conversations = mixed_conversations(14, seed=21)
    wanted = reference.chat(conversations, greedy)
    with Engine(EngineConfig("tiny", n_slots=16, start_slots=2)) as engine:
        waiting = [Request(f"r{i}", output.prompt_token_ids, greedy) for i, output in enumerate(wanted)]
        finished, sizes = {}, set()
        while waiting or engine.has_work:
            if waiting:
                engine.add(waiting.pop(0))
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = output.finished
            sizes.add(engine._runner._context.n_slots)
        assert engine.stats().preemptions == 0
    assert sizes == {2, 16}
    assert_equal_by_the_rule([finished[f"r{i}"] for i in range(14)], wanted, least=0.9)


def test_what_finished_requests_left_moves_with_the_context():
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with Engine(EngineConfig("tiny", n_slots=8, start_slots=1, n_ctx=512)) as engine:
        text = ids(engine, 200, seed=1)
        engine.add(Request("first", text, params))
        [first] = finish(engine).values()
        for i in range(5):
            engine.add(Request(f"r{i}", ids(engine, 20, seed=10 + i), params))
        finish(engine)
        assert engine._runner._context.n_slots == 8
        before = engine.stats()
        engine.add(Request("again", text, params))
        [again] = finish(engine).values()
        assert engine.stats().prefix_tokens - before.prefix_tokens >= 199
        assert again.token_ids == first.token_ids


def test_an_engine_may_be_closed_while_its_context_grows(monkeypatch):
    """The larger context is still being made on its thread. It is freed when it is done."""
    made, release, closed = Context.__init__, threading.Event(), []

    def slowly(self, model, config, n_slots):
        if n_slots == 4:
            assert release.wait(60)
        made(self, model, config, n_slots)

    close = Context.close
    monkeypatch.setattr(Context, "__init__", slowly)
    monkeypatch.setattr(Context, "close", lambda self: (closed.append(self.n_slots), close(self)))
    with Engine(EngineConfig("tiny", n_slots=4, start_slots=1)) as engine:
        for i in range(3):
            engine.add(Request(f"r{i}", (5, 6, 7), SamplingParams(max_tokens=30, ignore_eos=True)))
            if i == 0:
                engine.step()
        for _ in range(10):
            assert [output.request_id for output in engine.step()] == ["r0"], "it goes on meanwhile"
        release.set()
    assert closed == [4, 1]
    assert not [thread for thread in threading.enumerate() if thread.name == "llamabatch-growth"]


def test_one_long_beside_many_short_in_a_unified_cache(reference):
    """8 slots of up to 512 cells share 1,024 cells. All requests run at once, none is preempted, texts are right."""
    with Engine(EngineConfig("tiny", kv="unified", n_slots=8, n_ctx=512, kv_cells=1024)) as engine:
        prompts = {"long": ids(engine, 400, seed=1)} | {f"s{i}": ids(engine, 20, seed=i) for i in range(7)}
        for name, prompt in prompts.items():
            engine.add(Request(name, prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)))
        engine.step()
        assert engine.stats().running == 8
        outputs = finish(engine)
        stats = engine.stats()
    assert (stats.preemptions, stats.passes_per_step, len(outputs)) == (0, 1, 8)
    assert all(len(output.token_ids) == 40 for output in outputs.values())
