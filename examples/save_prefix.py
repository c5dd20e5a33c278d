"""A long beginning is computed once and its KV cells are saved; later runs load the cells instead of computing them."""

import tempfile
from pathlib import Path

from llamabatch import LLM, SamplingParams

text = "Ada keeps three cats. Ben keeps one dog. Carla keeps five fish. " * 8
params = SamplingParams(temperature=0, max_tokens=8)
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "animals.kv"
    with LLM("tiny", instances=1) as llm:
        print(f"{llm.save_prefix(text, file)} tokens saved, {file.stat().st_size / 1000:.0f} kB")

    with LLM("tiny", instances=1) as llm:  # another process, say
        llm.load_prefix(file)
        llm.generate(f"{text}\nHow many animals does Ada keep?", params)
        stats = llm.stats()
        print(f"{stats.prefix_tokens} tokens came from the file, {stats.prefill_tokens} were computed")
