"""Columns of a dataset of Ray Data, written by a pool of actors. `pip install "llamabatch[ray]"`"""

import sys

import ray

from llamabatch.integrations.ray import generate

model = sys.argv[1] if len(sys.argv) > 1 else "tiny"
ray.init(num_cpus=2, object_store_memory=200_000_000, include_dashboard=False)  # on a cluster: ray.init()
animals = ("fox", "girl", "king", "bird", "dog", "cat", "fish", "bear")
dataset = ray.data.from_items([{"id": n, "who": who} for n, who in enumerate(animals)])
dataset = generate(
    dataset,
    model,
    {"max_tokens": 16},
    prompt="Once upon a time there was a {{ who }}",
    id="id",
    chat=False,
    n_slots=4,
    batch_size=4,
)
for row in sorted(dataset.take_all(), key=lambda row: row["id"]):
    print(row["who"], row["generated_text"], sep=": ")
ray.shutdown()
