"""Parameters with a loaded model: the model file's own defaults, and the caller's functions."""

from llamabatch import LLM, SamplingParams
from tests.model.architectures import write


def test_functions_are_refused_where_a_child_does_the_work():
    params = SamplingParams(max_tokens=2, logits_processors=[lambda _, logits: logits])
    with LLM("tiny", isolate=True) as child:
        refused, fine = child.generate(["Hello", "Hello"], [params, SamplingParams(max_tokens=2)], errors="return")
    assert "logits_processors" in refused.error
    assert fine.error is None


def test_a_model_advises_what_the_request_leaves_open(tmp_path):
    says = {"general__sampling__temp": 0.0, "general__sampling__penalty_repeat": 50.0}
    paths = [write("llama", tmp_path / "plain.gguf"), write("llama", tmp_path / "advises.gguf", **says)]
    texts = []
    for path in paths:
        with LLM(path, n_ctx=256) as llm:
            own = {"max_tokens": 12, "ignore_eos": True}
            greedy = SamplingParams(**own, temperature=0, repetition_penalty=1.0)
            silent = [SamplingParams(**own, seed=seed) for seed in range(4)]
            explicit, *left_open = [out.token_ids for out in llm.generate([[5, 6, 7]] * 5, [greedy, *silent])]
            texts.append((explicit, left_open))
    (greedy, drawn), (greedy_too, advised) = texts
    assert greedy == greedy_too
    assert len(set(drawn)) == 4  # temperature 0.8, because the file names none
    assert len(set(advised)) == 1  # the file's temperature is 0, so seeds do not matter
    assert advised[0] != greedy or len(set(greedy)) == len(greedy)
    assert len(set(advised[0])) == 12, "the file's penalty holds: no token comes twice"
