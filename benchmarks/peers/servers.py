"""The peers that are servers, over HTTP: llama-server (patched and stock), xllamacpp, llama-cpp-python's example."""

from __future__ import annotations

import dataclasses
import json
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import grid, places
from benchmarks.peers.base import LOAD_TIMEOUT_S, SAMPLING, Result, Setup, measure
from benchmarks.peers.child import PROGRAMS
from benchmarks.peers.client import HttpSession, wait_until_up
from benchmarks.process import PeerFailure, Program
from benchmarks.stock import NEEDED
from benchmarks.workloads import N_SLOTS, Job, Workload
from llamabatch.native_build.tools import make_folder
from llamabatch.planning.machine import Machine
from llamabatch.utils.paths import cache_dir

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class LlamaServer:
    """llama-server with 32 slots, and with our context and threads. All else has its default, or the given flags.

    Attributes:
        best: for each workload, the flags that grid.py found; None: `flags`.
        stock: the server has none of our patches, except those that it needs to build and not to crash.
    """

    name: str
    best: grid.Remembered | None = None
    flags: tuple[str, ...] = ()
    stock: bool = False

    def applies(self, workload: Workload) -> bool:
        return True

    def flags_for(self, workload: Workload) -> Sequence[str]:
        return self.flags if self.best is None else self.best.flags(workload.name)

    def open(self, setup: Setup, workload: Workload) -> HttpSession:
        port, threads = free_port(), str(setup.threads)
        flags = [
            "-np", str(N_SLOTS), "-c", str(N_SLOTS * workload.n_ctx), "-t", threads, "-tb", threads,
            *self.flags_for(workload),
        ]  # fmt: skip
        command: list[str | Path] = [
            setup.program("llama-server", stock=self.stock), "-m", setup.models[workload.model].path,
            "--host", HOST, "--port", str(port), *flags,
        ]  # fmt: skip
        program = Program(self.name, command, setup.env, setup.logs / f"{self.name}.log", lines=False)
        patches = {"patches": list(NEEDED)} if self.stock else {}
        return _up(program, port, "/health", {"flags": flags, **patches})

    def measure(self, setup: Setup, workload: Workload, rng: random.Random) -> Result:
        return measure(self, setup, workload, rng)


def remembered(setup: Setup, *, stock: bool) -> grid.Remembered:
    """Returns the record of best flags for this build of the programs, these threads and the workloads' models."""
    programs = setup.stock if stock else setup.programs
    key = f"{programs.parent.name if programs else 'none'}-{setup.threads}-{places.SHAPE}-{places.QUANT}"
    return grid.Remembered(make_folder(cache_dir() / "bench") / "llama-server-flags.json", key)


def search_flags(
    setup: Setup, workloads: Sequence[Workload], best: grid.Remembered, say: Callable[[str], None], *, stock: bool,
    again: bool = False,
) -> None:  # fmt: skip
    """Runs the grid of llama-server's flags for the workloads without a record; with `again`, for all of them."""

    def one(flags: grid.Flags, workload: Workload, timeout_s: float) -> Result:
        hasty = dataclasses.replace(setup, timeout_s=min(timeout_s, setup.timeout_s))
        server = LlamaServer("llama-server, grid", flags=flags, stock=stock)
        return measure(server, hasty, workload, random.Random(repr(flags)), runs=grid.RUNS)

    for workload in workloads:
        if again or workload.name not in best.found:
            best.search(workload, one, say)


@dataclass(frozen=True)
class OurServer:
    """`llamabatch serve` with 32 slots and the workload's context, on llama-server's endpoint. All else is default."""

    name: str = "llamabatch serve"
    options: tuple[str, ...] = ()

    def applies(self, workload: Workload) -> bool:
        return True

    def open(self, setup: Setup, workload: Workload) -> HttpSession:
        port = free_port()
        options = ["--n-slots", str(N_SLOTS), "--n-ctx", str(workload.n_ctx), *self.options]
        if setup.threads != Machine.here().cores:
            options += ["--n-threads", str(setup.threads), "--n-threads-batch", str(setup.threads)]
        command: list[str | Path] = [
            setup.python, "-m", "llamabatch", "serve", "-m", setup.models[workload.model].path,
            "--host", HOST, "--port", str(port), *options,
        ]  # fmt: skip
        program = Program(self.name, command, setup.env, setup.logs / f"{self.name}.log", lines=False)
        return _up(program, port, "/health", {"options": options})

    def measure(self, setup: Setup, workload: Workload, rng: random.Random) -> Result:
        return measure(self, setup, workload, rng)


@dataclass(frozen=True)
class XLlamaCpp:
    """xllamacpp's server from its wheel. The wheel contains a llama.cpp of its own, without AVX-512 and AMX."""

    name: str = "xllamacpp"

    def applies(self, workload: Workload) -> bool:
        return True

    def open(self, setup: Setup, workload: Workload) -> HttpSession:
        port = free_port()
        options = {"n_parallel": N_SLOTS, "n_ctx": N_SLOTS * workload.n_ctx, "n_threads": setup.threads}
        command = [bench_python(setup), PROGRAMS / "start_xllamacpp.py"]
        program = Program(self.name, command, setup.env, setup.logs / f"{self.name}.log", lines=True)
        try:
            facts = program.ask(
                {"model": str(setup.models[workload.model].path), "port": port, **options}, LOAD_TIMEOUT_S
            )
        except BaseException:
            program.close()
            raise
        return _up(program, port, "/health", {"options": options, "system": facts["system"]})

    def measure(self, setup: Setup, workload: Workload, rng: random.Random) -> Result:
        return measure(self, setup, workload, rng)


@dataclass(frozen=True)
class LcpServer:
    """examples/server/server.py of llama-cpp-python's source package, on our wheel.

    It has neither top_k nor min_p, so it samples from the top_p of the whole vocabulary. It cannot ignore
    end-of-generation tokens, so a bias forbids them.
    """

    name: str = "llama-cpp-python server"

    def applies(self, workload: Workload) -> bool:
        return True

    def open(self, setup: Setup, workload: Workload) -> HttpSession:
        if setup.lcp_server is None:
            raise PeerFailure("its source is not there")
        port, model = free_port(), setup.models[workload.model]
        options = {
            "n_ctx": N_SLOTS * workload.n_ctx, "n_seq_max": N_SLOTS, "threads": setup.threads,
            "threads_batch": setup.threads, "store_logits": False,
        }  # fmt: skip
        config = setup.logs / "llama-cpp-python-server.json"
        document = {"server": {"host": HOST, "port": port}, "model": {"path": str(model.path), **options}}
        config.write_text(json.dumps(document), encoding="utf-8")
        command: list[str | Path] = [
            bench_python(setup), PROGRAMS / "start_lcp_server.py", setup.lcp_server, "-C", config,
        ]  # fmt: skip
        program = Program(self.name, command, setup.env, setup.logs / f"{self.name}.log", lines=False)
        bias = {str(token): -100.0 for token in model.eog}

        def payload(job: Job, streamed: bool) -> dict[str, Any]:
            return {
                "prompt": job.prompt, "max_tokens": job.generate, "stream": streamed, "logit_bias": bias,
                "temperature": SAMPLING["temperature"], "top_p": SAMPLING["top_p"],
            }  # fmt: skip

        wait(program, port, "/healthz")
        return HttpSession(
            program, (HOST, port), "/v1/completions", payload,
            _completed, {"options": options},
        )  # fmt: skip

    def measure(self, setup: Setup, workload: Workload, rng: random.Random) -> Result:
        return measure(self, setup, workload, rng)


def bench_python(setup: Setup) -> Path:
    if setup.bench_python is None:
        raise PeerFailure("its packages are not installed")
    return setup.bench_python


def wait(program: Program, port: int, path: str) -> None:
    """Waits until the server answers; ends a server that does not."""
    try:
        wait_until_up(program, (HOST, port), path, LOAD_TIMEOUT_S)
    except BaseException:
        program.close()
        raise


def _up(program: Program, port: int, health: str, facts: dict[str, Any]) -> HttpSession:
    """Waits for a server with llama.cpp's endpoints; returns a session with it."""
    wait(program, port, health)
    return HttpSession(program, (HOST, port), "/completion", _completion, _predicted, facts)


def _completion(job: Job, streamed: bool) -> dict[str, Any]:
    """Returns the body of a request to llama.cpp's own completion endpoint. The prompt cache stays on by default."""
    return {
        "prompt": job.prompt, "n_predict": job.generate, "ignore_eos": True, "stream": streamed, **SAMPLING,
    }  # fmt: skip


def _predicted(answer: dict[str, Any], job: Job) -> int:
    return int(answer["tokens_predicted"])


def _completed(answer: dict[str, Any], job: Job) -> int:
    """Returns the generated tokens of an OpenAI answer.

    A stream ends with a finish reason only. If the reason is "length", all requested tokens were generated.
    """
    if "usage" in answer:
        return int(answer["usage"]["completion_tokens"])
    return job.generate if answer["choices"][0]["finish_reason"] == "length" else 0
