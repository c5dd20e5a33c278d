"""Models of every kind of architecture, with random weights. Each one writes the texts of llama_cpp.Llama, or is
refused."""

import itertools
import logging
import random
import re
import threading
from dataclasses import replace

import gguf
import llama_cpp
import numpy as np
import pytest

from llamabatch import LLM, ConfigError, EngineConfig, FinishReason, SamplingParams
from llamabatch.engine.resolve_config import plan
from llamabatch.llama.context import Context
from llamabatch.llama.model import Model
from llamabatch.llama.model_runner import ModelRunner
from tests.clients import innermost
from tests.model.architectures import N_EMBD, WINDOW, write
from tests.waiting import PATIENCE_S

GENERATING = ["llama", "gemma2", "qwen2moe", "deepseek2", "mamba", "rwkv7", "jamba", "granitehybrid", "lfm2"]
RECURRENT = ["mamba", "rwkv7", "jamba", "granitehybrid", "lfm2"]
# one model for each kind of memory: cells, cells of a window, states, and cells with states
MEMORIES = ["llama", "gemma2", "mamba", "jamba"]
STRATEGIES = ["sequential", "length-sorted", "interleaved", "static", "batched", "auto"]
N_CTX = 512
MAX_GAP = 0.01  # of logits, whose deviation is 4; with weights in f32, texts hardly ever part
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
ENDS = (0, 2)  # the token ids that end a text in these vocabularies
ONE_THREAD = {"n_threads": 1, "n_threads_batch": 1}  # more threads would mostly wait for each other


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function that writes the model of a kind once, and returns its path."""
    folder, written = tmp_path_factory.mktemp("models"), {}

    def path(kind):
        if kind not in written:
            written[kind] = write(kind, folder / f"{kind}.gguf")
        return written[kind]

    return path


def prompts_and_params():
    """Returns prompts of mixed length with their params. Some are longer than the sliding window, some begin alike."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 2048) for _ in range(rng.choice([3, 10, 40, 130]))] for _ in range(9)]
    longest = max(prompts, key=len)
    assert len(longest) > 3 * WINDOW
    prompts += [[*longest[:60], 7, 8, 9], [*longest[:60], 9, 8], longest]
    return prompts, [SamplingParams(temperature=0, max_tokens=rng.choice([5, 20, 40])) for _ in prompts]


class Peer:
    """Computes texts with llama_cpp.Llama, one after another."""

    def __init__(self, path):
        self.llama = llama_cpp.Llama(
            str(path), n_ctx=N_CTX, n_batch=N_CTX, verbose=False, flash_attn=True, **ONE_THREAD
        )

    def _start(self):
        self.llama.reset()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.llama.ctx), True)

    def generate(self, ids, n):
        self._start()
        tokens = []
        for token in self.llama.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
            tokens.append(token)
            if token in ENDS or len(tokens) == n:
                return tokens
        return tokens

    def gap(self, ids, *nexts):
        """Returns how far the logits of `nexts` are below the best logit after `ids`. Each of `nexts` is a group of
        tokens: its best token counts, and the worst group is returned."""
        self._start()
        self.llama.eval(ids)
        logits = llama_cpp.llama_get_logits_ith(self.llama.ctx, -1)[: self.llama.n_vocab()]
        return max(logits) - min(max(logits[token] for token in tokens) for tokens in nexts)

    def score(self, ids, continuation):
        """Returns the log-probabilities of the continuation's tokens, from a softmax of the logits."""
        self._start()
        self.llama.eval(ids)
        found = []
        for token in continuation:
            logits = np.array(llama_cpp.llama_get_logits_ith(self.llama.ctx, -1)[: self.llama.n_vocab()])
            found.append(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
            self.llama.eval([token])
        return found


class Peers:
    """Compares outputs with the texts of llama_cpp.Llama for the same prompts."""

    def __init__(self, models):
        self._models = models
        self._known = {}
        self._prompts, self._params = prompts_and_params()

    def check(self, kind, outputs):
        """Checks the outputs of all prompts."""
        peer, texts = self._of(kind)
        for prompt, output, wanted in zip(self._prompts, outputs, texts, strict=True):
            assert output.error is None
            self._check(kind, peer, prompt, *([t for t in ids if t not in ENDS] for ids in (output.token_ids, wanted)))

    def check_some(self, kind, outputs):
        """Checks the outputs of some prompts, by the prompts' numbers."""
        peer, texts = self._of(kind)
        for number, output in outputs.items():
            ids = ([t for t in tokens if t not in ENDS] for tokens in (output.token_ids, texts[number]))
            self._check(kind, peer, self._prompts[number], *ids)

    def check_equal(self, kind, prompt, got, wanted, n_tokens):
        """Checks that two of our own texts are equal, and have so many tokens."""
        assert len(got) == len(wanted) == n_tokens
        self._check(kind, self._of(kind)[0], prompt, got, wanted)

    def _check(self, kind, peer, prompt, got, wanted):
        if got != wanted:
            pairs = enumerate(zip(got, wanted, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(got), len(wanted)))
            gap = peer.gap([*prompt, *wanted[:at]], got[at : at + 1] or ENDS, wanted[at : at + 1] or ENDS)
            assert gap < MAX_GAP, f"{kind}: the gap is {gap} where {got} and {wanted} part"

    def _of(self, kind):
        if kind not in self._known:
            peer = Peer(self._models(kind))
            texts = [peer.generate(p, s.max_tokens) for p, s in zip(self._prompts, self._params, strict=True)]
            self._known[kind] = peer, texts
        return self._known[kind]

    def close(self):
        for peer, _ in self._known.values():
            peer.llama.close()


@pytest.fixture(scope="module")
def peers(models):
    found = Peers(models)
    yield found
    found.close()


# --- what works ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [(kind, strategy) for kind in GENERATING for strategy in STRATEGIES if kind in MEMORIES or strategy == "batched"],
)
def test_every_strategy_writes_what_the_model_alone_writes(models, peers, kind, strategy):
    prompts, params = prompts_and_params()
    with LLM(models(kind), strategy=strategy, n_slots=4, n_ctx=N_CTX, **ONE_THREAD) as llm:
        peers.check(kind, llm.generate(prompts, params))
        peers.check(kind, llm.generate(prompts, params))  # with the prefixes that the first call left


@pytest.mark.parametrize(
    "options",
    [
        {"n_batch": 32, "n_ubatch": 16, "prefill_budget": 16},  # long prompts in chunks, beside requests that decode
        {"kv": "unified", "kv_cells": N_CTX},
        {"flash_attn": "off", "n_slots": 8},
    ],
    ids=["chunks", "unified", "no flash attention"],
)
@pytest.mark.parametrize("kind", GENERATING)
def test_other_shapes_of_the_batch(models, peers, kind, options):
    prompts, params = prompts_and_params()
    with LLM(models(kind), strategy="batched", **{"n_slots": 4, "n_ctx": N_CTX, **ONE_THREAD, **options}) as llm:
        peers.check(kind, llm.generate(prompts, params))


def test_in_child_processes(models, peers):
    kind = "jamba"
    prompts, params = prompts_and_params()
    with LLM(models(kind), strategy="multi-instance", instances=2, n_slots=4, n_ctx=N_CTX, **ONE_THREAD) as llm:
        peers.check(kind, llm.generate(prompts, params))


def _holds_more_than_cells(engine):
    return engine.model.is_recurrent or engine.model.has_window


@pytest.mark.parametrize("kind", GENERATING)
def test_in_and_out_of_the_batch(models, peers, kind):
    """The context grows while a request runs: its cells are moved, or the request is computed again. Other requests are
    aborted meanwhile, and later ones use their slots."""
    prompts, params = prompts_and_params()
    with LLM(models(kind), strategy="batched", n_slots=4, start_slots=1, n_ctx=N_CTX, **ONE_THREAD) as llm:
        submitted, calls = threading.Event(), itertools.count()

        def runs_until_submitted(_, logits):
            if next(calls) == 10:
                assert submitted.wait(PATIENCE_S)
            return logits

        runs_on = llm.stream(prompts[0], replace(LONG, logits_processors=[runs_until_submitted]))
        tokens = [next(runs_on).token_ids for _ in range(10)]
        aborted = llm.stream(prompts[:6], LONG)
        submitted.set()
        for _ in range(20):
            next(aborted)
        aborted.close()
        peers.check(kind, llm.generate(prompts, params))
        tokens += [piece.token_ids for piece in runs_on]
        is_plain = not (innermost(llm).ask(_holds_more_than_cells).result())
        assert llm.stats().preemptions == (0 if is_plain else 1)
        alone = llm.generate(prompts[0], LONG)[0]
    tokens = [token for piece in tokens for token in piece]
    peers.check_equal(kind, prompts[0], tokens, list(alone.token_ids), 150)


@pytest.mark.parametrize("kind", GENERATING)
def test_scores_and_logprobs_are_those_of_the_model_alone(models, kind):
    prompts, _ = prompts_and_params()
    continuations = [[9, 10, 11], [9, 12], [700]]
    with LLM(models(kind), strategy="batched", n_slots=4, n_ctx=N_CTX, **ONE_THREAD) as llm:
        scored = llm.score(prompts[-1], continuations)
        told = llm.generate([[*prompts[-1], 9], [5, 6]], SamplingParams(max_tokens=2, prompt_logprobs=0, logprobs=2))
    peer = Peer(models(kind))
    for score, continuation in zip(scored, continuations, strict=True):
        assert score.error is None
        np.testing.assert_allclose(score.token_logprobs, peer.score(prompts[-1], continuation), atol=2e-3)
    peer.llama.close()
    assert told[0].error is None
    assert told[0].prompt_logprobs[-1][9].logprob == pytest.approx(scored[0].token_logprobs[0], abs=2e-3)


@pytest.mark.parametrize("kind", MEMORIES)
def test_preempted_by_priority(models, peers, kind):
    """Requests of lower priority lose their slots. Later, their prompts and generated tokens are computed again."""
    prompts, params = prompts_and_params()
    with LLM(models(kind), strategy="batched", n_slots=4, n_ctx=N_CTX, preempt=True, **ONE_THREAD) as llm:
        longer = replace(LONG, max_tokens=350, priority=5)
        asked = llm.stream(prompts[:4], longer)
        pieces = [next(asked)]
        peers.check(kind, llm.generate(prompts, [replace(p, priority=-5) for p in params]))
        pieces += asked
        assert llm.stats().preemptions >= 1
        alone = llm.generate(prompts[:4], longer)
    for index, output in enumerate(alone):
        tokens = [token for piece in pieces if piece.prompt_index == index for token in piece.token_ids]
        peers.check_equal(kind, prompts[index], tokens, list(output.token_ids), 350)


@pytest.mark.parametrize("kind", RECURRENT)
def test_states_are_copied_whole_and_no_dummy_rows_are_computed(models, kind):
    """A recurrent state belongs to the whole text so far. Other requests can copy it only at its end, and it cannot be
    cut."""
    prompts, params = prompts_and_params()
    with LLM(models(kind), strategy="batched", n_slots=4, n_ctx=N_CTX, **ONE_THREAD) as llm:
        same = llm.generate([prompts[-1]] * 6, params[0])
        assert len({o.token_ids for o in same}) == 1
        several = llm.generate(prompts[-1], replace(params[0], n=3))[0]
        assert {c.token_ids for c in several.outputs} == {same[0].token_ids}
        stats = llm.stats()
    assert (stats.shared_tokens > 0, stats.dummy_rows) == (True, 0)


def test_guesses_need_cells_that_can_be_cut(models):
    with pytest.raises(ConfigError, match=r"speculate is 'lookup', but .* has recurrent state"):
        LLM(models("mamba"), speculate="lookup")
    for options, why in (({"swa_full": False}, "swa_full is False"), ({"kv": "unified"}, "kv is 'unified'")):
        with pytest.raises(ConfigError, match=f"has layers with a sliding window, and {why}"):
            LLM(models("gemma2"), speculate="lookup", **options)


# --- layers with a sliding window -----------------------------------------------------------------------------------


def test_prefixes_of_a_windowed_model_are_shared_with_all_its_cells(models, peers):
    """Prompts are several windows long. Their cells are copied between slots, kept after a request ends, cut at any
    place, and used with speculation."""
    prompts, params = prompts_and_params()
    options = {"n_slots": 4, "n_ctx": N_CTX, **ONE_THREAD}
    with LLM(models("gemma2"), strategy="batched", **options) as llm:
        peers.check("gemma2", llm.generate(prompts, params))
        assert llm.stats().shared_tokens >= 60 > WINDOW
        reused = 0
        for number, prompt in enumerate(prompts):  # each alone, with the cells that the calls before left in the slots
            [output] = llm.generate([prompt], params[number])
            peers.check_some("gemma2", {number: output})
            reused += output.num_cached_tokens
        assert reused > 3 * WINDOW
    with LLM(models("gemma2"), strategy="batched", speculate="lookup", speculate_always=True, **options) as llm:
        peers.check("gemma2", llm.generate(prompts, params))
        assert llm.stats().drafted_tokens > llm.stats().accepted_tokens


def test_a_prefix_from_before_the_window_gives_the_bits_of_a_computed_one(models):
    """A request shares only the early part of a finished one. With swa_full, all layers still have the cells of this
    part."""
    rng = random.Random(7)
    first = [rng.randrange(3, 2048) for _ in range(8 * WINDOW)]
    other = [*first[: 2 * WINDOW + 5], *(rng.randrange(3, 2048) for _ in range(20))]
    asked = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)
    options = {"strategy": "batched", "n_slots": 2, "n_ctx": N_CTX, **ONE_THREAD}
    with LLM(models("gemma2"), **options) as llm:
        llm.generate(first, asked)
        [shared] = llm.generate([other], asked)
        assert shared.num_cached_tokens >= 2 * WINDOW
    with LLM(models("gemma2"), cache_prefix=False, **options) as llm:
        [computed] = llm.generate([other], asked)
    assert shared.token_ids == computed.token_ids
    gaps = [
        abs(one[token].logprob - another[token].logprob)
        for token, one, another in zip(
            computed.token_ids, shared.outputs[0].logprobs, computed.outputs[0].logprobs, strict=True
        )
    ]
    assert max(gaps) < 1e-3


def test_cells_of_the_window_alone(models, peers):
    """swa_full=False needs less memory and gives the same texts. Prefixes are then copied whole."""
    prompts, params = prompts_and_params()
    options = {"strategy": "batched", "n_slots": 4, "n_ctx": 2048, "n_ubatch": 64, **ONE_THREAD}
    with LLM(models("gemma2"), swa_full=False, **options) as llm:
        peers.check("gemma2", llm.generate(prompts, params))
        peers.check("gemma2", llm.generate(prompts, params))
        assert llm.stats().shared_tokens > 0
        assert llm.plan.config.swa_full is False
    with pytest.raises(ConfigError, match=r"swa_full is False, but llama.gguf has no layers with a sliding window"):
        LLM(models("llama"), swa_full=False)


def test_a_slot_is_cut_only_where_its_window_is_whole(models):
    config = EngineConfig(
        str(models("gemma2")), strategy="batched", n_slots=1, n_ctx=2048, n_ubatch=64, n_batch=64, **ONE_THREAD
    )
    for whole, cut in ((True, True), (False, False)):
        chosen = plan(replace(config, swa_full=whole), models("gemma2")).config
        model = Model(models("gemma2"), replace(config, swa_full=whole))
        runner = ModelRunner(model, chosen, 1)
        context = runner._context
        for start in range(0, 640, 64):
            struct = runner._batch.fill_rows([5] * 64, list(range(start, start + 64)), [0] * 64)
            assert context.decode(struct) == 0
        assert context.clear(0, 630)  # a cut within the last window is always possible
        assert context.clear(0, 200) is cut
        runner.close()
        model.close()


def test_the_context_ends_where_it_does(models):
    for kind in MEMORIES:
        with LLM(models(kind), strategy="batched", n_slots=3, n_ctx=64, **ONE_THREAD) as llm:
            outputs = llm.generate([[5, 6, 7]] * 5, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
            assert {len(o.token_ids) for o in outputs} == {62}
            assert {o.finish_reason for o in outputs} == {FinishReason.LENGTH}


# --- what it takes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in GENERATING),
        ("gemma2", {"swa_full": False, "n_ctx": 2048, "n_ubatch": 64}),
        ("gemma2", {"swa_full": False, "n_ctx": 2048, "kv": "unified", "kv_cells": 4096}),
    ],
)
def test_the_plan_counts_what_llama_cpp_allocates(models, kind, options, caplog):
    config = EngineConfig(
        str(models(kind)), strategy="batched", n_slots=4, profile=False, **{"n_ctx": N_CTX, **options}
    )
    model = Model(models(kind), config)
    chosen = plan(config, model.path)
    with caplog.at_level(logging.INFO, logger="llamabatch.llama_cpp"):
        Context(model, chosen.config, 4).close()
    model.close()
    buffers = re.findall(r"(?:KV|RS) buffer size = +([\d.]+) MiB", caplog.text)
    assert buffers
    assert abs(chosen.memory.kv_cache / 2**20 - sum(map(float, buffers))) < 0.01 * len(buffers)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "reason", "options"),
    [
        ("t5", {}, r"an encoder-decoder \(t5\)", {"isolate": True}),
        ("bert", {"attention__causal": None}, "llama.cpp gives its architecture no memory", {}),
    ],
)
def test_refused_at_load_with_the_reason(tmp_path, kind, changes, reason, options):
    path = write(kind, tmp_path / "model.gguf", **changes)
    with pytest.raises(ConfigError, match=f"model.gguf cannot generate text: .*{reason}"):
        LLM(path, **options)


@pytest.mark.parametrize(("kind", "options"), [("bert", {}), ("mamba", {"isolate": True})])
def test_a_model_that_ranks_without_a_head_is_refused_at_load(tmp_path, kind, options):
    path = write(kind, tmp_path / "model.gguf", pooling_type=gguf.PoolingType.RANK)
    with pytest.raises(
        ConfigError, match=r"pooling is 'rank', but .* has no classification head .* allowed are 'none'"
    ):
        LLM(path, **options)


@pytest.mark.parametrize(
    ("kind", "changes", "options"), [("bert", {}, {"isolate": True}), ("llama", {"attention__causal": False}, {})]
)
def test_encoders_embed_and_are_refused_for_generation(tmp_path, kind, changes, options):
    path = write(kind, tmp_path / "model.gguf", **changes)
    with LLM(path, **options) as llm:
        with pytest.raises(ConfigError, match=rf"model.gguf cannot generate text: .*an encoder \({kind}\)"):
            llm.generate("Hello")
        with pytest.raises(ConfigError, match=rf"model.gguf cannot score texts: .*an encoder \({kind}\)"):
            llm.score("Hello", [" world"])
        assert llm.embed("Hello")[0].shape == (N_EMBD,)


@pytest.mark.parametrize(
    ("kind", "options", "copies"),
    [
        ("mamba", {}, True),
        ("jamba", {}, True),
        ("gemma2", {"swa_full": False}, True),
        ("gemma2", {"kv": "unified"}, False),
    ],
)
def test_no_row_is_padded_and_no_part_copied_without_cells_to_cut(models, kind, options, copies):
    config = EngineConfig(str(models(kind)), strategy="batched", n_slots=2, n_ctx=N_CTX, profile=False, **options)
    model = Model(models(kind), config)
    runner = ModelRunner(model, plan(config, model.path).config, 2)
    assert not runner.limits.can_cut
    assert runner.limits.can_share is copies
    assert (runner.limits.state_bytes > 0) is copies
    assert runner.limits.can_pad is (options == {"swa_full": False})
    runner.close()
    model.close()
