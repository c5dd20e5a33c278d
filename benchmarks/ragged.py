"""Compares one pass over any tokens of any slots with several passes of equal lengths: `python -m benchmarks.ragged`.

The figures are milliseconds of CPU time of one thread, so that other programs on the machine matter little. All cases
take turns in several rounds; the least time counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llamabatch.config import EngineConfig
from llamabatch.gguf.resolve import resolve
from llamabatch.llama import library
from llamabatch.llama.model import Model
from llamabatch.planning.cpu import cpu_name

Spans = list[tuple[int, int, int]]  # slot, position of the first token, number of tokens; the last has logits
N_SLOTS, CELLS, TOKENS = 32, 512, 1024
GAPS: Spans = [(2 * i, 200 + i, 1) for i in range(16)]
ROWS: Spans = [(i, 200, 1) for i in range(16)]
CHUNK: Spans = [(20, 0, 64)]
PROMPTS: Spans = [(slot, 0, length) for slot, length in enumerate([60, 70, 81, 90, 99, 110, 120, 130])]
SHORT: Spans = [(slot, 0, 5 + slot) for slot in range(16)]
CASES: dict[str, list[Spans]] = {
    "16 rows, slots with gaps, a pass each": [[span] for span in GAPS],
    "16 rows, slots with gaps, one pass": [GAPS],
    "16 rows, neighbouring slots, one pass": [ROWS],
    "16 rows, then 64 tokens of a prompt": [ROWS, CHUNK],
    "16 rows and 64 tokens of a prompt, one pass": [ROWS + CHUNK],
    "16 prompts of 5 to 20 tokens, a pass each": [[span] for span in SHORT],
    "16 prompts of 5 to 20 tokens, one pass": [SHORT],
    "8 prompts of 60 to 130 tokens, a pass each": [[span] for span in PROMPTS],
    "8 prompts of 60 to 130 tokens, one pass": [PROMPTS],
    "4 prompts of 190 tokens": [[(slot, 0, 190) for slot in range(24, 28)]],
    "4 prompts of 189 to 192 tokens": [list(zip(range(24, 28), [0] * 4, [189, 190, 192, 189], strict=True))],
}


def measured(path: Path, rounds: int) -> dict[str, Any]:
    """Returns the report, with milliseconds by case."""
    lib = library.load()
    model = Model(path, EngineConfig(str(path)))
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = N_SLOTS * CELLS, TOKENS, TOKENS, N_SLOTS
    params.n_outputs_max, params.n_threads, params.n_threads_batch = N_SLOTS, 1, 1
    params.kv_unified, params.flash_attn_type = False, 1
    context = lib.llama_init_from_model(model.handle, params)
    memory, batch = lib.llama_get_memory(context), lib.llama_batch_init(TOKENS, 0, 1)

    def compute(spans: Spans) -> float:
        at = 0
        for slot, start, length in spans:
            for position in range(start, start + length):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = 100 + at * 7919 % 1000, position, 1
                batch.seq_id[at][0], batch.logits[at] = slot, position == start + length - 1
                at += 1
        batch.n_tokens = at
        began = time.process_time()
        if lib.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        lib.llama_get_logits(context)
        return time.process_time() - began

    def runs() -> Iterator[tuple[str, float]]:
        for name, calls in CASES.items():
            for slot, start, _ in (span for spans in calls for span in spans):
                lib.llama_memory_seq_rm(memory, slot, start, -1)
                held = lib.llama_memory_seq_pos_max(memory, slot) + 1
                if held < start:
                    compute([(slot, held, start - held)])
            yield name, sum(map(compute, calls))

    best: dict[str, float] = {}
    for _ in range(rounds + 1):  # the first one warms up
        best = {name: min(seconds, best.get(name, seconds)) for name, seconds in runs()}
    is_ragged = library.takes_ragged(context)
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    model.close()
    report = {name: round(1000 * seconds, 1) for name, seconds in best.items()}
    return {"cpu": cpu_name(), "model": path.name, "is_ragged": is_ragged, "cpu_ms": report}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ragged", description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="a path, or a name; `llamabatch synth qwen2.5-0.5b` makes one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to write the report")
    options = parser.parse_args()
    report = json.dumps(measured(resolve(options.model), options.rounds), indent=1)
    if options.json:
        options.json.write_text(report + "\n", encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main()
