"""Several engines in this process, each on its own thread. All share one copy of the weights."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from llamabatch.client.base import EngineMethod
from llamabatch.client.router import Router
from llamabatch.client.thread_client import LocalClient, ThreadClient
from llamabatch.engine.engine import Engine, unload_adapter
from llamabatch.engine.hooks import EngineHooks
from llamabatch.errors import EngineClosedError


class MultiEngineClient(LocalClient, Router):
    """A client of several engines. The number of engines comes from the plan of the engine `first`.

    With a small model, the threads of one engine mostly wait for each other; several engines with one thread each do
    not wait.

    Args:
        first: an engine that has loaded the weights.

    Raises:
        EngineError: memory is too small for another context.
    """

    def __init__(self, first: ThreadClient, hooks: EngineHooks | None = None) -> None:
        self.plan = first.plan
        self.model = first.model
        self._clients = [first]
        self._pausing = threading.Lock()
        try:
            for _ in range(self.plan.config.instances - 1):
                self._clients.append(
                    ThreadClient(self.plan.config.requested(), model=self.model, alone=False, hooks=hooks)
                )
        except BaseException:
            self.close()
            raise
        super().__init__(self._clients, self.plan.config.cache_prefix)

    def call(self, method: EngineMethod, *arguments: Any) -> Any:
        if method == "load_adapter":
            return self._while_paused(lambda engines: engines[0].load_adapter(*arguments))
        if method == "unload_adapter":
            return self._while_paused(lambda engines: unload_adapter(engines, *arguments))
        return super().call(method, *arguments)

    def _while_paused(self, action: Callable[[list[Engine]], None]) -> None:
        """Runs an action on the thread of one engine while the threads of the other engines pause. So the action may
        change the shared weights.

        Raises:
            EngineClosedError: one of the engines is gone.
        """
        arrived: queue.SimpleQueue[Engine | None] = queue.SimpleQueue()  # None: an engine is gone
        done = threading.Event()

        def act(first: Engine) -> None:
            engines = [first]
            try:
                while len(engines) < len(self._clients):
                    engine = arrived.get()
                    if engine is None:
                        raise EngineClosedError("one of the engines is gone")
                    engines.append(engine)
                action(engines)
            finally:
                done.set()

        def pause(engine: Engine) -> None:
            arrived.put(engine)
            done.wait()

        def on_answer(answer: Future[Any]) -> None:
            if isinstance(answer.exception(), EngineClosedError):  # this engine is gone
                arrived.put(None)
                done.set()

        answers: list[Future[Any]] = []
        with self._pausing:  # two calls at the same time would wait for each other's engines
            try:
                for client in self._clients:
                    answers.append(client.ask(pause if answers else act))
                    answers[-1].add_done_callback(on_answer)
            except BaseException:  # an engine is gone, or Ctrl-C: paused engines must not wait for others
                arrived.put(None)
                raise
            wait(answers)
        try:
            answers[0].result()
        finally:
            answers.clear()  # the traceback of an error refers to this frame, so the list would make a cycle

    def close(self) -> None:
        for client in self._clients:
            client.close()
