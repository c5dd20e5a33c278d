"""Programs of ours that may die: run in a child process, which sees the modules that this one sees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from llamabatch import paths


def run_program(
    module: str, *arguments: str, timeout_s: float, without_gpus: bool = False
) -> subprocess.CompletedProcess[bytes]:
    """Runs a module as a program, to its end; stdout holds all that it prints.

    Raises:
        subprocess.TimeoutExpired, OSError
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if without_gpus:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "GGML_VK_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], env=environment, cwd=Path(paths.__file__).parents[1],
        timeout=timeout_s, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
