"""A worker whose steps take a while on any CPU, so that a test finds its requests running."""

import sys
import time

from llamabatch.client import worker
from llamabatch.llama.model_runner import ModelRunner

STEP_S = 0.002
_compute = ModelRunner.run


def run(self, batch):
    time.sleep(STEP_S)
    return _compute(self, batch)


if __name__ == "__main__":
    ModelRunner.run = run
    worker.main(int(sys.argv[1]))
