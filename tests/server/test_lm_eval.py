"""lm_eval's local-completions gives the same sums as LLM.score, on small local tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamabatch import LLM

TASK = Path(__file__).with_name("task")
ROWS = [json.loads(line) for line in (TASK / "foxes.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def samples(url, tmp_path_factory):
    """The samples of each task, as lm_eval writes them."""
    folder = tmp_path_factory.mktemp("lm-eval")
    for each in TASK.iterdir():
        text = each.read_text(encoding="utf-8").replace("test: foxes.jsonl", f"test: {TASK / 'foxes.jsonl'}")
        (folder / each.name).write_text(text, encoding="utf-8")
    model = f"model=tiny,base_url={url}/v1/completions,num_concurrent=4,max_retries=1,max_length=2048"
    program = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", model]
    program += ["--tasks", "foxes,foxes_text,foxes_rolling", "--include_path", str(folder)]
    program += ["--output_path", str(folder / "out"), "--log_samples", "--batch_size", "2"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "HF_DATASETS_OFFLINE": "1"}
    ended = subprocess.run(program, cwd=folder, env=os.environ | offline, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = {}
    for path in (folder / "out").rglob("samples_*.jsonl"):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found["_".join(path.stem.split("_")[1:-1])] = sorted(lines, key=lambda each: each["doc_id"])
    return found


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", n_slots=8) as made:
        yield made


def test_the_sums_of_choices_are_those_of_score(samples, llm):
    for sample in samples["foxes"]:
        row = ROWS[sample["doc_id"]]
        scores = llm.score(row["context"], row["choices"])
        for (given, _), score in zip(sample["filtered_resps"], scores, strict=True):
            assert float(given) == pytest.approx(score.logprob, abs=1e-3)


def test_the_sums_of_whole_texts_are_those_of_score(samples, llm):
    [eos] = llm.tokenize("<|im_end|>", add_special=False, parse_special=True)
    for sample in samples["foxes_rolling"]:
        ids = llm.tokenize(ROWS[sample["doc_id"]]["context"], add_special=False)
        [score] = llm.score([eos], [ids])
        assert float(sample["filtered_resps"][0]) == pytest.approx(score.logprob, abs=1e-3)


def test_texts_are_those_of_generate(samples, llm):
    for sample in samples["foxes_text"]:
        [output] = llm.generate(ROWS[sample["doc_id"]]["context"], {"temperature": 0, "max_tokens": 12, "stop": ["."]})
        assert sample["filtered_resps"] == [output.text]
