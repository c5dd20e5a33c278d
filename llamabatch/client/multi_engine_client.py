"""Several engines in this process, each on a thread of its own, with the weights in memory once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from llamabatch.client.base import EngineMethod
from llamabatch.client.router import Router
from llamabatch.client.thread_client import InThisProcess, ThreadClient
from llamabatch.engine.engine import Engine, unload_adapter
from llamabatch.engine.hooks import EngineHooks
from llamabatch.errors import EngineClosedError


class ThreadsClient(InThisProcess, Router):
    """As many engines as the plan of the first says. In a small model the threads of one engine mostly wait for each
    other; engines of one thread each do not.

    Raises:
        EngineError: there is no memory for another context.
    """

    def __init__(self, first: ThreadClient, watch: EngineHooks | None = None) -> None:
        self.plan = first.plan
        self.model = first.model
        self._clients = [first]
        self._holding = threading.Lock()
        try:
            for _ in range(self.plan.config.instances - 1):
                self._clients.append(ThreadClient(self.plan.config.asked(), model=self.model, alone=False, watch=watch))
        except BaseException:
            self.close()
            raise
        super().__init__(self._clients, self.plan.config.cache_prefix)

    def call(self, method: EngineMethod, *arguments: Any) -> Any:
        if method == "load_adapter":
            return self._hold(lambda engines: engines[0].load_adapter(*arguments))
        if method == "unload_adapter":
            return self._hold(lambda engines: unload_adapter(engines, *arguments))
        return super().call(method, *arguments)

    def _hold(self, action: Callable[[list[Engine]], None]) -> None:
        """Has one engine's thread do something with the weights that all share, while the others stand still.

        Raises:
            EngineClosedError: one of the engines is gone.
        """
        barrier = threading.Barrier(len(self._clients))
        engines: list[Engine] = []

        def act(engine: Engine) -> None:
            engines.append(engine)
            barrier.wait()
            try:
                action(engines)
            finally:
                barrier.wait()

        def stand_still(engine: Engine) -> None:
            engines.append(engine)
            barrier.wait()
            barrier.wait()

        def give_up(done: Future[Any]) -> None:
            if isinstance(done.exception(), EngineClosedError):  # it never came to the barrier
                barrier.abort()

        with self._holding:  # two that hold the engines in different orders would wait for each other
            answers: list[Future[Any]] = []
            try:
                for client in self._clients:
                    answers.append(client.ask(stand_still if answers else act))
                    answers[-1].add_done_callback(give_up)
            except EngineClosedError:
                barrier.abort()
                raise
            wait(answers)
        for answer in answers:
            try:
                answer.result()
            except threading.BrokenBarrierError as error:
                raise EngineClosedError("one of the engines is gone") from error

    def close(self) -> None:
        for client in self._clients:
            client.close()
