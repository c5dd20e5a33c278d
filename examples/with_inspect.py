"""A task of Inspect AI on a model in this process. Needs llamabatch[inspect]."""

import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid"}

samples = [Sample(input=f"What is the capital of {land}?", target=city) for land, city in CAPITALS.items()]
with tempfile.TemporaryDirectory() as folder:
    [log] = eval(
        Task(dataset=samples, scorer=includes()),
        model="llamabatch/tiny",
        model_args={"n_slots": 8},
        temperature=0.0,
        max_tokens=8,
        display="none",
        log_dir=folder,
    )
    print(log.status, log.results.scores[0].metrics["accuracy"].value)
