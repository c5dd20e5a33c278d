"""A worker that stands still after a few steps while a file is there, so that a test can kill it there."""

import os
import sys
import time
from pathlib import Path

from llamabatch.client import worker
from llamabatch.llama.model_runner import ModelRunner

VARIABLE = "HELD_WORKER_FILE"
STEPS = 60
_compute = ModelRunner.run
_held_steps = 0


def run(self, batch):
    global _held_steps
    file = Path(os.environ[VARIABLE])
    _held_steps = _held_steps + 1 if file.exists() else 0
    while _held_steps > STEPS and file.exists():
        time.sleep(0.01)
    return _compute(self, batch)


if __name__ == "__main__":
    ModelRunner.run = run
    worker.main(int(sys.argv[1]))
