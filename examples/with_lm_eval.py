"""A task of lm_eval on a model in this process: all questions in one call. Needs llamabatch[lm-eval]."""

import json
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

from llamabatch.integrations.lm_eval import LlamaBatchLM

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid"}
TASK = {
    "task": "capitals",
    "dataset_path": "json",
    "test_split": "train",
    "output_type": "multiple_choice",
    "doc_to_text": "The capital of {{country}} is",
    "doc_to_choice": "{{cities}}",
    "doc_to_target": "{{cities.index(capital)}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    rows = [{"country": land, "cities": list(CAPITALS.values()), "capital": city} for land, city in CAPITALS.items()]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {**TASK, "dataset_kwargs": {"data_files": str(folder / "rows.jsonl")}}
    (folder / "capitals.yaml").write_text(json.dumps(task))  # JSON is YAML
    lm = LlamaBatchLM("tiny", n_slots=8)
    found = lm_eval.simple_evaluate(lm, tasks=["capitals"], task_manager=TaskManager(include_path=name))
    print("accuracy:", found["results"]["capitals"]["acc,none"])
    lm.close()
