"""Engines in child processes: one behind a ChildClient, several behind a RouterClient."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from llamabatch import errors
from llamabatch.client import Sink, failure
from llamabatch.config import EngineConfig
from llamabatch.engine import plan
from llamabatch.errors import EngineClosedError, EngineError
from llamabatch.llama.model import Model
from llamabatch.model_file import resolve as resolve_path
from llamabatch.request import Request, SequenceOutput
from llamabatch.stats import EngineStats
from llamabatch.wire import Wire, pack_config, pack_request, unpack_output

WORKER = "llamabatch.worker"
_CLOSE_TIMEOUT_S = 20.0  # a step that is under way may take that long on a slow machine; then it is killed


class ChildClient:
    """An engine in a child process: what kills llama.cpp does not kill this process.

    Args:
        program: the module that the child runs; it speaks the wire.

    Raises:
        What Engine raises; EngineError if the child died while it started.
    """

    def __init__(self, config: EngineConfig, program: str = WORKER) -> None:
        self.model = Model(resolve_path(config.model))  # the vocabulary alone
        children: list[_Child] = []
        try:
            self.plan = plan(config, self.model)
            children.append(_Child(self.plan.config, {}, program))
            children[0].wait_until_ready()
        except BaseException:
            _close_all(children, self.model, kill=True)
            raise
        self._child = children[0]
        self._finalizer = weakref.finalize(self, _close_all, [self._child], self.model)

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        self._child.submit(requests, sink, stream)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._child.abort(list(request_ids))

    def stats(self) -> EngineStats:
        return self._child.stats()

    @property
    def pids(self) -> list[int]:
        """Process ids of the children."""
        return [self._child.pid]

    def close(self) -> None:
        self._finalizer()


class RouterClient:
    """Several engines, each in a child with its share of the cores or a GPU of its own; the least loaded gets the next.

    Raises:
        What Engine raises; MemoryPlanError if the engines together would not fit.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.model = Model(resolve_path(config.model))
        children: list[_Child] = []
        try:
            self.plan = plan(config, self.model)
            one = replace(self.plan.config, strategy=config.instance_strategy, instances=1)
            for number in range(self.plan.config.number("instances")):
                children.append(_Child(one, _device_environment(number, one)))
            for child in children:  # they load side by side
                child.wait_until_ready()
        except BaseException:
            _close_all(children, self.model, kill=True)
            raise
        self._children = children
        self._owners: dict[str, _Child] = {}
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close_all, children, self.model)

    def submit(self, requests: list[Request], sink: Sink, *, stream: bool = False) -> None:
        shares: dict[int, list[Request]] = {}
        with self._lock:
            alive = [child for child in self._children if child.alive]
            if not alive:
                raise EngineClosedError("all engine processes are gone")
            for request in requests:
                child = min(alive, key=lambda c: c.load)
                child.load += request.expected_tokens
                self._owners[request.request_id] = child
                shares.setdefault(alive.index(child), []).append(request)

        def tell(outputs: list[SequenceOutput]) -> None:
            with self._lock:
                for output in outputs:
                    if output.finished is not None:
                        owner = self._owners.pop(output.request_id, None)
                        if owner is not None:
                            owner.load -= expected[output.request_id]
            sink(outputs)

        expected = {request.request_id: request.expected_tokens for request in requests}
        for number, share in shares.items():
            try:
                alive[number].submit(share, tell, stream)
            except EngineClosedError as error:  # it died a moment ago: what is not its own goes on
                tell([failure(request, str(error)) for request in share])

    def abort(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            owners = [(self._owners.get(request_id), request_id) for request_id in request_ids]
        for child in {owner for owner, _ in owners if owner is not None}:
            child.abort([request_id for owner, request_id in owners if owner is child])

    def stats(self) -> EngineStats:
        return sum((child.stats() for child in self._children if child.alive), EngineStats())

    @property
    def pids(self) -> list[int]:
        """Process ids of the children."""
        return [child.pid for child in self._children]

    def close(self) -> None:
        self._finalizer()


@dataclass
class _Pending:
    request: Request
    sink: Sink


class _Child:
    """One child process and the thread that reads from it. Holds no reference to its client."""

    def __init__(self, config: EngineConfig, environment: dict[str, str], program: str = WORKER) -> None:
        self.load = 0  # tokens expected of what is in flight; the router's figure
        self.alive = True
        self._pending: dict[str, _Pending] = {}
        self._lock = threading.Lock()
        self._answers: queue.SimpleQueue[EngineStats | EngineClosedError] = queue.SimpleQueue()
        self._asking = threading.Lock()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the parent alone, which decides what it means
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # stdout belongs to the parent's answer
                env=os.environ | _import_environment() | environment,
            )
        self.pid = self._process.pid
        self._wire = Wire(ours)
        self._wire.send("init", pack_config(config))
        self._reader = threading.Thread(target=self._read, name=f"llamabatch-child-{self.pid}", daemon=True)

    def wait_until_ready(self) -> None:
        """Raises what the child raised while it started."""
        message = self._wire.receive()
        if message is None:
            self.alive = False
            raise EngineError(f"the engine process ended while it started: {self._how_it_ended()}")
        if message[0] == "failed":
            self.alive = False
            raise getattr(errors, message[1], EngineError)(message[2])
        self._reader.start()

    def submit(self, requests: list[Request], sink: Sink, stream: bool) -> None:
        with self._lock:
            if not self.alive:
                raise EngineClosedError("the engine process is gone")
            for request in requests:
                self._pending[request.request_id] = _Pending(request, sink)
        with contextlib.suppress(OSError):  # it just died: the reader tells everybody who waits
            self._wire.send("submit", [pack_request(request) for request in requests], stream)

    def abort(self, request_ids: list[str]) -> None:
        with contextlib.suppress(OSError):
            self._wire.send("abort", request_ids)

    def stats(self) -> EngineStats:
        with self._asking:
            if not self.alive:
                raise EngineClosedError("the engine process is gone")
            try:
                self._wire.send("stats")
            except OSError:
                raise EngineClosedError("the engine process is gone") from None
            answer = self._answers.get()
        if isinstance(answer, EngineClosedError):
            raise answer
        return answer

    def kill(self) -> None:
        """Ends it whatever it does; close() still has to follow."""
        self._process.kill()

    def close(self) -> None:
        """Asks it to end, then makes it."""
        with contextlib.suppress(OSError):  # it may have ended already
            self._wire.send("close")
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.alive = False
        self._wire.close()
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            self._reader.join()

    def _read(self) -> None:
        while (message := self._wire.receive()) is not None:
            if message[0] == "outputs":
                self._deliver(message[1])
            elif message[0] == "stats":
                self._answers.put(EngineStats(**message[1]))
        with self._lock:
            self.alive = False
            lost, self._pending = list(self._pending.values()), {}
        reason = f"the engine process ended: {self._how_it_ended()}" if lost else ""
        for pending in lost:
            pending.sink([failure(pending.request, reason)])
        self._answers.put(EngineClosedError("the engine process is gone"))

    def _deliver(self, packed: list[list[object]]) -> None:
        by_sink: dict[int, tuple[Sink, list[SequenceOutput]]] = {}
        with self._lock:
            for item in packed:
                pending = self._pending[str(item[0])]
                output = unpack_output(item, pending.request)
                if output.finished is not None:
                    del self._pending[output.request_id]
                by_sink.setdefault(id(pending.sink), (pending.sink, []))[1].append(output)
        for sink, outputs in by_sink.values():
            sink(outputs)

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _close_all(children: list[_Child], model: Model, *, kill: bool = False) -> None:
    """kill: do not wait for a child that is still loading."""
    for child in children:
        if kill:
            child.kill()
        child.close()
    model.close()


def _import_environment() -> dict[str, str]:
    """The child must import this very package, and nothing that happens to lie in the working directory."""
    here = str(Path(__file__).resolve().parent.parent)
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join([here, *others]), "PYTHONSAFEPATH": "1"}


def _device_environment(number: int, config: EngineConfig) -> dict[str, str]:
    """Each instance sees one GPU only. Untested where there are several."""
    if config.n_gpu_layers == 0 or "CUDA_VISIBLE_DEVICES" in os.environ:
        return {}
    return {"CUDA_VISIBLE_DEVICES": str(number)}
