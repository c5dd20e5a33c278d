"""Runs llama-batched-bench of ik_llama.cpp, a fork of llama.cpp with its own kernels for CPUs.

There is no package of it. The program is built in a checkout of github.com/ikawrakow/ik_llama.cpp:

    cmake -B build -DCMAKE_BUILD_TYPE=Release && cmake --build build --target llama-batched-bench

It runs with its defaults and with weights that are repacked at load (-rtr); the faster one counts. Flash attention,
fused operations and reused graphs are its defaults. All sequences share the cells of one prompt (-pps), which saves
time and makes its steps a little faster. A step is the mean of eight.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.places import log_folder
from benchmarks.process import PeerFailure

NAME = "ik_llama.cpp"
_FLAGS: tuple[tuple[str, ...], ...] = ((), ("-rtr",))
_STEPS = 8
# A line of its table: tokens of the prompt, steps, sequences, cells; seconds and tokens/s of the prompt, of the steps
# and of both
_LINE = re.compile(r"^\|" + r" *([0-9.]+) \|" * 10 + "$", re.MULTILINE)


def fastest(
    program: Path, model: Path, threads: int, rounds: int, rows: Sequence[int], context: int, prompt: int,
    timeout_s: float,
) -> dict[str, float]:  # fmt: skip
    """Returns the least seconds of a step with each number of rows, `context` tokens in each sequence, and of a prompt.

    The keys are "1 rows" and so on, and "prompt". Raises PeerFailure if the program reads no such file.
    """
    found: dict[str, float] = {}
    failures: list[str] = []
    for flags in _FLAGS:
        command = [str(program), "-m", str(model), "-t", str(threads), "-b", "2048", "-ub", "512", "-pps", *flags]
        try:
            for _ in range(rounds):
                for count, _, of_steps in _run(command, rows, context, _STEPS, timeout_s):
                    name = f"{count} rows"
                    found[name] = min(of_steps / _STEPS, found.get(name, of_steps))
                for _, of_prompt, _ in _run(command, (1,), prompt, 1, timeout_s):
                    found["prompt"] = min(of_prompt, found.get("prompt", of_prompt))
        except PeerFailure as failure:
            failures.append(str(failure))
    if len(failures) == len(_FLAGS):
        raise PeerFailure(failures[0])
    return found


def _run(
    command: Sequence[str], rows: Sequence[int], prompt: int, steps: int, timeout_s: float
) -> list[tuple[int, float, float]]:
    """Returns rows, seconds of the prompt, seconds of the steps. The program writes a llama.log where it runs."""
    cells = prompt + max(rows) * steps
    asked = ["-c", str(cells), "-npp", str(prompt), "-ntg", str(steps), "-npl", ",".join(map(str, rows))]
    try:
        done = subprocess.run(
            [*command, *asked], cwd=log_folder(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise PeerFailure(f"llama-batched-bench took longer than {timeout_s:g} s") from error
    lines = _LINE.findall(done.stdout) or _LINE.findall(done.stderr)
    if done.returncode != 0 or len(lines) != len(rows):
        raise PeerFailure(f"llama-batched-bench ended with {done.returncode}: {done.stderr[-300:].strip()}")
    return [(int(each[2]), float(each[4]), float(each[6])) for each in lines]
