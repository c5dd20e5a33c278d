"""A child program like llamabatch.client.worker, with a fake engine."""

import sys

from llamabatch.client import worker
from llamabatch.testing.answers import Script
from llamabatch.testing.fake_client import FakeClient


def fake(config, hooks):
    return FakeClient(config, Script("From the child.", None, None, None, None))


if __name__ == "__main__":
    worker.connect_here = fake
    worker.main(int(sys.argv[1]))
