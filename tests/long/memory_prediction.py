"""Compares the memory that the plan predicts with the peak of a process that fills its slots."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from llamabatch.tools.synth import find_shape, write_model

HOLDS = "the peak of a process that fills all slots lies within 10 % of the one that was predicted from the header"
SLOTS = (1, 8, 32)
MODELS = (
    ("tiny", ""),
    *((s, q) for s in ("qwen2.5-0.5b", "llama-3.2-1b") for q in ("Q8_0", "Q4_K_M")),
    *((s, "Q8_0") for s in ("qwen3.5-0.8b", "granite-4.0-h-350m", "gemma-3-270m")),
)
TOTAL = len(MODELS) * len(SLOTS)
QUICK = len(SLOTS)  # the bundled model
N_CTX = 512
MOST_OFF = 0.10
_TIMEOUT_S = 900.0

# Each request fills its context, so that the largest pass is computed and all cells are used.
_CHILD = """
import json, random, sys
from pathlib import Path
from llamabatch import LLM, SamplingParams
from llamabatch.planning.memory import PROCESS_BYTES
model, options = sys.argv[1], json.loads(sys.argv[2])
with LLM(model, profile=False, cache_ram=0, **options) as llm:
    plan = llm.plan
    n_ctx, n_slots = plan.config.n_ctx, plan.config.n_slots
    rng = random.Random(0)
    prompts = [[rng.randrange(10, 1500) for _ in range(n_ctx - 8)] for _ in range(n_slots)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    assert all(len(output.token_ids) == 8 for output in outputs)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    measured = int(status["VmHWM"].split()[0]) * 1024
    predicted = plan.peak_bytes + PROCESS_BYTES
    print(json.dumps({"measured": measured, "predicted": predicted, "plan": plan.memory.document()}))
"""


def measure(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Runs a fresh process. Returns its measured and predicted bytes, and their ratio."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _CHILD, model, json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["ratio"] = found["predicted"] / found["measured"]
    return found


def figure(number: int, folder: Path) -> dict[str, Any]:
    """Measures the model and number of slots of a case."""
    (shape, quant), n_slots = MODELS[number // len(SLOTS)], SLOTS[number % len(SLOTS)]
    if not quant:
        return {"model": shape, "n_slots": n_slots, **measure(shape, {"n_slots": n_slots})}
    path = folder / f"{shape}-{quant}.gguf"
    try:
        write_model(find_shape(shape), path, quant)
        # without saved states: the plan counts their whole budget, but prompts that share nothing use little of it
        found = measure(str(path), {"n_slots": n_slots, "n_ctx": N_CTX, "cache_ram": 0})
    finally:
        path.unlink(missing_ok=True)
    return {"model": f"{shape} {quant}", "n_slots": n_slots, "n_ctx": N_CTX, **found}


def case(number: int, folder: Path) -> None:
    found = figure(number, folder)
    assert abs(found["ratio"] - 1) <= MOST_OFF, found
