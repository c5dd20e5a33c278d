"""A draft model follows every change of the target's sequences, and its guesses never change a text."""

import json
import random
from types import SimpleNamespace

import pytest

from llamabatch import LLM, ConfigError, Engine, EngineConfig, ModelFileError, Request, SamplingParams
from llamabatch.engine.resolve_config import plan
from llamabatch.gguf.resolve import resolve
from llamabatch.llama.draft_model import check_draft
from tests.model import architectures
from tests.model.conftest import GREEDY, HELDOUT, mixed_conversations

# one thread, because a second one mostly waits in so small a model
ITSELF = {"speculate": "draft", "draft_model": "tiny", "speculate_always": True, "n_threads_batch": 1}


def conversations_with_stories(n, seed):
    """Returns n conversations. Every second one asks for a story, because stories are long."""
    others = mixed_conversations(n, seed=seed)
    asked = [json.loads(line) for line in HELDOUT.read_text(encoding="utf-8").splitlines()]
    stories = [row["messages"] for row in asked if row["kind"] == "stories"]
    return [stories[i] if i % 2 else other for i, other in enumerate(others)]


@pytest.fixture(scope="module")
def another(tmp_path_factory):
    """A model of the same vocabulary with random weights. Its guesses are hardly ever right."""
    return str(architectures.write("llama", tmp_path_factory.mktemp("draft") / "random.gguf"))


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "sequential", "n_draft": 16},
        {"strategy": "batched", "n_slots": 8},
        {"strategy": "batched", "n_slots": 8, "kv": "unified"},
        {"strategy": "interleaved", "n_slots": 4, "n_draft": 3},
        {"strategy": "batched", "n_slots": 6, "n_batch": 40, "n_ubatch": 24},
        {"instances": 2, "n_slots": 8},
        {"isolate": True, "n_slots": 4},
    ],
    ids=str,
)
def test_a_model_that_drafts_for_itself_is_right(options, reference, assert_equal_by_the_rule):
    conversations, params = conversations_with_stories(30, seed=8), SamplingParams(temperature=0, max_tokens=64)
    wanted = reference.chat(conversations, params)
    with LLM("tiny", **ITSELF, **options) as llm:
        outputs = llm.chat(conversations, params)
        stats = llm.stats()
    assert stats.drafted_tokens > 100
    assert stats.acceptance >= 0.99
    assert_equal_by_the_rule(outputs, wanted, least=0.95)


def test_it_follows_growth_moves_shared_prefixes_and_lost_slots(reference, assert_equal_by_the_rule):
    """Requests come while others run, and some leave early. Wrong cells of the draft model would spoil its guesses."""
    rng = random.Random(4)
    head = reference.tokenize("Ada keeps three cats. Ben keeps one dog. Carla keeps five fish. " * 3)
    prompts = [
        (tuple(head) if rng.random() < 0.4 else ()) + tuple(reference.tokenize(f"Tell me a story, number {i}."))
        for i in range(36)
    ]
    params = [SamplingParams(temperature=0, max_tokens=rng.randrange(4, 60), ignore_eos=True) for _ in prompts]
    wanted = reference.generate([list(prompt) for prompt in prompts], params)
    finished = {}
    with Engine(EngineConfig("tiny", n_slots=8, start_slots=2, n_ctx=512, **ITSELF)) as engine:
        proposer = engine._speculation._proposer
        computed, decode = [], proposer._decode
        proposer._decode = lambda context, struct: (computed.append(struct.n_tokens), decode(context, struct))
        waiting = list(range(len(prompts)))
        for number in range(4000):
            if waiting and rng.random() < 0.5:
                i = waiting.pop(0)
                engine.add(Request(f"r{i}", prompts[i], params[i]))
            if number in (20, 45) and engine._scheduler.running:
                engine._scheduler._preempt(engine._scheduler.running[0])
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = output.finished
            if not waiting and not engine.has_work:
                break
        stats = engine.stats()
    assert stats.preemptions >= 2
    assert stats.acceptance >= 0.99
    outputs = [finished[f"r{i}"] for i in range(len(prompts))]
    assert_equal_by_the_rule(outputs, wanted, least=0.9)
    # Each prompt and each guess is computed at most once, but for a few rows. No sequence is computed again as a whole.
    assert sum(computed) <= sum(map(len, prompts)) + 2 * sum(len(output.token_ids) for output in outputs)


def test_a_long_prompt_is_caught_up_with_in_small_parts(reference, assert_equal_by_the_rule):
    """In a step that also decodes, the draft model computes at most one pass of prompt tokens."""
    prompts = [[300 + i + j % 50 for j in range(700 if i < 2 else 9)] for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    finished = {}
    with Engine(EngineConfig("tiny", n_slots=4, n_ctx=800, n_ubatch=64, n_batch=64, **ITSELF)) as engine:
        proposer = engine._speculation._proposer
        computed, decode, propose = [], proposer._decode, proposer.propose
        proposer._decode = lambda context, struct: (computed.append(struct.n_tokens), decode(context, struct))
        most = 0
        proposer.propose = lambda sequences, n: (computed.clear(), propose(sequences, n))[1]
        for i, prompt in enumerate(prompts):
            engine.add(Request(f"r{i}", tuple(prompt), params))
        while engine.has_work:
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = output.finished
            most = max(most, sum(computed))
        assert engine.stats().acceptance >= 0.99
        assert engine.stats().drafted_tokens > 100
    assert most <= 64 + 4 * (16 + 8)
    assert_equal_by_the_rule([finished[f"r{i}"] for i in range(4)], reference.generate(prompts, params), least=0.7)


def test_the_end_of_n_ctx(caplog):
    with LLM("tiny", n_ctx=64, strategy="batched", n_slots=3, **ITSELF) as llm:
        prompts = [[300 + i] * (60 - i) for i in range(3)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, ignore_eos=True, max_tokens=None))
    assert [len(output.token_ids) for output in outputs] == [5, 6, 7]
    assert caplog.text == ""


def test_a_text_longer_than_the_draft_model_knows_goes_on_without(tmp_path, caplog, reference):
    short = architectures.write("llama", tmp_path / "short.gguf", context_length=64)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=40)
    prompts = [[300 + i] * length for i, length in enumerate((5, 50, 63, 64, 65, 100))]
    options = {**ITSELF, "draft_model": str(short), "strategy": "batched", "n_slots": 6, "n_ctx": 200}
    with LLM("tiny", **options) as llm:
        outputs = llm.generate(prompts, params)
        assert 64 < llm.stats().drafted_tokens < 8 * 4 * 60
        assert "draft model" in llm.plan.memory.describe()
    assert caplog.text == ""
    wanted = reference.generate(prompts, params)
    assert sum(a.token_ids == b.token_ids for a, b in zip(outputs, wanted, strict=True)) >= 5


def test_a_draft_model_that_is_always_wrong_changes_nothing(another, reference, assert_equal_by_the_rule):
    conversations = conversations_with_stories(20, seed=9)
    options = {"strategy": "batched", "n_slots": 8, "speculate": "draft", "draft_model": another, "n_threads_batch": 1}
    with LLM("tiny", speculate_always=True, **options) as llm:
        assert_equal_by_the_rule(llm.chat(conversations, GREEDY), reference.chat(conversations, GREEDY), least=0.95)
        assert llm.stats().acceptance < 0.2
    with LLM("tiny", **options) as llm:  # without speculate_always, the engine notices that guessing does not pay
        llm.generate(["Tell me a story."] * 8, SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
        stats = llm.stats()
    assert stats.speculating == 0
    assert stats.verify_calls <= 0.2 * stats.decode_calls


def test_sampled_text_is_that_of_its_seed(reference):
    conversations = conversations_with_stories(40, seed=3)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=32) for i in range(40)]
    wanted = reference.chat(conversations, params)
    with LLM("tiny", n_slots=8, strategy="batched", **ITSELF) as llm:
        outputs = llm.chat(conversations, params)
        assert 0.5 < llm.stats().acceptance < 1
    assert sum(a.token_ids == b.token_ids for a, b in zip(outputs, wanted, strict=True)) >= 38


def test_a_draft_model_that_fails_costs_no_request(reference):
    conversation = mixed_conversations(1)[0]
    [wanted] = reference.chat([conversation], GREEDY)
    with Engine(EngineConfig("tiny", n_slots=2, **ITSELF)) as engine:
        proposer = engine._speculation._proposer
        proposer._context.decode = lambda struct: SimpleNamespace(name="FAILED", value=-3)
        engine.add(Request("r", wanted.prompt_token_ids, GREEDY))
        while engine.has_work:
            for output in engine.step():
                finished = output.finished
        assert engine.stats().drafted_tokens == 0
    assert finished.token_ids == wanted.token_ids


def test_the_plan_counts_the_draft_model(another):
    path, itself = resolve("tiny"), EngineConfig("tiny", n_slots=8, n_ctx=512, **ITSELF)
    config = EngineConfig("tiny", n_slots=8, n_ctx=512)
    drafted = EngineConfig("tiny", n_slots=8, n_ctx=512, speculate="draft", draft_model=another)
    without, whole, same = plan(config, path), plan(drafted, path), plan(itself, path)
    file_bytes = resolve(another).stat().st_size
    kv_cache = 2 * 2 * 32 * 512 * 8 * 2  # layers, K and V, values a token, cells, slots, bytes
    assert whole.memory.draft >= file_bytes + kv_cache
    assert whole.memory.total >= without.memory.total + whole.memory.draft
    assert "draft model" in whole.describe()
    assert "draft model" not in without.describe()
    assert 0 < same.memory.draft < same.memory.kv_cache + resolve("tiny").stat().st_size + same.memory.compute


# --- refusals -----------------------------------------------------------------------------------------------------


def model_of(name, texts, **facts):
    known = {"cannot_generate": None, "uncuttable": lambda config: None, "path": SimpleNamespace(name=name)}
    return SimpleNamespace(n_vocab=len(texts), token_text=texts.__getitem__, **{**known, **facts})


@pytest.mark.parametrize(
    ("texts", "facts", "message"),
    [
        (["a"] * 100, {}, "d.gguf has a vocabulary of 100 tokens, t.gguf one of 300; they must have the same"),
        (["a"] * 17 + ["b"] + ["a"] * 282, {}, "d.gguf has another vocabulary than t.gguf: token 17 is 'b', not 'a'"),
        (["a"] * 300, {"uncuttable": lambda config: "recurrent state"}, "d.gguf has recurrent state"),
        (["a"] * 300, {"cannot_generate": "an encoder"}, "d.gguf cannot guess text: it is an encoder"),
    ],
)
def test_a_draft_model_that_cannot_guess_is_refused_by_name(texts, facts, message):
    target = model_of("t.gguf", ["a"] * 300)
    config = EngineConfig("tiny")
    check_draft(model_of("padded.gguf", ["a"] * 320), target, config)
    with pytest.raises(ConfigError, match=message):
        check_draft(model_of("d.gguf", texts, **facts), target, config)


def test_a_draft_model_that_is_missing_is_named(tmp_path):
    with pytest.raises(ModelFileError, match=r"missing\.gguf does not exist"):
        LLM("tiny", speculate="draft", draft_model=str(tmp_path / "missing.gguf"))


def test_the_weights_are_in_memory_once_where_the_draft_model_is_the_target(tmp_path):
    (tmp_path / "same.gguf").symlink_to(resolve("tiny"))
    with Engine(EngineConfig("tiny", speculate="draft", draft_model=str(tmp_path / "same.gguf"))) as engine:
        assert engine._speculation._proposer._model is engine.model
        assert engine.plan.memory.draft < engine.plan.memory.kv_cache + engine.plan.memory.compute


def test_recurrent_models_are_refused_on_both_sides(tmp_path):
    path = architectures.write("mamba", tmp_path / "mamba.gguf")
    with pytest.raises(ConfigError, match=r"speculate is 'draft', but mamba.gguf has recurrent state"):
        LLM(path, speculate="draft", draft_model="tiny")
    with pytest.raises(ConfigError, match=r"draft_model mamba.gguf has recurrent state"):
        LLM("tiny", speculate="draft", draft_model=str(path))


def test_a_model_with_a_sliding_window_guesses_with_all_its_cells(tmp_path):
    """It may be the target and the draft model. With swa_full=False, both are refused."""
    target = architectures.write("gemma2", tmp_path / "target.gguf")
    draft = architectures.write("gemma2", tmp_path / "draft.gguf", seed=1)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    options = {"n_slots": 2, "n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "strategy": "batched"}
    texts = []
    for more in ({}, {"speculate": "draft", "draft_model": str(draft), "speculate_always": True}):
        with LLM(target, **options, **more) as llm:
            texts.append([output.token_ids for output in llm.generate([list(range(5, 75)), [9, 8]], params)])
            drafted = llm.stats().drafted_tokens
    assert drafted > 0
    assert texts[0] == texts[1]
    with pytest.raises(ConfigError, match=r"speculate is 'draft', but target.gguf has .*, and swa_full is False"):
        LLM(target, speculate="draft", draft_model=str(draft), swa_full=False)
