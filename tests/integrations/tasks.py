"""Local tasks of lm_eval: YAML files and their questions, without the hub."""

import json
from pathlib import Path

WHO = ("girl", "boy", "dog", "cat", "bird", "fish")
ENDINGS = (" Tom", " Lily and her friend Ben", " the big red ball")


def questions(n: int = 12) -> list[dict]:
    """Returns questions, each with three endings of different numbers of tokens."""
    return [
        {"q": f"Once upon a time there was a {WHO[i % 6]} with a {WHO[(i * 5 + 1) % 6]} named", "gold": i % 3}
        for i in range(n)
    ]


def write_tasks(folder: Path, n: int = 12) -> Path:
    """Writes the tasks local_choice, local_text and local_roll, with n questions, for --include-path. Returns
    `folder`."""
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(each | {"endings": ENDINGS}) + "\n" for each in questions(n)))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(data)}, "test_split": "train"}
    tasks = {
        "local_choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{q}}",
            "doc_to_choice": "{{endings}}",
            "doc_to_target": "gold",
            "target_delimiter": "",
            "metric_list": [_metric("acc", "mean"), _metric("acc_norm", "mean")],
        },
        "local_text": {
            "output_type": "generate_until",
            "doc_to_text": "{{q}}",
            "doc_to_target": "{{endings[0]}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
            "metric_list": [_metric("exact_match", "mean")],
        },
        "local_roll": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{q}}",
            "metric_list": [_metric("word_perplexity", "weighted_perplexity", better=False)],
        },
    }
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **task}))  # JSON is YAML
    return folder


def _metric(name: str, aggregation: str, *, better: bool = True) -> dict:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": better}
