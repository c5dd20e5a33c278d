"""Engines in child processes: one behind a ChildClient, several behind a RouterClient."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from llamabatch.client.base import EngineMethod, Heartbeat, Outage
from llamabatch.client.loaded_resources import Call
from llamabatch.client.restart_policy import RESTARTS, RestartPolicy
from llamabatch.client.router import Router
from llamabatch.client.spawn import WORKER
from llamabatch.client.supervisor import Supervisor
from llamabatch.config import EngineConfig, ResolvedConfig
from llamabatch.engine.engine_state import EngineState
from llamabatch.engine.hooks import Sink
from llamabatch.engine.resolve_config import plan
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import LlamaBatchError
from llamabatch.gguf.resolve import resolve as resolve_path
from llamabatch.llama import devices, library
from llamabatch.llama.model import Model
from llamabatch.request.adapters import adapter_path, check_known
from llamabatch.request.request import Request
from llamabatch.utils.lifetime import Lifetime

_CLOSE_TIMEOUT_S = 20.0  # after this time, close() kills a child whose step is still running

Instance = tuple[EngineConfig, dict[str, str]]  # one child: its config and its environment variables


class _ProcessClient:
    """An EngineClient over child processes: starts them, waits until all are ready, and ends them together.

    Args:
        instances: returns the children of a resolved config.
        reach: returns the object that receives requests: the only supervisor, or a router over all supervisors.
        program: the module run by each child. It reads and writes the messages of wire.py.
        policy: the rules for replacing a dead child.
    """

    def __init__(
        self,
        config: EngineConfig,
        instances: Callable[[ResolvedConfig], list[Instance]],
        reach: Callable[[list[Supervisor], ResolvedConfig], Supervisor | Router],
        program: str,
        policy: RestartPolicy,
    ) -> None:
        self.model = Model(resolve_path(config.model), config, vocab_only=True)
        children = _Children(self.model)
        try:
            self.plan = plan(config, self.model.path, computes_here=False)
            for own_config, environment in instances(self.plan.config):
                children.add(Supervisor(own_config, environment, program, policy))
            for child in children.list:  # the children load at the same time
                child.wait_until_ready()
        except BaseException:
            children.kill()
            raise
        self._children = children.list
        self._adapters = _ChildAdapters(children.list, self.plan.config)
        self._engine = reach(children.list, self.plan.config)
        self._lifetime = Lifetime(self, children)

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        self._engine.submit(requests, sink, stream=stream)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._engine.abort(request_ids)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def states(self) -> list[EngineState]:
        return self._engine.states()

    def call(self, method: EngineMethod, *arguments: Any) -> Any:
        if method == "load_adapter":
            return self._adapters.load(*arguments)
        if method == "unload_adapter":
            return self._adapters.unload(*arguments)
        return self._engine.call(method, *arguments)

    @property
    def adapters(self) -> list[str]:
        return self._adapters.names

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that run now."""
        return [child.pid for child in self._children if child.pid is not None]

    @property
    def heartbeats(self) -> list[Heartbeat]:
        """The state of each child."""
        return [child.heartbeat for child in self._children]

    @property
    def outage(self) -> Outage | None:
        return self._engine.outage

    def close(self) -> None:
        self._lifetime.end()


class ChildClient(_ProcessClient):
    """An engine in a child process. If llama.cpp crashes, this process survives, and another child takes over.

    Args:
        program: the module run by the child. It reads and writes the messages of wire.py.
        policy: the rules for replacing a dead child.

    Raises:
        The errors of Engine; EngineError if the child died while it started.
    """

    def __init__(self, config: EngineConfig, program: str = WORKER, policy: RestartPolicy = RESTARTS) -> None:
        super().__init__(
            config, lambda resolved: [(resolved.requested(), {})], lambda children, _: children[0], program, policy
        )


class RouterClient(_ProcessClient):
    """Several engines, each in a child process with its share of the cores or its own GPU. The least loaded engine gets
    the next request.

    Args:
        policy: the rules for replacing a dead child.

    Raises:
        The errors of Engine; MemoryPlanError if the engines together would not fit.
    """

    def __init__(self, config: EngineConfig, policy: RestartPolicy = RESTARTS) -> None:
        super().__init__(config, _instances, _router, WORKER, policy)


def _instances(config: ResolvedConfig) -> list[Instance]:
    one = replace(config.requested(), strategy=config.instance_strategy, instances=1)
    count, names = config.instances, [device.name for device in devices.used(one, library.load())]
    if len(names) < 2 or one.n_gpu_layers == 0:
        return [(one, {})] * count
    one = replace(one, split_mode="layer")
    return [(replace(one, devices=(names[number % len(names)],)), {}) for number in range(count)]


def _router(children: list[Supervisor], config: ResolvedConfig) -> Router:
    router = Router(children, config.cache_prefix)
    for child in children:
        child.failover = weakref.WeakMethod(router.take_over)
    return router


class _Children:
    """An Endable that ends the supervisors, their child processes, and the parent's vocabulary together."""

    def __init__(self, model: Model) -> None:
        self.list: list[Supervisor] = []
        self._model = model

    def add(self, child: Supervisor) -> None:
        """Starts a child that ends together with the other children."""
        self.list.append(child)  # appended before start(), so that the child also ends after an interrupt
        child.start()

    def drop(self) -> None:
        if self.list:
            self.list[0].at_end = self._model.close  # close() waits for a lock, so it runs on the supervisor's thread
        for child in self.list:
            child.drop()

    def end(self) -> None:
        """Ends children after their running steps. An interrupt kills them instead."""
        try:
            for child in self.list:
                child.ask_to_end()
            deadline = time.monotonic() + _CLOSE_TIMEOUT_S
            for child in self.list:
                child.wait(deadline)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kills children at once, also while they load."""
        for child in self.list:
            child.drop()
        for child in self.list:
            child.end()
        self._model.close()

    @property
    def ended(self) -> bool:
        return all(child.ended for child in self.list)


class _ChildAdapters:
    """The adapters of engines in child processes. All children have the same adapters. If one child refuses a call, the
    other children undo the call.
    """

    def __init__(self, children: list[Supervisor], config: EngineConfig) -> None:
        self._children = children
        self._paths = dict(config.adapters)
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        return sorted(self._paths)

    def load(self, name: str, path: str | os.PathLike[str]) -> None:
        """Loads an adapter in all children, as Engine.load_adapter does."""
        absolute = adapter_path(name, path)
        with self._lock:
            self._call_all(("load_adapter", name, absolute), undo=("unload_adapter", name))
            self._paths[name] = absolute

    def unload(self, name: str) -> None:
        """Unloads an adapter in all children, as Engine.unload_adapter does."""
        with self._lock:
            check_known(((name, 1.0),), self._paths)
            path = self._paths.pop(name)  # from here on no request can ask for this adapter
            try:
                self._call_all(("unload_adapter", name), undo=("load_adapter", name, path))
            except LlamaBatchError:
                self._paths[name] = path
                raise

    def _call_all(self, call: Call, undo: Call) -> None:
        done: list[Supervisor] = []
        try:
            for child in self._children:
                if child.alive or len(self._children) == 1:  # the call raises if the only child is dead
                    child.call(*call)
                    done.append(child)
        except LlamaBatchError:
            for child in done:
                with contextlib.suppress(LlamaBatchError):
                    child.call(*undo)
            raise
