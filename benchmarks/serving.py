"""The common part of the server's benchmarks: `llamabatch serve` in a process, and figures beside their targets."""

from __future__ import annotations

import contextlib
import http.client
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import places
from benchmarks.peers.base import LOAD_TIMEOUT_S, Setup
from benchmarks.peers.client import wait_until_up
from benchmarks.peers.servers import HOST, free_port
from benchmarks.process import Program
from benchmarks.workloads import N_SLOTS
from llamabatch.planning.machine import Machine


def make_setup(
    env: dict[str, str], models: set[str], threads: int, say: Callable[[str], None], *, with_peers: bool = False
) -> Setup:
    """Returns a setup of this checkout with these models.

    Args:
        with_peers: adds llama-server, patched and stock.
    """
    return Setup(
        models=places.models(models, say),
        env=env | {"PYTHONPATH": str(places.ROOT)},  # this checkout, whatever is installed
        python=Path(sys.executable),
        bench_python=None,
        programs=places.built_programs(say) if with_peers else None,
        stock=places.stock_programs(say) if with_peers else None,
        lcp_server=None,
        logs=places.log_folder(),
        threads=threads,
        timeout_s=300.0,
    )


@dataclass
class Server:
    """`llamabatch serve` in a process of its own, with a child for its engine."""

    program: Program
    port: int

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.program.pids[0])

    @property
    def children(self) -> list[psutil.Process]:
        found: list[psutil.Process] = self.process.children(recursive=True)
        return found

    def generated(self) -> int:
        """Returns the number of tokens that the server has generated since its start."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=30)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        line = next(line for line in text.splitlines() if line.startswith("llamacpp:tokens_predicted_total"))
        return round(float(line.rsplit(" ", 1)[1]))


@contextlib.contextmanager
def open_server(setup: Setup, model: str, engine: dict[str, Any], flags: tuple[str, ...] = ()) -> Iterator[Server]:
    """Starts a server and yields it when it is ready; the server ends with the `with` block.

    Args:
        model: name of the model in the setup.
        engine: options of the engine.
        flags: more flags of `llamabatch serve`.
    """
    port = free_port()
    options = [f"--{name.replace('_', '-')}={value}" for name, value in engine.items()]
    command: list[str | Path] = [
        setup.python, "-m", "llamabatch", "serve", "-m", setup.models[model].path,
        "--host", HOST, "--port", str(port), *options, *flags,
    ]  # fmt: skip
    program = Program("llamabatch serve", command, setup.env, setup.logs / "server-http.log", lines=False)
    try:
        wait_until_up(program, (HOST, port), "/readyz", LOAD_TIMEOUT_S)
        yield Server(program, port)
    finally:
        program.close()


def engine_options(setup: Setup, n_ctx: int, n_slots: int = N_SLOTS) -> dict[str, Any]:
    """Returns engine options as in benchmarks/bench.py: slots and context are given, the engine chooses the rest."""
    engine: dict[str, Any] = {"n_slots": n_slots, "n_ctx": n_ctx}
    if setup.threads != Machine.here().cores:  # batched: one engine uses exactly the given threads
        engine |= {"n_threads": setup.threads, "n_threads_batch": setup.threads, "strategy": "batched"}
    return engine


def target(value: float, *, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    """Returns a figure with its target, and whether it is met."""
    if at_least is not None:
        return {"value": value, "at_least": at_least, "met": value >= at_least}
    assert at_most is not None
    return {"value": value, "at_most": at_most, "met": value <= at_most}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each failure and each target of a result, with whether the target was met."""
    for part, entry in found.items():
        if "failure" in entry:
            yield f"{part}: {entry['failure']}"
        nested = {"": entry} if "targets" in entry else {k: v for k, v in entry.items() if isinstance(v, dict)}
        for name, each in nested.items():
            for what, goal in each.get("targets", {}).items():
                limit = f">= {goal['at_least']:.3f}" if "at_least" in goal else f"<= {goal['at_most']:g}"
                where = f"{part}, {name}" if name else part
                yield f"{where}: {what} {goal['value']:.3f} ({limit}: {'met' if goal['met'] else 'MISSED'})"
