"""A child program as llamabatch.client.worker that inherits no socket, as on Windows; of a model "fake" over a fake."""

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
