"""Measures each type of weights at 1, 8 and 32 rows and with a prompt, ours beside stock and the machine's roofs.

    python -m benchmarks.types [--quick] [--shape NAME]... [--type NAME]... [--cpu VARIANT] [--ik PROGRAM]
        [--json FILE] [--picture FILE]

A cell of the table is a shape and a type. Its file has random weights in the types that llama-quantize gives to the
tensors (type_files.py). Ours and stock are child programs with the model loaded (programs/steps.py). They take turns;
the fastest step counts. A first program of each side has one sequence and computes the prompt. A second program has 32
sequences of 64 tokens, and decodes one token for 1, 8 or 32 of them; its peak of resident memory is shown beside the
file's size. With --ik, llama-batched-bench of ik_llama.cpp (ik.py) computes the same after both of them. With --cpu,
both sides are built for a CPU with fewer instruction sets than this one: `haswell` has AVX2, `alderlake` AVX-VNNI, too
(native_patches/variants.py).

Shares of the roofs are those of ours. At one row the share is the bytes of all weights a second over the rate at which
all threads read memory. At 32 rows and in the prompt it is the products a second over the rate that the product
instruction reaches from registers; with --cpu it is left out.

The program writes the file after each cell. A later call measures the missing cells and those of another build of
llama.cpp. So a run can be cut into pieces, and a change of a kernel can be measured type by type. If other processes
took more than 2 % of the CPU, a cell is measured again, up to three times. The fastest step of all tries counts, also
with --again: the tries of an earlier call then count, too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import click

from benchmarks import ik, stock, type_files
from benchmarks.facts import command_line, facts, revision
from benchmarks.kernels import bandwidth
from benchmarks.operations import product_roofs
from benchmarks.places import ROOT, installed_build, log_folder
from benchmarks.process import PeerFailure, Program, ended_by_signals, environment
from benchmarks.report import MOST_OTHERS
from benchmarks.types_plot import OURS, POINTS, PROMPT, ROWS, STOCK, draw, gain, tokens_per_s
from llamabatch.llama.environment import environment_defaults
from llamabatch.monitor.host import MachineSampler
from llamabatch.native_build import machine
from llamabatch.native_build.tools import SetupFailure, main_guard
from llamabatch.tools.processes import PeakMemory
from native_patches.variants import VARIANTS, chosen

PROGRAM = Path(__file__).parent / "programs" / "steps.py"
RESULTS = ROOT / "benchmarks" / "results" / "types.json"
PICTURE = ROOT / "docs" / "images" / "types.svg"
SHAPES = ("qwen2.5-0.5b", "llama-3.2-1b")
FLOATS = ("F16", "BF16")
DOWNLOADED = (
    *("Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q4_K_M", "Q4_K_S", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K"),
    *("Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
RARE = (
    *("IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
    *("TQ2_0", "TQ1_0", "NVFP4"),
)
TYPES = (*DOWNLOADED, *FLOATS, *RARE)
QUICK = ("Q8_0", "Q4_K_M", "Q5_0", "Q5_1", "Q4_1", "Q4_0", "IQ4_NL", "BF16")
CONTEXT = 64
STEPS = 3
TIMEOUT_S = 900.0
_ATTEMPTS = 3


@dataclasses.dataclass(frozen=True)
class Builds:
    """The builds of llama.cpp of both sides.

    Attributes:
        key: the build key of ours.
        folders: the folder of a side's libraries; None for the installed build.
    """

    key: str
    folders: dict[str, Path | None]


def builds(variant: str | None) -> Builds:
    """Returns both builds for this CPU or for a CPU variant, from the cache or built now.

    Raises:
        SetupFailure: a build failed, or the installed library is not ours.
    """
    plan = machine.make_plan("cpu")
    if variant is None:
        return Builds(installed_build(), {OURS: None, STOCK: stock.libraries(plan)})
    (of_cpu,) = chosen(platform.machine(), variant)
    plan = dataclasses.replace(
        plan, flags=(*plan.flags, "-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in of_cpu.sets))
    )
    return Builds(plan.key, {OURS: stock.patched_libraries(plan), STOCK: stock.libraries(plan)})


class Sides:
    """Child programs of ours and of stock with one model, each with `sequences` sequences of `cells` cells.

    The constructor raises PeerFailure if a program fails.
    """

    def __init__(self, model: Path, sequences: int, cells: int, threads: int, folders: dict[str, Path | None]) -> None:
        self.programs: dict[str, Program] = {}
        self.facts: dict[str, Any] = {}
        self.memory: dict[str, int | None] = {}
        for name in (OURS, STOCK):
            env = environment({**os.environ, **environment_defaults(model.stat().st_size)})
            if (folder := folders[name]) is not None:
                env |= {"LLAMA_CPP_LIB_PATH": str(folder), "LD_LIBRARY_PATH": str(folder)}
            log = log_folder() / f"types-{name}-{sequences}.log"
            self.programs[name] = Program(name, [sys.executable, str(PROGRAM)], env, log, lines=True)
            given = {"model": str(model), "sequences": sequences, "cells": cells, "threads": threads}
            self.facts = self.programs[name].ask({**given, "flash_attention": True}, TIMEOUT_S)

    def fastest(self, message: dict[str, Any], rounds: int) -> dict[str, float]:
        """Returns the least seconds of each side. The sides take turns; the side that runs first alternates."""
        found: dict[str, float] = {}
        for number in range(rounds):
            for name in (OURS, STOCK) if number % 2 == 0 else (STOCK, OURS):
                answer = self.programs[name].ask(message, TIMEOUT_S)["seconds"]
                seconds = min(answer) if isinstance(answer, list) else answer
                found[name] = min(seconds, found.get(name, seconds))
        return found

    def pids(self) -> list[int]:
        return [pid for program in self.programs.values() for pid in program.pids]

    def close(self) -> None:
        """Ends both programs; `memory` then has the peak of each in bytes."""
        for name, program in self.programs.items():
            with PeakMemory(program.pids) as memory:
                self.memory[name] = memory.read()
            program.close()


def measure(
    path: Path, threads: int, rounds: int, folders: dict[str, Path | None], of_ik: Path | None = None
) -> dict[str, Any]:
    """Returns the seconds of each point and side, the peak memory, and facts of a file. Raises PeerFailure if ours or
    stock fails.

    Args:
        folders: the folder of each side's libraries; None for the installed build.
        of_ik: llama-batched-bench of ik_llama.cpp, a third side. Its failure is returned as a fact.
    """
    seconds: dict[str, dict[str, float]] = {}
    others: list[float | None] = []
    memory: dict[str, int | None] = {}
    for sequences, cells in ((1, PROMPT + 256), (max(ROWS), CONTEXT + 256)):
        sides = Sides(path, sequences, cells, threads, folders)
        try:
            sampler = MachineSampler(sides.pids)
            if sequences == 1:
                seconds["prompt"] = sides.fastest({"fill": PROMPT}, rounds)
            else:
                sides.fastest({"fill": CONTEXT}, 1)
                for count in ROWS:
                    seconds[f"{count} rows"] = sides.fastest({"rows": count, "steps": STEPS}, rounds)
            others.append(sampler.sample().others_cpu_percent)
            sampler.close()
        finally:
            sides.close()
        memory, about = sides.memory, sides.facts
    more: dict[str, str] = {}
    if of_ik is not None:
        try:
            for name, least in ik.fastest(of_ik, path, threads, rounds, ROWS, CONTEXT, PROMPT, TIMEOUT_S).items():
                seconds[name][ik.NAME] = least
        except PeerFailure as failure:
            more[ik.NAME] = str(failure)
    return {
        "seconds": {name: seconds[name] for name in POINTS}, "file_bytes": path.stat().st_size, "peak_bytes": memory,
        "n_params": about["n_params"], "weight_bytes": about["weight_bytes"],
        "output_params": about["n_vocab"] * about["n_embd"],
        "others_cpu_percent": [None if share is None else round(share, 1) for share in others], **more,
    }  # fmt: skip


def merged(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Returns a measurement with the least seconds of both; `before` may be empty.

    `before` does not count if it has other sides, because a side with more tries would look faster.
    """
    old, new = before.get("seconds", {}), found["seconds"]
    if any(old.get(point, {}).keys() != sides.keys() for point, sides in new.items()):
        return found
    least = {point: {side: min(s, old[point][side]) for side, s in sides.items()} for point, sides in new.items()}
    return {**found, "seconds": least}


def disturbance(cell: dict[str, Any]) -> float:
    """Returns the largest share of the CPU that other processes took, in percent."""
    return max((each for each in cell["others_cpu_percent"] if each is not None), default=0.0)


def shares(cell: dict[str, Any], roofs: dict[str, float]) -> dict[str, float]:
    """Returns the shares of the roofs by point, those of products only if the instruction's roof is known.

    The output matrix is also the embedding matrix; of a prompt, only the last token is multiplied with it.
    """
    rows, seconds = max(ROWS), cell["seconds"]
    found = {"1 rows": cell["weight_bytes"] / seconds["1 rows"][OURS] / roofs["read_bytes_s"]}
    instruction = "vdpbf16ps" if cell["type"] == "BF16" else "vfmadd231ps" if cell["type"] == "F16" else "vpdpbusd"
    if roof := roofs.get(instruction):
        prompt = (cell["n_params"] - cell["output_params"]) * PROMPT + cell["output_params"]
        found[f"{rows} rows"] = cell["n_params"] * rows / seconds[f"{rows} rows"][OURS] / roof
        found["prompt"] = prompt / seconds["prompt"][OURS] / roof
    return found


HEAD = (
    f"{'shape':14}{'type':9}" + "".join(f"{point:>10}{'times':>7}" for point in POINTS)
    + f"{'read':>7}{'32 rows':>8}{'prompt':>7}{'memory':>9}{'file':>8}{'stock':>8}{'others':>8}"
)  # fmt: skip


def line(cell: dict[str, Any]) -> str:
    """Returns a cell's line: tokens/s and ratio to stock, shares of roofs, MB of memory, CPU percent of others."""
    share, peak = cell["shares"], cell["peak_bytes"]
    megabytes = [peak[OURS], cell["file_bytes"], peak[STOCK]]
    return (
        f"{cell['shape']:14}{cell['type']:9}"
        + "".join(f"{tokens_per_s(cell, point, OURS):10,.0f}{gain(cell, point):7.2f}" for point in POINTS)
        + "".join(
            f"{share.get(point, 0):{width}.2f}" for point, width in (("1 rows", 7), ("32 rows", 8), ("prompt", 7))
        )
        + "".join(f"{(size or 0) / 1e6:{width},.0f}" for size, width in zip(megabytes, (9, 8, 8), strict=True))
        + f"{disturbance(cell):7.1f}%"
    )


def beside_ik(cell: dict[str, Any]) -> str:
    """Returns a line with our speed divided by ik_llama.cpp's at each point; "" if it was not measured."""
    if ik.NAME in cell:
        return f"{'':14}{ik.NAME} fails: {cell[ik.NAME]}"
    if ik.NAME not in cell["seconds"]["prompt"]:
        return ""
    return f"{'':10}{ik.NAME:13}" + "".join(f"{gain(cell, point, ik.NAME):17.2f}" for point in POINTS)


def known_cells(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the cells of a file by shape and type; none if there is no file."""
    if not path.is_file():
        return {}
    return {(cell["shape"], cell["type"]): cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]}


@click.command()
@click.option("--quick", is_flag=True, help="The smaller shape, the types most in use, one round.")
@click.option("--shape", "shapes", multiple=True, type=click.Choice(SHAPES), help="Only this; repeatable.")
@click.option("--type", "types", multiple=True, type=click.Choice(TYPES), help="Only this; repeatable.")
@click.option("--rounds", type=click.IntRange(min=1), help="Default: 2, quick 1.")
@click.option("--again", is_flag=True, help="Measure cells again that the file has of this build.")
@click.option(
    "--cpu",
    "variant",
    type=click.Choice([each.name for each in VARIANTS.get(platform.machine(), ())]),
    help="Builds of both sides for a CPU with fewer instruction sets.",
)
@click.option(
    "--ik", "of_ik", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="llama-batched-bench of ik_llama.cpp, a third side.",
)  # fmt: skip
@click.option("--threads", type=click.IntRange(1), default=len(os.sched_getaffinity(0)), show_default=True)
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Where the figures go.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="A .svg or .png of all of the cells.")
def main(
    quick: bool, shapes: tuple[str, ...], types: tuple[str, ...], rounds: int | None, again: bool, variant: str | None,
    of_ik: Path | None, threads: int, path: Path | None, picture: Path | None,
) -> None:  # fmt: skip
    """Measure types of weights that the file of figures does not have yet."""
    of_cpu = f"-{variant}" if variant else ""
    path = path or RESULTS.with_name(f"types{of_cpu}{'-quick' if quick else ''}.json")
    both = builds(variant)
    build = both.key
    cells = known_cells(path)
    wanted = [
        (shape, kind)
        for shape in shapes or (SHAPES[:1] if quick else SHAPES)
        for kind in types or (QUICK if quick else TYPES)
    ]
    missing = [each for each in wanted if again or not _is_whole(cells.get(each, {}), build, of_ik is not None)]
    if not missing:
        click.echo(f"{path} has all of them; --again measures them again", err=True)
    roofs = {**({} if variant else product_roofs(threads)), "read_bytes_s": round(bandwidth(threads))}
    tries = rounds or (1 if quick else 2)
    click.echo(HEAD)
    for each in wanted:
        if each not in missing:
            _show(cells[each])
    with ended_by_signals():
        for shape, kind in missing:
            before = cells.get((shape, kind), {})
            found = before if before.get("build") == build else {}
            try:
                with type_files.model(shape, kind, lambda text: click.echo(text, err=True)) as model:
                    for _ in range(_ATTEMPTS):
                        found = merged(found, measure(model, threads, tries, both.folders, of_ik))
                        if disturbance(found) <= MOST_OTHERS:
                            break
            except SetupFailure as failure:
                click.echo(f"{shape:14}{kind:9}left out: {failure}", err=True)
                continue
            about = {"shape": shape, "type": kind, "build": build, "revision": revision(), "threads": threads}
            cells[shape, kind] = {**found, **about}
            cells[shape, kind]["shares"] = shares(cells[shape, kind], roofs)
            _show(cells[shape, kind])
            _write(path, cells, roofs)
    if picture is not None:
        draw(list(cells.values()), picture)


def _is_whole(cell: dict[str, Any], build: str, with_ik: bool) -> bool:
    """Returns True if the cell is of this build, and has what ik_llama.cpp did, if that is asked for."""
    return cell.get("build") == build and (not with_ik or ik.NAME in cell or ik.NAME in cell["seconds"]["prompt"])


def _show(cell: dict[str, Any]) -> None:
    click.echo(line(cell))
    if more := beside_ik(cell):
        click.echo(more)


def _write(path: Path, cells: dict[tuple[str, str], dict[str, Any]], roofs: dict[str, float]) -> None:
    order = {(shape, kind): at for at, (shape, kind) in enumerate((s, k) for s in SHAPES for k in TYPES)}
    document = {
        **facts(command_line("python -m benchmarks.types").replace(str(path), path.name)),
        "roofs": roofs, "cells": [cells[each] for each in sorted(cells, key=lambda each: order[each])],
    }  # fmt: skip
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


if __name__ == "__main__":
    sys.exit(main_guard(main))
