"""The engine behind a FrontClient in tests: it accepts requests, and ends those that a test names."""

from types import SimpleNamespace

from llamabatch.client.base import failure
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import EngineClosedError
from tests.unit.configs import resolved


class Behind:
    model, pids = None, ()
    takes = 1_000_000  # requests that it accepts before it is closed

    def __init__(self, **options):
        self.plan = SimpleNamespace(config=resolved("tiny", **options))
        self.requests, self.sinks = [], []  # all, in the order in which they came
        self.in_flight = {}  # id -> request and sink

    def submit(self, requests, sink, *, stream=False):
        before, self.takes = self.takes, max(0, self.takes - len(requests))
        if before < len(requests):
            raise EngineClosedError("closed")
        self.requests += requests
        self.sinks.append(sink)
        self.in_flight |= {request.request_id: (request, sink) for request in requests}

    def end(self, *ids):
        for request_id in ids:
            request, sink = self.in_flight.pop(request_id)
            sink([failure(request, "ended")])

    def stats(self):
        return EngineStats(running=len(self.in_flight), waiting=1, submitted=77, errors=5, decode_rows=3)
