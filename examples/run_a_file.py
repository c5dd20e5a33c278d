"""A file of prompts in, a file of results out, as `llamabatch run` does. A second run computes only missing rows."""

import json
import tempfile
from pathlib import Path

from llamabatch import SamplingParams
from llamabatch.jobs import ReadOptions, Settings, run

with tempfile.TemporaryDirectory() as folder:
    prompts, results = Path(folder, "prompts.csv"), Path(folder, "results.jsonl")
    prompts.write_text("country\nFrance\nJapan\nCuba\n")

    reading = ReadOptions(
        SamplingParams(temperature=0, max_tokens=16),
        template="What is the capital of {country}?",
        task="chat",
        id_column="country",
    )
    settings = Settings(str(prompts), str(results), reading=reading)
    summary = run(settings)
    for line in results.read_text().splitlines():
        row = json.loads(line)
        print(row["id"], row["text"])
    print(summary.counts.ok, "rows", round(summary.per_second(summary.counts.generated_tokens)), "tokens/s")

    again = run(settings)  # loads no model, since every row is done
    print(again.counts.done_before, "rows were done before")
