"""Speculative decoding on the bundled model needs fewer passes and gives the same text."""

import json
import random
from types import SimpleNamespace

import pytest

from llamabatch import LLM, ConfigError, Engine, EngineConfig, Request, SamplingParams
from llamabatch.engine.engine import check_can_speculate
from tests.model.conftest import HELDOUT, mixed_conversations
from tests.unit.configs import resolved

FORCED = {"speculate": "lookup", "speculate_always": True}


def copies():
    """Returns the held-out questions that ask for a copy of 3 to 6 words."""
    rows = [json.loads(line) for line in HELDOUT.read_text(encoding="utf-8").splitlines()]
    return [row["messages"] for row in rows if row["task"] == "copy"]


def mixture(n_copies, n_others, seed):
    """Returns a mixture of conversations: the answers of some are in the prompt, those of others are not."""
    both = copies()[:n_copies] + mixed_conversations(n_others, seed=seed)
    random.Random(seed).shuffle(both)
    return both


def test_prompts_that_ask_for_a_copy_take_at_most_0_6_passes_a_token(reference, greedy, assert_equal_by_the_rule):
    wanted = reference.chat(copies(), greedy)
    with LLM("tiny", strategy="sequential", **FORCED) as llm:
        outputs = llm.chat(copies(), greedy)
        stats = llm.stats()
    tokens = sum(len(output.token_ids) for output in outputs)
    assert tokens > 100
    assert (stats.decode_passes + stats.prefill_passes) / tokens <= 0.6
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert 0 < stats.verify_calls <= stats.decode_calls
    assert stats.speculating == 1
    assert_equal_by_the_rule(outputs, wanted)


@pytest.mark.parametrize(
    "options",
    [{}, {"kv": "unified"}, {"n_draft": 3, "n_ubatch": 40}, {"strategy": "interleaved"}],
    ids=str,
)
def test_greedy_text_in_company_is_that_without_guesses(options, reference, greedy, assert_equal_by_the_rule):
    conversations = mixture(30, 40, seed=5)
    wanted = reference.chat(conversations, greedy)
    with LLM("tiny", n_slots=8, instances=1, **FORCED, **options) as llm:
        outputs = llm.chat(conversations, greedy)
        stats = llm.stats()
    assert_equal_by_the_rule(outputs, wanted, least=0.95)
    assert stats.accepted_tokens > 60
    assert stats.verify_calls > 0


def test_penalties_count_the_tokens_inside_a_run(reference):
    conversations = mixture(30, 20, seed=6)
    params = SamplingParams(
        temperature=0, repetition_penalty=1.15, presence_penalty=0.3, frequency_penalty=0.2, max_tokens=40
    )
    wanted = reference.chat(conversations, params)
    with LLM("tiny", n_slots=8, strategy="batched", **FORCED) as llm:
        outputs = llm.chat(conversations, params)
        assert llm.stats().accepted_tokens > 40
    assert sum(a.token_ids == b.token_ids for a, b in zip(outputs, wanted, strict=True)) >= 38


def test_masks_follow_the_tokens_inside_a_run(reference):
    """The masks are those of bad words of several tokens, and of min_tokens."""
    asked = copies()[:30]
    whole = reference.chat(asked, SamplingParams(temperature=0, max_tokens=40))
    params = []
    for output in whole:
        words = output.text.replace(",", " ").split()
        forbidden = f"{words[-2]} {words[-1]}" if " ".join(words[-2:]) in output.text else f"{words[-2]}, {words[-1]}"
        params.append(SamplingParams(temperature=0, bad_words=[forbidden], min_tokens=18, max_tokens=24))
    wanted = reference.chat(asked, params)
    with LLM("tiny", n_slots=8, strategy="batched", **FORCED) as llm:
        outputs = llm.chat(asked, params)
        assert llm.stats().accepted_tokens > 60
    assert all(len(output.token_ids) >= 18 for output in outputs)
    assert sum(a.token_ids[:8] != b.token_ids[:8] for a, b in zip(outputs, whole, strict=True)) > 10
    assert sum(a.token_ids == b.token_ids for a, b in zip(outputs, wanted, strict=True)) >= 28


def test_sampled_text_is_that_of_its_seed(reference):
    conversations = mixture(30, 30, seed=3)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=32) for i in range(60)]
    wanted = reference.chat(conversations, params)
    with LLM("tiny", n_slots=16, strategy="batched", **FORCED) as llm:
        outputs = llm.chat(conversations, params)
        assert llm.stats().accepted_tokens > 50
    assert sum(a.token_ids == b.token_ids for a, b in zip(outputs, wanted, strict=True)) >= 57


def test_stops_and_lengths_inside_a_run_are_exact(reference):
    conversation = copies()[0]
    whole = reference.chat([conversation], SamplingParams(temperature=0))[0]
    with LLM("tiny", strategy="sequential", **FORCED) as llm:
        for most in range(1, len(whole.token_ids) + 1):
            output = llm.chat([conversation], SamplingParams(temperature=0, max_tokens=most))[0]
            assert output.token_ids == whole.token_ids[:most]
        words = whole.text.replace(",", " ").split()
        for stop in words:
            params = SamplingParams(temperature=0, stop=[stop])
            one, other = llm.chat([conversation], params)[0], reference.chat([conversation], params)[0]
            assert (one.text, one.token_ids, one.outputs[0].stop_reason) == (other.text, other.token_ids, stop)


@pytest.mark.parametrize(
    ("cost", "pays"), [(lambda rows: 0.01, True), (lambda rows: 0.01 * rows, False)], ids=["free rows", "dear rows"]
)
def test_left_to_itself_it_guesses_where_that_pays_and_says_so(cost, pays, reference):
    """`cost` gives the time of each step. Most guesses in this text are wrong."""
    now = [0.0]
    with Engine(EngineConfig("tiny", n_slots=4, speculate="lookup")) as engine:
        engine._speculation._clock = lambda: now[0]
        run = engine._runner.run

        def timed(batch):
            now[0] += cost(sum(span.length for span in batch.spans))
            return run(batch)

        engine._runner.run = timed
        for i in range(4):
            prompt = tuple(reference.tokenize(f"{i} a b c a b c a b c"))
            engine.add(
                Request(f"r{i}", prompt, SamplingParams(temperature=1.5, seed=i, max_tokens=250, ignore_eos=True))
            )
        guessing = []
        while engine.has_work:
            engine.step()
            guessing.append(engine.stats().speculating)
        stats = engine.stats()
    assert 0 < stats.acceptance < 0.5
    share = sum(guessing) / len(guessing)  # a few wrong guesses may change the estimates
    assert share > 0.7 if pays else share < 0.2
    assert (stats.verify_calls > 0.5 * stats.decode_calls) == pays


def test_nothing_is_guessed_unless_asked(greedy):
    with LLM("tiny", strategy="batched", n_slots=4) as llm:
        llm.chat(copies()[:4], greedy)
        stats = llm.stats()
    assert (stats.verify_calls, stats.drafted_tokens, stats.accepted_tokens, stats.speculating) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("found", "message"),
    [("recurrent state", "recurrent state"), ("layers with a sliding window, and swa_full is False", "swa_full")],
)
def test_models_whose_state_cannot_be_cut_are_refused_by_name(found, message):
    facts = {"path": SimpleNamespace(name="m.gguf"), "uncuttable": lambda config: found}
    unkept, kept = (SimpleNamespace(**facts, n_snapshots=lambda config, n=n: n) for n in (0, 8))
    check_can_speculate(resolved("tiny"), unkept)
    check_can_speculate(resolved("tiny", speculate="lookup"), kept)
    with pytest.raises(ConfigError, match=f"speculate is 'lookup', but m.gguf has .*{message}"):
        check_can_speculate(resolved("tiny", speculate="lookup"), unkept)
    small = SimpleNamespace(**facts, n_snapshots=lambda config: config.n_snapshots)
    check_can_speculate(resolved("tiny", speculate="lookup", n_ubatch=3), small)
    with pytest.raises(ConfigError, match=f"n_ubatch is 2, too small for guesses of m.gguf, which has .*{message}"):
        check_can_speculate(resolved("tiny", speculate="lookup", n_ubatch=2), small)
