"""Measures the seconds of each operation of llama.cpp, by kernels, for decode steps and for a prompt.

    python -m benchmarks.operations MODEL [--rows N]... [--prompt N] [--threads N] [--json FILE]

Each series is a child program with the model loaded: the patched build, the patched build without AMX, the patched
build without AMX and without llama.cpp's kernel for many rows (GGML_CPU_TILED_MM=0), and stock. The series take turns;
the fastest step of each counts, with its operations. The threads wait for each other after every operation, so the sum
is a little more than a step.

The table ends with each series' shares of the roofs. One share is the products of quantised weights a second over the
rate that the product instruction reaches from registers (programs/roofs.c: vpdpbusd, and tdpbssd of AMX). The other is
the bytes of weights a second over the rate at which all threads read memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks import stock
from benchmarks.facts import command_line, facts
from benchmarks.kernels import bandwidth
from benchmarks.places import installed_build, log_folder
from benchmarks.process import Program, ended_by_signals, environment
from llamabatch.llama.environment import environment_defaults
from llamabatch.native_build import machine
from llamabatch.native_build.tools import main_guard

PROGRAM = Path(__file__).parent / "programs" / "steps.py"
ROOFS = PROGRAM.with_name("roofs.c")
TIMEOUT_S = 900.0
_OF_BYTES = ("vpdpbusd", "tdpbssd")
SERIES = {
    "patched": {},
    "no AMX": {"GGML_CPU_AMX": "0"},
    "no tiled": {"GGML_CPU_AMX": "0", "GGML_CPU_TILED_MM": "0"},
    "stock": {},
}


def product_roofs(threads: int) -> dict[str, float]:
    """Returns products a second of `threads` threads by instruction.

    The result is empty if this CPU has neither instruction, or if there is no C compiler.
    """
    compiler = os.environ.get("CC", "cc")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "roofs"
        command = [compiler, "-O3", "-march=native", "-pthread", str(ROOFS), "-o", str(program)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            click.echo(
                f"no roof of the product instruction: {compiler} does not compile {ROOFS.name}: {error}", err=True
            )
            return {}
        done = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True)
    roofs: dict[str, float] = json.loads(done.stdout)
    return roofs


def shares(point: dict[str, Any], roofs: dict[str, float], read_roof: float) -> dict[str, float]:
    """Returns a point's products a second and its bytes of weights a second, each as a share of a roof."""
    spent = sum(point["operations"][name] for name in point["products"])
    if not spent:
        return {}
    products = sum(point["products"].values()) / spent
    found = {f"of {name}": products / roofs[name] for name in _OF_BYTES if name in roofs}
    if any(name.startswith("MUL_MAT_ID") for name in point["products"]):
        return found  # few rows read only some experts, so the bytes that were read are not known
    return {**found, "of reading": sum(point["weight_bytes"].values()) / spent / read_roof}


def start(name: str, model: Path, sequences: int, cells: int, threads: int) -> Program:
    """Starts the child program of a series and loads the model. Raises PeerFailure."""
    env = environment({**os.environ, **environment_defaults(model.stat().st_size), **SERIES[name]})
    if name == "stock":
        libraries = str(stock.libraries(machine.make_plan("cpu")))
        env |= {"LLAMA_CPP_LIB_PATH": libraries, "LD_LIBRARY_PATH": libraries}
    log = log_folder() / f"operations-{name.replace(' ', '-')}.log"
    program = Program(name, [sys.executable, str(PROGRAM)], env, log, lines=True)
    program.ask(
        {
            "model": str(model), "sequences": sequences, "cells": cells, "threads": threads, "flash_attention": True,
            "profile": True,
        },
        TIMEOUT_S,
    )  # fmt: skip
    return program


def table(found: dict[str, dict[str, Any]]) -> str:
    """Returns a table in milliseconds: lines of operations, columns of series, and at the end shares of the roofs."""
    names = {name for point in found.values() for name in point["operations"]}
    order = sorted(names, key=lambda name: -max(point["operations"].get(name, 0) for point in found.values()))
    lines = [f"{'':22}" + "".join(f"{series:>12}" for series in found)]
    lines += [
        f"{name:22}" + "".join(f"{1e3 * point['operations'].get(name, 0):12.2f}" for point in found.values())
        for name in order
    ]
    lines.append(f"{'step':22}" + "".join(f"{1e3 * point['seconds']:12.2f}" for point in found.values()))
    for roof in next(iter(found.values()))["shares"]:
        lines.append(f"{roof:22}" + "".join(f"{point['shares'].get(roof, 0):12.2f}" for point in found.values()))
    return "\n".join(lines)


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--rows", multiple=True, type=click.IntRange(1, 256), default=(1, 8, 16, 32), show_default=True)
@click.option("--prompt", type=click.IntRange(16, 8192), default=2000, show_default=True, help="tokens")
@click.option("--threads", type=click.IntRange(1), default=len(os.sched_getaffinity(0)), show_default=True)
@click.option("--series", multiple=True, type=click.Choice(list(SERIES)), default=list(SERIES), show_default=True)
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path))
def main(
    model: Path, rows: tuple[int, ...], prompt: int, threads: int, series: tuple[str, ...], path: Path | None
) -> None:
    """Measure the operations of a decode step and of a prompt of MODEL."""
    installed_build()  # raises SetupFailure where the library is not ours
    roofs, read_roof = product_roofs(threads), bandwidth(threads)
    programs: dict[str, Program] = {}
    points: dict[str, dict[str, dict[str, Any]]] = {}
    with ended_by_signals():
        try:
            for name in series:
                programs[name] = start(name, model, max(rows), prompt + 64, threads)
            points[f"prompt of {prompt}"] = {
                name: program.ask({"fill": prompt}, TIMEOUT_S) for name, program in programs.items()
            }
            for program in programs.values():
                program.ask({"fill": 64}, TIMEOUT_S)
            for count in rows:
                found: dict[str, dict[str, Any]] = {}
                for _ in range(3):
                    for name, program in programs.items():
                        answer = program.ask({"rows": count, "steps": 3}, TIMEOUT_S)
                        answer["seconds"] = min(answer["seconds"])
                        if name not in found or answer["seconds"] < found[name]["seconds"]:
                            found[name] = answer
                points[f"{count} rows"] = found
        finally:
            for program in programs.values():
                program.close()
    for point in (point for found in points.values() for point in found.values()):
        point["shares"] = {name: round(share, 3) for name, share in shares(point, roofs, read_roof).items()}
    click.echo(
        "roofs: "
        + ", ".join(f"{name} {roof / 1e9:,.0f} G/s" for name, roof in roofs.items())
        + f", reading {read_roof / 1e9:.1f} GB/s\n"
    )
    for what, found in points.items():
        click.echo(f"{what}, milliseconds\n{table(found)}\n")
    if path is not None:
        command = command_line("python -m benchmarks.operations").replace(str(model), model.name)
        document = {
            **facts(command.replace(str(path), path.name)), "model": model.name, "threads": threads,
            "roofs": {**roofs, "read_bytes_s": round(read_roof)}, "points": points,
        }  # fmt: skip
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main_guard(main))
