"""Several engines in this process, each on a thread of its own, with the weights in memory once."""

from __future__ import annotations

from llamabatch.client import ThreadClient
from llamabatch.router import Router


class ThreadsClient(Router):
    """As many engines as the plan of the first says. In a small model the threads of one engine mostly wait for each
    other; engines of one thread each do not.

    Raises:
        EngineError: there is no memory for another context.
    """

    def __init__(self, first: ThreadClient) -> None:
        self.plan = first.plan
        self.model = first.model
        self._clients = [first]
        try:
            for _ in range(self.plan.config.number("instances") - 1):
                self._clients.append(ThreadClient(self.plan.config, model=self.model, alone=False))
        except BaseException:
            self.close()
            raise
        super().__init__(self._clients, self.plan.config.cache_prefix)

    def close(self) -> None:
        for client in self._clients:
            client.close()
