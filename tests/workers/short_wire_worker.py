"""A child program like llamabatch.client.worker, with a low limit for the length of messages."""

import sys

from llamabatch.client import wire, worker

if __name__ == "__main__":
    wire.MAX_MESSAGE = 12_000
    worker.main(int(sys.argv[1]))
