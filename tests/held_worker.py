"""A child program as llamabatch.worker, but that it stands still after a few steps for as long as a file is there: so
that it can be killed in the middle of its work, however fast it is."""

import os
import sys
import time
from pathlib import Path

from llamabatch import worker
from llamabatch.llama.runner import Runner

VARIABLE = "HELD_WORKER_FILE"
STEPS = 60
_compute = Runner.run
_held_steps = 0


def run(self, batch):
    global _held_steps
    file = Path(os.environ[VARIABLE])
    _held_steps = _held_steps + 1 if file.exists() else 0
    while _held_steps > STEPS and file.exists():
        time.sleep(0.01)
    return _compute(self, batch)


if __name__ == "__main__":
    Runner.run = run
    worker.main(int(sys.argv[1]))
