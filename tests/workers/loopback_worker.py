"""A child program like llamabatch.client.worker that inherits no socket, as on Windows. The model "fake" gets a fake
engine."""

import sys
from pathlib import Path

from llamabatch.client import worker
from llamabatch.utils import system
from tests.workers.fake_worker import fake

real = worker.connect_here

if __name__ == "__main__":
    system.INHERITS_SOCKETS = False
    worker.connect_here = lambda config, hooks: (fake if Path(config.model).name == "fake" else real)(config, hooks)
    worker.main(int(sys.argv[1]))
