"""A child program like llamabatch.client.worker. A prompt that begins with POISON kills it."""

import signal
import sys

from llamabatch.client import worker
from llamabatch.llama.model_runner import ModelRunner

POISON = (7, 11, 13)
BUG = (17, 19, 23)  # for prompts that begin so, the engine fails but the process lives
_compute = ModelRunner.run


def run(self, batch):
    for span in batch.spans:
        if tuple(span.sequence.request.prompt_token_ids[: len(POISON)]) == POISON:
            signal.raise_signal(signal.SIGSEGV)  # to this thread, so that it stops computing
        if tuple(span.sequence.request.prompt_token_ids[: len(BUG)]) == BUG:
            raise RuntimeError("a bug of ours")
    return _compute(self, batch)


if __name__ == "__main__":
    ModelRunner.run = run
    worker.main(int(sys.argv[1]))
