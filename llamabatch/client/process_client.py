"""Engines in child processes: one behind a ChildClient, several behind a RouterClient."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace

from llamabatch.client.base import Heartbeat
from llamabatch.client.restart_policy import RESTARTS, RestartPolicy
from llamabatch.client.router import Router
from llamabatch.client.spawn import WORKER
from llamabatch.client.supervisor import Supervisor
from llamabatch.config import EngineConfig
from llamabatch.engine.hooks import Sink
from llamabatch.engine.resolve_config import plan
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import LlamaBatchError
from llamabatch.gguf.resolve import resolve as resolve_path
from llamabatch.llama.library import gpu_count
from llamabatch.llama.model import Model
from llamabatch.planning.capacity import Plan
from llamabatch.request.adapters import adapter_path, check_known
from llamabatch.request.request import Request
from llamabatch.utils.lifetime import Lifetime

# ----------------------------------------------------------------------------------------------------
# Adapters of engines in child processes: each loads its own.


class ChildAdapters:
    """All children hold the same. What one of them refuses is taken back in the others."""

    def __init__(self, children: Sequence[Supervisor], config: EngineConfig) -> None:
        self._children = children
        self._paths = dict(config.adapters)
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        return sorted(self._paths)

    def load(self, name: str, path: str | os.PathLike[str]) -> None:
        """As EngineClient.load_adapter."""
        absolute = adapter_path(name, path)
        with self._lock:
            self._everywhere(("load_adapter", name, absolute), ("unload_adapter", name))
            self._paths[name] = absolute

    def unload(self, name: str) -> None:
        """As EngineClient.unload_adapter."""
        with self._lock:
            check_known(((name, 1.0),), self._paths)
            path = self._paths.pop(name)  # from here on no request can ask for it
            try:
                self._everywhere(("unload_adapter", name), ("load_adapter", name, path))
            except LlamaBatchError:
                self._paths[name] = path
                raise

    def _everywhere(self, command: tuple[str, ...], undo: tuple[str, ...]) -> None:
        done: list[Supervisor] = []
        try:
            for child in self._children:
                if child.alive or len(self._children) == 1:  # the only one tells that it is gone
                    _carry_out(child, command)
                    done.append(child)
        except LlamaBatchError:
            for child in done:
                with contextlib.suppress(LlamaBatchError):
                    _carry_out(child, undo)
            raise


def _carry_out(child: Supervisor, command: tuple[str, ...]) -> None:
    kind, *arguments = command
    getattr(child, kind)(*arguments)


_CLOSE_TIMEOUT_S = 20.0  # a step that is under way may take that long on a slow machine; then it is killed


class Children:
    """Supervisors, each with its child process, and the parent's vocabulary, ended together: an Endable."""

    def __init__(self, model: Model, policy: RestartPolicy) -> None:
        self.list: list[Supervisor] = []
        self._model = model
        self._policy = policy

    def start(self, config: EngineConfig, environment: dict[str, str], program: str = WORKER) -> None:
        """One more; the arguments are those of Supervisor."""
        self.list.append(Supervisor(config, environment, program, self._policy))
        self.list[-1].start()  # in the list, so that an interrupt does not leave it behind

    def drop(self) -> None:
        for child in self.list:
            child.drop()

    def end(self) -> None:
        """Waits for steps that are under way; interrupted, it kills instead."""
        try:
            for child in self.list:
                child.ask_to_end()
            deadline = time.monotonic() + _CLOSE_TIMEOUT_S
            for child in self.list:
                child.wait(deadline)
        finally:
            self.kill()

    def kill(self) -> None:
        """Does not wait, for children that are still loading."""
        for child in self.list:
            child.drop()
        for child in self.list:
            child.end()
        self._model.close()

    @property
    def ended(self) -> bool:
        return all(child.ended for child in self.list)


class _InChildren:
    """What both kinds have in common. `_take` comes when all children are ready."""

    _children: list[Supervisor]
    plan: Plan

    def _take(self, children: Children) -> None:
        self._children = children.list
        self._adapters = ChildAdapters(children.list, self.plan.config)
        self._lifetime = Lifetime(self, children)

    @property
    def adapters(self) -> list[str]:
        return self._adapters.names

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        self._adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        self._adapters.unload(name)

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that are there now."""
        return [child.pid for child in self._children if child.pid is not None]

    @property
    def heartbeats(self) -> list[Heartbeat]:
        """How each child is."""
        return [child.heartbeat for child in self._children]

    def close(self) -> None:
        self._lifetime.end()


class ChildClient(_InChildren):
    """An engine in a child process: what kills llama.cpp does not kill this process, and another takes its place.

    Args:
        program: the module that the child runs; it speaks the wire.
        policy: when a child that died is replaced.

    Raises:
        What Engine raises; EngineError if the child died while it started.
    """

    def __init__(self, config: EngineConfig, program: str = WORKER, policy: RestartPolicy = RESTARTS) -> None:
        self.model = Model(resolve_path(config.model), config, vocab_only=True)
        children = Children(self.model, policy)
        try:
            self.plan = plan(config, self.model.path)
            children.start(self.plan.config, {}, program)
            [self._child] = children.list
            self._child.wait_until_ready()
        except BaseException:
            children.kill()
            raise
        self._take(children)

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        self._child.submit(requests, sink, stream=stream)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._child.abort(request_ids)

    def stats(self) -> EngineStats:
        return self._child.stats()

    def save_prefix(self, token_ids: list[int], path: str) -> bool:
        return self._child.save_prefix(token_ids, path)

    def load_prefix(self, path: str) -> int:
        return self._child.load_prefix(path)

    def unload_prefix(self, path: str) -> None:
        self._child.unload_prefix(path)


class RouterClient(_InChildren, Router):
    """Several engines, each in a child with its share of the cores or a GPU of its own; the least loaded gets the next.

    Args:
        policy: when a child that died is replaced.

    Raises:
        What Engine raises; MemoryPlanError if the engines together would not fit.
    """

    def __init__(self, config: EngineConfig, policy: RestartPolicy = RESTARTS) -> None:
        self.model = Model(resolve_path(config.model), config, vocab_only=True)
        children = Children(self.model, policy)
        try:
            self.plan = plan(config, self.model.path)
            one = replace(self.plan.config, strategy=config.instance_strategy, instances=1)
            gpus = _visible_gpus(one)
            for number in range(self.plan.config.number("instances")):
                if gpus:  # each instance sees one GPU only; untested where there are several
                    environment = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]}
                    children.start(replace(one, main_gpu=0, tensor_split=None), environment)
                else:
                    children.start(one, {})
            for child in children.list:  # they load side by side
                child.wait_until_ready()
        except BaseException:
            children.kill()
            raise
        super().__init__(children.list, self.plan.config.cache_prefix)
        for child in children.list:
            child.failover = weakref.WeakMethod(self.inherit)
        self._take(children)


def _visible_gpus(config: EngineConfig) -> list[str]:
    """The names of the GPUs to deal out; none where one or no GPU is to be used."""
    n_gpus = gpu_count()
    if n_gpus < 2 or config.n_gpu_layers == 0:
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",") if chosen else [str(number) for number in range(n_gpus)]
