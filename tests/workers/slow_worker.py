"""A child program that never finishes loading."""

import sys
import time

from llamabatch.client import worker


def load(config, hooks):
    print("loading", file=sys.stderr, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    worker.connect_here = load
    worker.main(int(sys.argv[1]))
