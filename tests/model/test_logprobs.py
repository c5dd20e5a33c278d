"""Compares logprobs, alone and in a batch, with a float64 softmax over the logits of llama_cpp itself."""

import ctypes
import math

import numpy as np
import pytest

from llamabatch import LLM, Engine, EngineConfig, Request, SamplingParams
from llamabatch.gguf.resolve import resolve
from llamabatch.llama.library import load, takes_prompts
from tests.model.conftest import MAX_GAP, questions

ASKS = SamplingParams(temperature=0, max_tokens=24, logprobs=5, prompt_logprobs=3, ignore_eos=True)


class Raw:
    """A llama_context of llama_cpp itself, without our engine, but with the engine's settings."""

    def __init__(self, config: EngineConfig) -> None:
        self.lib = lib = load()
        params = lib.llama_model_default_params()
        params.use_extra_bufts = True
        self.model = lib.llama_model_load_from_file(str(resolve("tiny")).encode(), params)
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        options = lib.llama_context_default_params()
        options.n_ctx = config.n_ctx
        options.n_batch, options.n_ubatch = config.n_batch, config.n_ubatch
        options.n_threads, options.n_threads_batch = config.n_threads, config.n_threads_batch
        options.flash_attn_type = {"auto": -1, "off": 0, "on": 1}[config.flash_attn]
        self.context = lib.llama_init_from_model(self.model, options)

    def logprobs(self, token_ids: tuple[int, ...], n_prompt: int) -> np.ndarray:
        """Returns float64 logprobs of shape (tokens, vocabulary). The prompt is computed in one call, the rest token by
        token, as it was generated."""
        lib = self.lib
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        rows = []
        for chunk in (token_ids[:n_prompt], *((token,) for token in token_ids[n_prompt:])):
            batch = lib.llama_batch_init(len(chunk), 0, 1)
            for i, token in enumerate(chunk):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, len(rows) + i, 1, 1
                batch.logits[i] += 2 * (takes_prompts(self.context) and not rows)  # LLAMA_ROW_PROMPT_OUTPUT
                batch.seq_id[i][0] = 0
            batch.n_tokens = len(chunk)
            assert lib.llama_decode(self.context, batch) == 0
            for i in range(len(chunk)):
                pointer = ctypes.cast(lib.llama_get_logits_ith(self.context, i), ctypes.c_void_p).value
                row = np.array((ctypes.c_float * self.n_vocab).from_address(pointer), np.float64)
                rows.append(row - row.max() - math.log(np.exp(row - row.max()).sum()))
            lib.llama_batch_free(batch)
        return np.stack(rows)

    def close(self) -> None:
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)


@pytest.fixture(scope="module")
def raw(reference):
    made = Raw(reference.plan.config)
    yield made
    made.close()


def check(output, rows: np.ndarray, top: int, prompt_top: int, within: float) -> None:
    """Compares each logprob with the row before its token. If values are exact, also checks chosen tokens and ranks."""
    [completion] = output.outputs
    tokens = (*output.prompt_token_ids, *output.token_ids)
    assert output.prompt_logprobs[0] is None
    told = [*output.prompt_logprobs[1:], *completion.logprobs]
    assert len(told) == len(tokens) - 1
    for i, (one, row) in enumerate(zip(told, rows, strict=False)):
        k = prompt_top if i + 1 < len(output.prompt_token_ids) else top
        assert next(iter(one)) == tokens[i + 1]
        assert k <= len(one) <= k + 1
        for token, logprob in one.items():
            assert logprob.logprob == pytest.approx(row[token], abs=within)
        if within < 1e-4:
            order = np.argsort(-row, kind="stable")
            assert {*one} == {tokens[i + 1], *map(int, order[:k])}
            assert all(order[logprob.rank - 1] == token for token, logprob in one.items())
    wanted = sum(one[token].logprob for one, token in zip(completion.logprobs, output.token_ids, strict=True))
    assert completion.cumulative_logprob == pytest.approx(wanted)


def test_they_are_a_softmax_over_the_models_own_logits(reference, raw):
    for question in questions()[:4]:
        [output] = reference.generate(question, ASKS)
        assert 5 < len(output.prompt_token_ids) <= 64, "longer prompts are read in several calls"
        rows = raw.logprobs((*output.prompt_token_ids, *output.token_ids), len(output.prompt_token_ids))
        check(output, rows, 5, 3, 1e-5)


def test_penalties_bias_masks_and_temperature_do_not_change_them(reference, raw):
    params = SamplingParams(
        temperature=5, seed=3, max_tokens=12, logprobs=2, prompt_logprobs=0, ignore_eos=True,
        repetition_penalty=3.0, logit_bias={400: 5.0}, allowed_token_ids=range(300, 500),
    )  # fmt: skip
    [output] = reference.generate("Once upon a time", params)
    rows = raw.logprobs((*output.prompt_token_ids, *output.token_ids), len(output.prompt_token_ids))
    check(output, rows, 2, 0, 1e-5)
    assert any(one[token].rank > 20 for one, token in zip(output.outputs[0].logprobs, output.token_ids, strict=True))


def test_in_company_they_follow_the_rule_of_equality(raw):
    """Prompts have many lengths, and some have more tokens than a call has output rows. Half of the requests ask for no
    logprobs."""
    asked = [" ".join(questions()[i : i + 1 + 5 * (i % 5)]) for i in range(16)]
    params = [ASKS if i % 2 else SamplingParams(temperature=0, max_tokens=30) for i in range(16)]
    with LLM("tiny", strategy="batched", n_slots=8, n_ctx=1024) as llm:
        outputs = llm.generate(asked, params)
    assert max(len(output.prompt_token_ids) for output in outputs) > 128
    for output, given in zip(outputs, params, strict=True):
        if given is ASKS:
            tokens = (*output.prompt_token_ids, *output.token_ids)
            check(output, raw.logprobs(tokens, len(output.prompt_token_ids)), 5, 3, MAX_GAP)
        else:
            assert (output.prompt_logprobs, output.outputs[0].logprobs) == (None, None)


def test_a_stream_carries_them(reference):
    pieces = list(reference.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=9, logprobs=0)))
    told = [one for piece in pieces for one in piece.logprobs]
    assert told == list(pieces[-1].finished.outputs[0].logprobs)
    assert [next(iter(one)) for one in told] == list(pieces[-1].finished.token_ids)
    texts = [next(iter(one.values())).decoded_token for one in told]
    assert "".join(texts) == pieces[-1].finished.text


def test_a_child_process_sends_the_same(reference):
    [wanted] = reference.generate("Once upon a time", ASKS)
    with LLM("tiny", strategy="sequential", isolate=True) as llm:
        [got] = llm.generate("Once upon a time", ASKS)
    assert got.prompt_logprobs == wanted.prompt_logprobs
    assert got.outputs[0].logprobs == wanted.outputs[0].logprobs
    assert got.outputs[0].cumulative_logprob == wanted.outputs[0].cumulative_logprob


def test_those_who_do_not_ask_pay_nothing(monkeypatch):
    """No code for logprobs runs in a call without such a request."""

    def fail(*_args: object) -> None:
        raise AssertionError("logprobs were read")

    monkeypatch.setattr("llamabatch.llama.model_runner.sample_with_logprobs", fail)
    with Engine(EngineConfig("tiny", n_slots=2)) as engine:
        engine.add(Request("r", tuple(engine.model.tokenize("Once upon a time")), SamplingParams(max_tokens=5)))
        while engine.has_work:
            assert all(output.logprobs is None for output in engine.step())


EVERY = SamplingParams(temperature=0, max_tokens=3, logprobs=-1, prompt_logprobs=-1, ignore_eos=True)


def test_all_of_the_vocabulary(reference, raw):
    [output] = reference.generate("Once upon a time", EVERY)
    rows = raw.logprobs((*output.prompt_token_ids, *output.token_ids), len(output.prompt_token_ids))
    check(output, rows, raw.n_vocab, raw.n_vocab, 1e-5)
    assert all(len(one) == raw.n_vocab for one in output.outputs[0].logprobs)
    assert sum(math.exp(each.logprob) for each in output.outputs[0].logprobs[0].values()) == pytest.approx(1)


CHOSEN = (5, 300, 301, 2047)


@pytest.mark.parametrize("also", [None, 0, 3])
def test_tokens_asked_for_by_id(reference, raw, also):
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=also, logprob_token_ids=CHOSEN, ignore_eos=True)
    [output] = reference.generate("Once upon a time", params)
    assert output.prompt_logprobs is None
    rows = raw.logprobs((*output.prompt_token_ids, *output.token_ids), len(output.prompt_token_ids))
    rows = rows[len(output.prompt_token_ids) - 1 :]
    [completion] = output.outputs
    for token, one, row in zip(output.token_ids, completion.logprobs, rows, strict=False):
        order = np.argsort(-row, kind="stable")
        likeliest = order[: also or 0].tolist()
        assert {*one} == {token, *CHOSEN, *likeliest}
        assert next(iter(one)) == token
        assert set(list(one)[-len(CHOSEN) :]) <= {*CHOSEN, *likeliest}
        for each, logprob in one.items():
            assert logprob.logprob == pytest.approx(row[each], abs=1e-5)
            assert order[logprob.rank - 1] == each
    assert completion.cumulative_logprob is not None


@pytest.mark.parametrize(
    "options",
    [
        {"isolate": True},
        {"speculate": "lookup", "speculate_always": True, "instances": 1, "strategy": "batched"},
    ],
    ids=["a child", "guesses"],
)
def test_they_are_the_same_elsewhere(reference, options):
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, logprob_token_ids=CHOSEN, n=2, ignore_eos=True)
    asked = ["The cat sat. The cat sat. The cat", "Once"]
    wanted = reference.generate(asked, params)
    with LLM("tiny", n_slots=4, **options) as llm:
        found = llm.generate(asked, params)
        [whole] = llm.generate("Once", EVERY)
        assert (llm.stats().accepted_tokens > 0) == ("speculate" in options)
    for one, other in zip(found, wanted, strict=True):
        for each, its in zip(one.outputs, other.outputs, strict=True):
            assert each.token_ids == its.token_ids
            for told, tell in zip(each.logprobs, its.logprobs, strict=True):
                assert {token: lp.logprob for token, lp in told.items()} == pytest.approx(
                    {token: lp.logprob for token, lp in tell.items()}, abs=0.05
                )
    assert [len(each) for each in whole.outputs[0].logprobs] == [2048] * 3


def test_too_many_are_that_requests_error():
    with LLM("tiny", n_slots=1) as llm:
        n_ctx = llm.plan.config.n_ctx
        huge = SamplingParams(max_tokens=None, logprobs=1024, n=200)
        fine, refused = llm.generate(["a b"] * 2, [ASKS, huge], errors="return")
    assert fine.error is None
    assert "a request may have 0 to 4194304" in refused.error, n_ctx


def test_those_behind_the_samplers_are_of_the_distribution_that_is_drawn_from():
    asked = {"max_tokens": 12, "logprobs": 4, "seed": 3, "ignore_eos": True, "top_k": 3, "temperature": 0.7}
    for speculate in ("off", "lookup"):
        with LLM("tiny", n_slots=2, n_threads=1, instances=1, speculate=speculate, isolate=speculate == "off") as llm:
            own, drawn = llm.generate(
                ["The fox the fox the fox"] * 2,
                [SamplingParams(**asked), SamplingParams(**asked, post_sampling_probs=True)],
            )
        assert drawn.token_ids == own.token_ids
        for token, before, behind in zip(
            drawn.token_ids, own.outputs[0].logprobs, drawn.outputs[0].logprobs, strict=True
        ):
            assert len(behind) <= 3
            assert math.fsum(math.exp(one.logprob) for one in behind.values()) == pytest.approx(1)
            # the remaining tokens have the same order, and the temperature makes their differences larger
            likeliest = sorted(before, key=lambda i: before[i].rank)[: len(behind)]
            assert sorted(behind, key=lambda i: behind[i].rank) == likeliest
            first, last = likeliest[0], likeliest[-1]
            wanted = (before[first].logprob - before[last].logprob) / 0.7
            assert behind[first].logprob - behind[last].logprob == pytest.approx(wanted, abs=1e-3)
            assert next(iter(behind)) == token
