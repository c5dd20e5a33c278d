"""Compares LLM.score with a float64 softmax over llama_cpp's own logits, and tests its arguments and errors."""

import asyncio
import math

import pytest

from llamabatch import (
    LLM,
    AdapterError,
    AsyncLLM,
    Engine,
    EngineConfig,
    PromptError,
    PromptWarning,
    Request,
    SamplingParams,
    Score,
)
from tests.model.adapter_files import write_lora
from tests.model.conftest import MAX_GAP, questions
from tests.model.test_logprobs import Raw

LONG = " ".join(questions()[:8])
ANSWERS = [" Paris.", " London.", " It is a city", " a", " The red dog ran home"]


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", strategy="batched", n_slots=8, n_ctx=1024) as made:
        yield made


@pytest.fixture(scope="module")
def raw(reference):
    made = Raw(reference.plan.config)
    yield made
    made.close()


def wanted(raw: Raw, llm: LLM, prompt: str, continuation: str) -> tuple[tuple[int, ...], list[float], bool]:
    """Returns the continuation's tokens, their logprobs, and whether all are the greedy ones. llama_cpp computes the
    whole text but its last token in one call."""
    whole, head = llm.tokenize(prompt + continuation), llm.tokenize(prompt)
    first = next((i for i, (a, b) in enumerate(zip(whole, head, strict=False)) if a != b), min(len(whole), len(head)))
    rows = raw.logprobs(tuple(whole[:-1]), len(whole) - 1)
    places = range(first, len(whole))
    logprobs = [float(rows[i - 1][whole[i]]) for i in places]
    return tuple(whole[first:]), logprobs, all(int(rows[i - 1].argmax()) == whole[i] for i in places)


def check(score: Score, expected: tuple[tuple[int, ...], list[float], bool], within: float) -> None:
    token_ids, logprobs, greedy = expected
    assert score.error is None
    assert (score.token_ids, score.num_tokens) == (token_ids, len(token_ids))
    assert score.token_logprobs == pytest.approx(logprobs, abs=within)
    assert score.logprob == math.fsum(score.token_logprobs)
    if within < 1e-4:
        assert score.is_greedy == greedy


def test_a_score_is_the_sum_of_a_softmax_over_the_models_own_logits(raw):
    prompt = questions()[0]
    with LLM("tiny", strategy="sequential", cache_prefix=False) as llm:  # computes all in one call, as `raw` does
        for continuation in ANSWERS:
            [score] = llm.score(prompt, [continuation])
            check(score, wanted(raw, llm, prompt, continuation), 1e-5)


def test_many_at_once_follow_the_rule_of_equality(llm, raw):
    pairs = [(question, ANSWERS[: 1 + i % 5]) for i, question in enumerate([*questions()[:20], LONG])]
    found = llm.score(pairs)
    assert [len(scores) for scores in found] == [len(continuations) for _, continuations in pairs]
    for (prompt, continuations), scores in zip(pairs, found, strict=True):
        for continuation, score in zip(continuations, scores, strict=True):
            check(score, wanted(raw, llm, prompt, continuation), MAX_GAP)


def test_the_prompt_is_computed_once_and_nothing_is_sampled(monkeypatch):
    """The test has more continuations than slots, and fails if a row is sampled."""

    def fail(*_args: object) -> None:
        raise AssertionError("a row was sampled")

    monkeypatch.setattr("llamabatch.sampling.row_logprobs.sample_rows", fail)
    monkeypatch.setattr("llamabatch.llama.model_runner.sample_rows", fail)
    continuations = [" a", " the", " dog", " cat", " red", " blue", " one", " two", " three", " four"]
    with LLM("tiny", strategy="batched", n_slots=4, n_ctx=1024) as llm:
        scores = llm.score(LONG, continuations)
        stats, head = llm.stats(), llm.tokenize(LONG)
        assert all(llm.tokenize(LONG + text)[: len(head)] == head for text in continuations)
    assert len(head) > 32
    # a chunk of one token counts in decode_rows
    assert stats.prefill_tokens + stats.decode_rows == len(head) - 1 + sum(score.num_tokens for score in scores)


def test_several_engines_share_the_prompts_and_compute_each_once():
    prompts = [f"{LONG} {word}" for word in ("a", "b", "c", "d")]
    with LLM("tiny", strategy="batched", instances=2, n_slots=4) as llm:
        scores = llm.score([(prompt, ANSWERS) for prompt in prompts])
        stats, head = llm.stats(), len(llm.tokenize(LONG))
    own = sum(score.num_tokens for each in scores for score in each)
    assert stats.prefill_tokens + stats.decode_rows < 2 * head + own + 4 * 3
    assert stats.prefill_tokens + stats.decode_rows > 2 * (head - 1) + own


def test_the_greedy_continuation_is_found_and_others_are_not(llm):
    prompt = "Once upon a time"
    [out] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True))
    other = (*out.token_ids[:5], (out.token_ids[5] + 1) % 300, *out.token_ids[6:])
    best, worse = llm.score(prompt, [out.token_ids, other])
    assert (best.is_greedy, worse.is_greedy) == (True, False)
    assert best.token_ids == out.token_ids
    assert best.logprob == pytest.approx(out.outputs[0].cumulative_logprob, abs=MAX_GAP)


def test_a_token_may_reach_across_the_border(llm):
    """If the continuation changes the last tokens of the prompt, these count as continuation."""
    text, cut = "Once upon a time there was a dog", 8
    whole = llm.tokenize(text)
    inside = next(n for n in range(cut, len(text)) if llm.tokenize(text[:n]) != whole[: len(llm.tokenize(text[:n]))])
    [score] = llm.score(text[:inside], [text[inside:]])
    head = llm.tokenize(text[:inside])
    kept = len(whole) - score.num_tokens
    assert whole[:kept] == head[:kept]
    assert whole[kept] != head[kept]
    assert list(score.token_ids) == whole[kept:]


def test_token_ids_are_taken_as_they_are(llm):
    head, tail = llm.tokenize("Once upon a time"), llm.tokenize(" there was", add_special=False)
    [of_ids] = llm.score(head, [tail])
    [of_text] = llm.score("Once upon a time", [" there was"])
    [mixed] = llm.score(head, [" there was"])
    assert of_ids.token_ids == of_text.token_ids == mixed.token_ids == tuple(tail)
    assert of_ids.token_logprobs == pytest.approx(of_text.token_logprobs, abs=MAX_GAP)


@pytest.mark.parametrize(
    ("prompt", "continuations", "message"),
    [
        ("a", [], "give a list of texts or token ids"),
        ("a", " b", "give one, or a list of them"),
        ("a", [300, 301], "give a list of texts or token ids"),
        ("a", [""], "the continuation '' adds no token to the prompt"),
        ("a", [()], "adds no token to the prompt"),
        ("", [" b"], "no token comes before the continuation"),
        ("a", [5.5], "a continuation is a text or a list of token ids, not 5.5"),
        (5.5, [" b"], "a prompt is a text or a list of token ids, not 5.5"),
        ("a", [(2**31,)], "token id 2147483648 is outside the vocabulary"),
        ("a", [" dog" * 2000], "n_ctx allows 1 to 1024"),
        ([("a", [" b"], 3)], None, "give \\(prompt, continuations\\)"),
        ([], None, "there is nothing to score"),
    ],
)
def test_what_cannot_be_scored_is_refused(llm, prompt, continuations, message):
    with pytest.raises(PromptError, match=message):
        llm.score(prompt, continuations)


def test_one_of_many_that_cannot_be_scored_is_its_own_error(llm):
    (good, empty), [bad] = llm.score([("Once upon", [" a time", ""]), (5.5, [" b"])], errors="return")
    assert good.error is None
    assert good.logprob < 0
    for score, message in (empty, "adds no token to the prompt"), (bad, "a prompt is a text"):
        assert math.isnan(score.logprob)
        assert (score.is_greedy, score.token_ids) == (False, ())
        assert message in score.error


def test_continuations_that_cannot_be_scored_are_told_in_one_warning(llm):
    with pytest.warns(PromptWarning, match=r"^2 of 3 continuations failed, first: continuations\[0\]: ") as warned:
        scores = llm.score("Once upon", ["", " a time", None])
    assert warned[0].filename == __file__
    assert [score.error is None for score in scores] == [False, True, False]
    with pytest.raises(PromptError, match=r"^continuations\[2\]: a continuation is a text or a list"):
        llm.score("Once upon", [" a", " b", None], errors="raise")
    with pytest.raises(PromptError, match=r"^all 2 continuations failed, first: "):
        llm.score(None, [" a", " b"])
    assert [score.error is None for score in llm.score(None, [" a", " b"], errors="return")] == [False, False]


def test_an_empty_cell_among_pairs_is_its_own_failure(llm):
    pairs = [("Once", [" a"]), None, float("nan"), ("Once", None), ("Once", []), ("Once", " a"), (None, [" a", " b"]),
             ("Once", [" a", None])]  # fmt: skip
    with pytest.warns(PromptWarning, match=r"^8 of 10 continuations failed, first: prompt\[1\]: the pair is None"):
        scores = llm.score(pairs)
    assert [[score.error is None for score in each] for each in scores] == [
        [True], [False], [False], [False], [False], [False], [False, False], [True, False],
    ]  # fmt: skip
    for wrong in (["a", "b"], [[5, 6], [7]], [{"a": 1}], "a", 5, {"a": 1}):
        with pytest.raises(PromptError, match=r"prompt (holds|is) "):
            llm.score(wrong, errors="return")


def test_a_child_process_scores_the_same():
    with LLM("tiny", strategy="sequential") as here, LLM("tiny", strategy="sequential", isolate=True) as there:
        asked = [(LONG, ANSWERS), (questions()[0], ANSWERS)]
        assert there.score(asked) == here.score(asked)


def test_the_engine_refuses_what_nothing_comes_before():
    with Engine(EngineConfig("tiny", n_slots=1)) as engine, pytest.raises(PromptError, match="score_from is 0"):
        engine.add(Request("r", (300, 301), score_from=0))


def test_adapters_change_what_is_scored(tmp_path):
    files = {"a": write_lora(tmp_path / "a.gguf", seed=1, size=0.6)}
    prompt, text = "Once upon a time", " there was a dog"
    with LLM("tiny", strategy="sequential", adapters=files) as llm:
        [plain], [other] = llm.score(prompt, [text]), llm.score(prompt, [text], adapters="a")
        [out] = llm.generate([prompt + text], SamplingParams(max_tokens=1, prompt_logprobs=0), adapters=["a"])
        with pytest.raises(AdapterError, match="there is no adapter 'b'"):
            llm.score(prompt, [text], adapters="b")
    told = [one[token].logprob for token, one in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True)]
    assert other.token_logprobs == pytest.approx(told[-other.num_tokens :], abs=MAX_GAP)
    assert abs(other.logprob - plain.logprob) > MAX_GAP


def test_asyncio_scores_the_same_and_others_go_on():
    async def main():
        async with AsyncLLM("tiny", strategy="sequential") as llm:
            talk = asyncio.create_task(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=40)))
            scores = await llm.score(LONG, ANSWERS)
            pairs = await llm.score([(LONG, ANSWERS[:2])])
            with pytest.raises(PromptError, match="adds no token to the prompt"):
                await llm.score("a", [""])
            return scores, pairs, (await talk)[0]

    scores, [pair], talk = asyncio.run(main())
    with LLM("tiny", strategy="sequential") as llm:
        for got, wanted in zip([*scores, *pair], llm.score(LONG, ANSWERS + ANSWERS[:2]), strict=True):
            assert got.token_ids == wanted.token_ids
            assert got.token_logprobs == pytest.approx(wanted.token_logprobs, abs=MAX_GAP)
    assert talk.error is None
