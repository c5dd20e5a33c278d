"""`make gpu-check`: measures a machine with a GPU in 25 minutes, in calls of at most 9, the most valuable parts first.

python -m benchmarks.gpu.check [--quick] [--backend cuda|rpc|cpu] [--minutes 9] [--out FOLDER] [--again PART]

Each part is a process with a time limit, and stores its figures at once, so that a second call continues where the
first one ended. Without CUDA or Metal the check says so, and measures two RPC devices on loopback. They compute on the
CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import build, report
from llamabatch.llama.rpc import SERVERS_VARIABLE
from llamabatch.native_build.machine import default_backend, make_plan
from llamabatch.native_build.tools import SetupFailure, main_guard, make_folder, say
from llamabatch.planning.binding_choice import VARIABLE
from llamabatch.utils.atomic_file import write_text

DONE, CUT, PARTIAL, FAILED = "done", "cut short", "stopped", "failed"
_OVER = (DONE, CUT, FAILED)  # not run again
AGAIN = 3
"""The exit status if time is up and parts remain."""
N_RPC_DEVICES = 2
_NVCC = Path("/usr/local/cuda/bin")  # where the toolkit usually is if PATH lacks it
_SPARE_S = 3.0


@dataclass(frozen=True)
class Part:
    """A step of the check: an entry of TABLE in benchmarks/gpu/parts.py. limit_s: seconds that the step may take."""

    name: str
    limit_s: float
    what: str


PARTS = (
    Part("build", 520, "llama.cpp for this card, and its programs"),
    Part("memory", 150, "predicted against reported memory over eight settings"),
    Part("burst", 240, "a burst beside llama-server and llama-batched-bench"),
    Part("host", 60, "host time of a step"),
    Part("tests", 180, "tests of the model on the device"),
    Part("workloads", 230, "ragged, shared prefix and talkers beside llama-server"),
    Part("slots", 120, "a burst over numbers of slots"),
)


def document_of(folder: Path) -> dict[str, Any]:
    """Returns the stored figures of all parts, by name of the part."""
    found: dict[str, Any] = {}
    for part in PARTS:
        path = folder / f"{part.name}.json"
        if path.is_file():
            found[part.name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def keep(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    write_text(folder / f"{name}.json", json.dumps(entry, indent=1) + "\n")


def run_parts(
    folder: Path,
    budget_s: float,
    run: Callable[[Part, float], str],
    *,
    now: Callable[[], float] = time.monotonic,
    parts: tuple[Part, ...] = PARTS,
) -> list[str]:
    """Runs the parts that are not over, as long as time remains; returns the names of the remaining parts.

    Args:
        run: runs a part within so many seconds, and returns its state.
    """
    end = now() + budget_s
    for number, part in enumerate(parts):
        entry = document_of(folder).get(part.name, {})
        if entry.get("state") in _OVER:
            continue
        left_s = end - now() - _SPARE_S
        if left_s < min(part.limit_s, budget_s - 2 * _SPARE_S):
            return [each.name for each in parts[number:] if not _is_over(folder, each)]
        started = now()
        state = run(part, min(part.limit_s, left_s))
        entry = document_of(folder).get(part.name, {})
        seconds = round(entry.get("seconds", 0.0) + now() - started, 1)
        keep(folder, part.name, {**entry, "state": state, "seconds": seconds})
        if part.name == "build" and state != DONE:  # no other part runs without it
            return [each.name for each in parts[number:]] if state == PARTIAL else []
    return [part.name for part in parts if not _is_over(folder, part)]


def _is_over(folder: Path, part: Part) -> bool:
    return document_of(folder).get(part.name, {}).get("state") in _OVER


def run_part(part: Part, limit_s: float, folder: Path, environment: Mapping[str, str], options: list[str]) -> str:
    """Runs one part in a process group of its own; returns its state. Its files stay even if the part is killed."""
    say(f"{part.name}: {part.what} (at most {limit_s:.0f} s)")
    command = [sys.executable, "-m", "benchmarks.gpu.parts", part.name, str(folder), *options]
    with open(folder / f"{part.name}.log", "ab") as log:
        variables = {**environment, "PYTHONUNBUFFERED": "1"}  # so that the error is the last line of the log
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
        try:
            status = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(process.pid)
            process.wait()
    if status == 0:
        return DONE
    if status is None:
        say(f"  stopped after {limit_s:.0f} s; what it found is kept")
        has_figures = bool(document_of(folder).get(part.name, {}).get("found"))
        return CUT if has_figures and part.name != "build" else PARTIAL
    text = (folder / f"{part.name}.log").read_text(encoding="utf-8", errors="replace")
    say(f"  failed: {(text.strip().splitlines() or ['no message'])[-1][:300]}")
    return FAILED


def end_group(pid: int) -> None:
    """Kills a process and all processes of its group."""
    with contextlib.suppress(OSError):
        os.killpg(pid, 9)


def backend_of(asked: str) -> tuple[str, str]:
    """Returns the backend of the check and the reason for that choice."""
    if asked != "auto":
        return asked, "as asked"
    found = default_backend()
    if found in ("cuda", "metal"):
        return found, "this machine has it"
    gpu = shutil.which("nvidia-smi") is not None
    why = (
        "nvidia-smi is here, but nvcc is not, or sees no GPU"
        if gpu
        else "neither a GPU of NVIDIA nor its driver is here"
    )
    return "rpc", f"{why}: two RPC devices on loopback take the place of GPUs, and compute on the CPU"


@contextlib.contextmanager
def devices(backend: str, environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yields the environment variables that name a part's devices. RPC servers end with the `with` block."""
    if backend != "rpc":
        yield environment
        return
    command = [sys.executable, "-m", "tests.devices.server", str(N_RPC_DEVICES)]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        if not port:
            raise SetupFailure(f"The RPC server ended with status {server.wait()}.")
        yield {**environment, SERVERS_VARIABLE: f"127.0.0.1:{port}", "LLAMA_GRAPH_REUSE_DISABLE": "1"}
    finally:
        end_group(server.pid)
        server.wait()


def check(out: Path, *, quick: bool, asked: str, minutes: float, again: list[str]) -> int:
    if _NVCC.is_dir() and not shutil.which("nvcc"):
        os.environ["PATH"] = f"{os.environ['PATH']}{os.pathsep}{_NVCC}"
    backend, why = backend_of(asked)
    folder = make_folder(out / f"{backend}{'-quick' if quick else ''}")
    for name in again:
        (folder / f"{name}.json").unlink(missing_ok=True)
    say(f"gpu-check on {backend}: {why}")
    options = ["--backend", backend, *(["--quick"] if quick else [])]
    environment = dict(os.environ)
    started = time.monotonic()
    left = run_parts(
        folder, 60 * minutes, lambda part, limit: run_part(part, limit, folder, environment, options), parts=PARTS[:1]
    )
    if not left and document_of(folder).get("build", {}).get("state") == DONE:
        environment[VARIABLE] = str(build.package(make_plan(backend)))
        with devices(backend, environment) as ready:
            left = run_parts(
                folder,
                60 * minutes - (time.monotonic() - started),
                lambda part, limit: run_part(part, limit, folder, ready, options),
            )
    found = document_of(folder)
    document = {"backend": backend, "why": why, "quick": quick, **report.circumstances(found), "parts": found}
    write_text(out / f"{folder.name}.json", json.dumps(document, indent=1) + "\n")
    paragraph = report.paragraph(document)
    write_text(out / f"{folder.name}.md", paragraph + "\n")
    picture = report.draw(document, out / f"{folder.name}.png")
    print(paragraph)
    say(f"figures: {out / folder.name}.json; {picture}")
    for name, is_met in report.targets(document).items():
        say(f"{name}: {'met' if is_met else 'MISSED'}")
    failed = [name for name, entry in found.items() if entry.get("state") == FAILED]
    if failed:
        say(f"Failed: {', '.join(failed)}; the logs are in {folder}. --again NAME tries a part again.")
    if left:
        say(f"Time is up. Left: {', '.join(left)}. Run it again.")
        return AGAIN
    return 1 if failed else 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small shape, few requests: to try the check itself")
    parser.add_argument("--backend", choices=("auto", "cuda", "metal", "rpc", "cpu"), default="auto")
    parser.add_argument("--minutes", type=float, default=9.0, help="that this call may take (default: 9)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the figures")
    parser.add_argument(
        "--again", action="append", default=[], choices=[part.name for part in PARTS], help="forget a part; repeatable"
    )
    options = parser.parse_args()
    if options.minutes <= 0:
        parser.error(f"--minutes is {options.minutes:g}; it must be above 0")
    sys.exit(
        check(
            options.out.absolute(), quick=options.quick, asked=options.backend, minutes=options.minutes,
            again=options.again,
        )
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main_guard(main))
