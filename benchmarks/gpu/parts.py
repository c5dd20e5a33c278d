"""The parts of `make gpu-check`, each a process: python -m benchmarks.gpu.parts NAME FOLDER --backend B [--quick]

A part writes FOLDER/NAME.json again for each new figure, so that its figures stay even if the part is killed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import limit, places
from benchmarks.gpu import build
from benchmarks.peers.base import SAMPLING, Opens, Setup, measure
from benchmarks.peers.child import Ours
from benchmarks.peers.servers import LlamaServer
from benchmarks.process import PeerFailure
from benchmarks.workloads import WORKLOADS, Shape, Workload
from llamabatch import LLM, SamplingParams
from llamabatch.llama import library
from llamabatch.llama.rpc import SERVERS_VARIABLE
from llamabatch.native_build.machine import make_plan
from llamabatch.native_build.tools import make_folder
from llamabatch.planning.binding_choice import VARIABLE
from llamabatch.planning.machine import Machine
from llamabatch.tools import synth
from llamabatch.utils.atomic_file import write_text
from llamabatch.utils.paths import cache_dir

OURS, SERVER, BENCH = "ours", "llama-server", "llama-batched-bench"
_MOST_THREADS = 8  # enough, since all layers are on the GPU
_FACTS = (
    "import dataclasses, json; from llamabatch.tools.machine_facts import MachineFacts; "
    "print(json.dumps(dataclasses.asdict(MachineFacts.here())))"
)
_MODEL_TESTS = ("test_equality.py", "test_prefix_cache.py", "test_stops.py", "test_overrides.py")
_QUICK_TESTS = ("test_stops.py",)


@dataclasses.dataclass
class Context:
    """The input of a part, and its figures.

    Attributes:
        folder: folder of the results.
        name: name of the part.
        found: the figures so far.
    """

    folder: Path
    name: str
    backend: str
    quick: bool
    found: dict[str, Any] = dataclasses.field(default_factory=dict)

    def keep(self) -> None:
        """Writes the figures so far to the part's file; other entries of the file stay."""
        path = self.folder / f"{self.name}.json"
        entry = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        write_text(path, json.dumps({**entry, "found": self.found}, indent=1) + "\n")

    @property
    def slots(self) -> tuple[int, ...]:
        return (4, 8) if self.quick else (32, 64)

    def model(self) -> Path:
        """Returns the file of a model with random weights, 8B or small; writes it to the cache if it is missing."""
        name, shape = "llama-3.1-8b-Q4_K_M", synth.SHAPES["llama-3.1-8b"]
        if self.quick:
            name = "small-Q4_K_M"
            shape = dataclasses.replace(
                synth.SHAPES["llama-3.2-1b"], n_layer=4, n_embd=256, n_ff=768, n_head=4, n_head_kv=2, head_dim=64
            )
        path = make_folder(cache_dir() / "models") / f"{name}.gguf"
        if not path.is_file():
            say(f"writing {path.name}")
            synth.write_model(shape, path, "Q4_K_M")
        return path

    def setup(self) -> Setup:
        threads = 1 if self.backend == "rpc" else min(_MOST_THREADS, Machine.here().cores)
        return Setup(
            models={"synth": places.describe_model(self.model())},
            env={**os.environ, "PYTHONPATH": str(places.ROOT)},
            python=Path(sys.executable),
            bench_python=None,
            programs=build.programs(make_plan(self.backend)),
            lcp_server=None,
            logs=self.folder,
            threads=threads,
            timeout_s=120.0,
        )


def say(text: str) -> None:
    print(text, flush=True)


# --- the parts ----------------------------------------------------------------------------------------------------


def compiled(context: Context) -> None:
    plan = build.build(context.backend, context.folder / "compiler.log")
    context.found = {"backend": plan.backend, "flags": list(plan.flags), "compiler": plan.compiler, "key": plan.key}
    environment = {**os.environ, VARIABLE: str(build.package(plan))}
    done = subprocess.run([sys.executable, "-c", _FACTS], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the build does not run: {done.stderr.strip()[-500:]}")
    context.found["machine"] = json.loads(done.stdout.splitlines()[-1])
    context.found["devices"] = context.found["machine"]["devices"]
    context.keep()
    context.model()


def memory_settings(quick: bool) -> list[dict[str, Any]]:
    if quick:
        sizes = [{"n_slots": 4, "n_ctx": 512}, {"n_slots": 8, "n_ctx": 256}]
    else:
        sizes = [{"n_slots": 32, "n_ctx": 512}, {"n_slots": 64, "n_ctx": 512}]
    first = sizes[0]
    return [
        *sizes,
        {"n_slots": 1, "n_ctx": 4096},
        {**first, "type_k": "q8_0", "type_v": "q8_0"},
        {**first, "flash_attn": "off"},
        {**first, "n_gpu_layers": 2 if quick else 16},
        {**first, "n_ubatch": 128},
        {**first, "kv": "unified", "kv_cells": 2048},
    ]


def memory(context: Context) -> None:
    """Compares the bytes of each GPU that the plan predicts with those that llama.cpp reports."""
    settings = memory_settings(context.quick)
    base = {"model": str(context.model()), "strategy": "batched"}
    context.found = {"settings": []}
    command = [sys.executable, "-m", "tests.devices.case", json.dumps([{**base, **each} for each in settings])]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    for options, line in zip(settings, program.stdout, strict=False):
        case = json.loads(line)
        entry: dict[str, Any] = {"options": options}
        if "error" in case:
            entry["error"] = case["error"]
        else:
            entry["gpus"] = [
                {"name": name, "predicted": need["total"], "reported": sum(case["reserved"].get(name, {}).values())}
                for name, need in zip(case["names"], case["memory"]["gpus"], strict=True)
            ]
        context.found["settings"].append(entry)
        gaps = [
            abs(gpu["predicted"] / gpu["reported"] - 1)
            for each in context.found["settings"]
            for gpu in each.get("gpus", [])
            if gpu["reported"]
        ]
        context.found["largest_gap"] = round(max(gaps, default=0.0), 4)
        context.keep()
    if program.wait() != 0:
        raise RuntimeError(f"the program of the settings ended with status {program.returncode}")


def peers_of(n_slots: int, n_ctx: int) -> list[Opens]:
    servers = os.environ.get(SERVERS_VARIABLE)
    flags = ("-np", str(n_slots), "-c", str(n_slots * n_ctx), *(("--rpc", servers) if servers else ()))
    return [Ours(OURS, {"n_slots": n_slots, "strategy": "batched"}), LlamaServer(SERVER, flags=flags)]


def beside(context: Context, setup: Setup, workload: Workload, n_slots: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Measures ours and llama-server in turn, round by round; yields all figures so far after each measurement."""
    entry: dict[str, Any] = {"n_slots": n_slots, "workload": workload.outline(), "peers": {}, "rounds": rounds}
    peers = peers_of(n_slots, workload.n_ctx)
    for number in range(rounds):
        for peer in peers[number % 2 :] + peers[: number % 2]:
            row = entry["peers"].setdefault(peer.name, {"tokens_per_s": []})
            if "failure" in row:
                continue
            rng = random.Random(f"{workload.name}-{number}")
            try:
                result = measure(peer, setup, workload, rng, n_warm_up=n_slots)
            except PeerFailure as failure:
                row["failure"] = str(failure)
            else:
                row["tokens_per_s"].append(round(result.tokens_per_s, 1))
                if result.p95_gap_s is not None:
                    row.setdefault("p95_gap_s", []).append(round(result.p95_gap_s, 4))
                if result.first_token_s is not None:
                    row.setdefault("first_token_s", []).append(round(result.first_token_s, 4))
            say(f"{workload.name}, {n_slots} slots, {peer.name}: {row}")
            ours, theirs = (entry["peers"].get(name, {}).get("tokens_per_s") for name in (OURS, SERVER))
            if ours and theirs:
                pairs = [one / other for one, other in zip(ours, theirs, strict=False)]
                entry["ratio"] = round(statistics.median(pairs), 3)
            yield entry


def burst_of(context: Context, n_slots: int) -> Workload:
    shape = Shape(16, 16) if context.quick else Shape(64, 128)
    return Workload(f"burst of {n_slots}", "synth", (shape,) * n_slots, n_ctx=256)


def burst(context: Context) -> None:
    setup = context.setup()
    more = ("--rpc", servers) if (servers := os.environ.get(SERVERS_VARIABLE)) else ()
    context.found = {"sizes": []}
    for n_slots in context.slots:
        workload = burst_of(context, n_slots)
        at = len(context.found["sizes"])
        for entry in beside(context, setup, workload, n_slots, 1 if context.quick else 2):
            context.found["sizes"][at:] = [entry]
            context.keep()
        shape, row = workload.shapes[0], entry["peers"].setdefault(BENCH, {})
        try:
            [told] = limit.bench(setup, workload, "on", shape.prompt, shape.generated, [n_slots], *more)
            seconds = told["t_pp"] + told["t_tg"]
            row["tokens_per_s"] = [round(n_slots * shape.generated / seconds, 1)]
        except PeerFailure as failure:
            row["failure"] = str(failure)
        context.keep()


def host(context: Context) -> None:
    """Measures the part of a step outside of llama_decode, in which the device waits for the host; all slots decode."""
    lib: Any = library.load()
    decode, synchronize = lib.llama_decode, lib.llama_synchronize
    calls: list[tuple[float, float, int]] = []

    def timed(handle: Any, batch: Any) -> int:
        start = time.perf_counter()
        code = int(decode(handle, batch))
        synchronize(handle)  # llama_decode returns before the device has finished
        calls.append((start, time.perf_counter(), batch.n_tokens))
        return code

    n_tokens = 24 if context.quick else 96
    threads = 1 if context.backend == "rpc" else None
    options: dict[str, Any] = {} if threads is None else {"n_threads": threads, "n_threads_batch": threads}
    context.found = {"sizes": []}
    lib.llama_decode = timed
    try:
        for n_slots in context.slots:
            calls.clear()
            path = str(context.model())
            with LLM(path, strategy="batched", n_slots=n_slots, n_ctx=256, profile=False, **options) as llm:
                prompts = [[1000 + slot, 1001, 1002, 1003] for slot in range(n_slots)]
                params = SamplingParams.from_options(max_tokens=n_tokens, ignore_eos=True, **SAMPLING)
                llm.generate(prompts, params)
                calls.clear()
                llm.generate(prompts, params)
            context.found["sizes"].append({"n_slots": n_slots, **host_share(calls, n_slots)})
            context.keep()
    finally:
        lib.llama_decode = decode


def host_share(calls: list[tuple[float, float, int]], n_rows: int) -> dict[str, Any]:
    """Returns medians over consecutive steps of `n_rows` rows: ms of a step, ms outside of llama_decode, their share.

    Args:
        calls: begin, end and number of rows of each call of llama_decode.
    """
    pairs = [
        (later[0] - sooner[0], later[0] - sooner[1])
        for sooner, later in itertools.pairwise(calls)
        if sooner[2] == later[2] == n_rows
    ]
    if not pairs:
        return {"steps": 0}
    step, outside = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    return {
        "steps": len(pairs), "step_ms": round(1e3 * step, 3), "host_ms": round(1e3 * outside, 3),
        "share": round(outside / step, 4),
    }  # fmt: skip


def tests(context: Context) -> None:
    names = _QUICK_TESTS if context.quick else _MODEL_TESTS
    outcome = context.folder / "tests.xml"
    outcome.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={outcome}",
        *(str(places.ROOT / "tests" / "model" / name) for name in names),
    ]  # fmt: skip
    status = subprocess.call(command, cwd=places.ROOT)
    if status not in (0, 1) or not outcome.is_file():  # 1: some tests failed
        raise RuntimeError(f"pytest ended with status {status}")
    context.found = {"files": list(names), **outcome_of(outcome)}
    context.keep()


def outcome_of(path: Path) -> dict[str, Any]:
    """Returns the counts of a junit file of pytest, and the names of the failed tests."""
    [suite] = xml.etree.ElementTree.parse(path).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    return {**counts, "passed": passed, "failed_tests": failed}


def workloads(context: Context) -> None:
    setup, n_slots = context.setup(), context.slots[0]
    context.found = {"workloads": {}}
    for name in ("ragged", "shared prefix", "long prompt among talkers"):
        workload = WORKLOADS[name]
        if context.quick:
            workload = dataclasses.replace(workload.cut(), shapes=tuple(workload.cut().shapes[:8]))
        for entry in beside(context, setup, workload, n_slots, 1):
            context.found["workloads"][name] = entry
            context.keep()


def slots(context: Context) -> None:
    """Measures ours alone with several numbers of slots, in an order in which the first ones span the range."""
    setup = context.setup()
    sizes = (1, 4, 16) if context.quick else (128, 16, 1, 96, 8, 48, 4, 24, 2)
    context.found = {"sizes": {}}
    for n_slots in sizes:
        workload = burst_of(context, n_slots)
        try:
            result = measure(
                peers_of(n_slots, workload.n_ctx)[0], setup, workload, random.Random(n_slots), n_warm_up=n_slots
            )
            context.found["sizes"][str(n_slots)] = round(result.tokens_per_s, 1)
        except PeerFailure as failure:
            context.found.setdefault("failures", {})[str(n_slots)] = str(failure)
        context.keep()


TABLE: dict[str, Callable[[Context], None]] = {
    "build": compiled, "memory": memory, "burst": burst, "host": host, "tests": tests, "workloads": workloads,
    "slots": slots,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.parts", description=__doc__.split("\n\n")[0])
    parser.add_argument("name", choices=TABLE)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    TABLE[options.name](Context(options.folder, options.name, options.backend, options.quick))


if __name__ == "__main__":
    main()
