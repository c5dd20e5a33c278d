"""A child program as llamabatch.client.worker, whose messages must be short."""

import sys

from llamabatch.client import wire, worker

if __name__ == "__main__":
    wire.MAX_MESSAGE = 12_000
    worker.main(int(sys.argv[1]))
