"""With RLIMIT_AS below a model's need, the load is refused with the sum. Just above the need, the model works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HOLDS = "below what a model needs RLIMIT_AS has it refused before the load, with the sum, and never kills the process"
TOTAL = 10
QUICK = 3
_TIMEOUT_S = 120.0

# Each limit is the address space of the process, plus this share of the plan's address space. Shares above 1 must work.
SHARES = (0.5, 0.99, 1.02, 0.05, 0.15, 0.3, 0.7, 0.9, 1.2, 2.0)

_CHILD = """
import resource, sys
import psutil
import llamabatch
from llamabatch import LLM, EngineConfig, SamplingParams
from llamabatch.planning.capacity import resolve
from llamabatch.errors import MemoryPlanError
from llamabatch.planning.machine import Machine
from llamabatch.planning.memory import MIB
from llamabatch.planning.model_facts import ModelFacts
from llamabatch.gguf.resolve import resolve as find

share, before = float(sys.argv[1]), sys.argv[2] == "before"
options = {"n_slots": 4, "n_ctx": 1024, "strategy": "batched", "kv": "split", "flash_attn": "on", "profile": False}
options["cache_ram"] = 0  # nothing fills it here
config = EngineConfig("tiny", **options)
plan = resolve(config, ModelFacts.read(find("tiny")), Machine.here())
if not before:
    from llamabatch.llama import library
    library.load()
limit = psutil.Process().memory_info().vms + int(plan.address_space * share)
if before:
    limit += 0 if share < 1 else 96 * MIB  # llama.cpp's libraries
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
loaded = []
from llamabatch.llama import model
load = model.Model.__init__
def noted(self, *args, **kwargs):
    loaded.append(args)
    load(self, *args, **kwargs)
model.Model.__init__ = noted
try:
    with LLM("tiny", **options) as llm:
        outputs = llm.generate(["Once upon a time"] * 4, SamplingParams(max_tokens=8))
        print("ran", len(outputs), sum(output.finish_reason == "error" for output in outputs))
except MemoryPlanError as error:
    print("refused", len(loaded), error)
"""


def case(number: int, folder: Path) -> None:
    """Runs one share. Even numbers set the limit before llama.cpp's library is loaded, odd numbers after."""
    share = SHARES[number]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _CHILD, str(share), "after" if number % 2 else "before"]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, (share, done.returncode, done.stdout, done.stderr[-2000:])
    if share > 1:
        assert done.stdout.strip() == "ran 4 0", (share, done.stdout)
        return
    assert done.stdout.startswith("refused 0 "), (share, done.stdout)
    for part in ("weights", "KV cache", "buffers", "=", "RLIMIT_AS leaves"):
        assert part in done.stdout, (share, done.stdout)
