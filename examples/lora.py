"""Two adapters and the plain model, all in one list: each request names its adapters.

The adapters here have random values; llama.cpp's convert_lora_to_gguf.py makes real ones.
"""

import tempfile
from pathlib import Path

import gguf
import numpy as np

from llamabatch import LLM, SamplingParams


def random_lora(path: Path, seed: int) -> Path:
    """Writes a LoRA for the bundled model's value projections: 6 layers of 192 inputs and 64 outputs, rank 4."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for layer in range(6):
        for part, shape in (("a", (4, 192)), ("b", (64, 4))):
            writer.add_tensor(f"blk.{layer}.attn_v.weight.lora_{part}", rng.normal(0, 0.3, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


with tempfile.TemporaryDirectory() as folder:
    files = {name: random_lora(Path(folder, f"{name}.gguf"), seed) for seed, name in enumerate(("red", "blue"))}
    with LLM("tiny", adapters=files) as llm:
        chosen = [None, {"red": 1.0}, {"blue": 1.0}, {"red": 0.5, "blue": 0.5}]
        question = [{"role": "user", "content": "Tell me a story about a dog."}]
        outputs = llm.chat([question] * len(chosen), SamplingParams(temperature=0, max_tokens=20), adapters=chosen)
        for adapters, output in zip(chosen, outputs, strict=True):
            print(adapters, "->", output.text)
