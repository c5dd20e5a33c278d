"""Modules of ours run as programs in child processes, with the import path of this process in any working directory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from llamabatch.utils.cancellation import LOOK_S, can_be_cancelled, is_cancelled

# A child imports the modules that its parent would, and none that happens to lie in the working directory.
_RUN = (
    "import sys; module, n = sys.argv[1], 3 + int(sys.argv[2]); sys.path[:] = sys.argv[3:n]; sys.argv[1:n] = []; "
    "import runpy; runpy.run_module(module, run_name='__main__')"
)
_ROOT = str(Path(__file__).absolute().parents[2])


def command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as a program. Raises OSError as interpreter() does."""
    path = import_path()
    return [interpreter(), "-c", _RUN, module, str(len(path)), *path, *arguments]


def interpreter() -> str:
    """The path of the Python that runs child processes.

    Raises:
        OSError: there is none, as in a frozen program (PyInstaller), whose executable would start all of it again.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        kind = f"{sys.executable} is a frozen program" if sys.executable else "Python is embedded in another program"
        raise OSError(f"{kind}, and runs no modules: a child process needs a Python interpreter as sys.executable")
    return sys.executable


def import_path() -> list[str]:
    """sys.path for a child. Its "" is the working directory, which may have changed: so the folder of this package
    comes last."""
    return [*sys.path, _ROOT]


# all that brings devices beside the CPU: numbers of GPUs, a backend in a file of its own, RPC servers
_DEVICE_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES"),
    *("GGML_BACKEND_PATH", "LLAMABATCH_RPC"),
)


def run_program(
    module: str,
    *arguments: str,
    timeout_s: float,
    without_gpus: bool = False,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Runs a module as a program to its end; stdout has its stdout and stderr. A load that is cancelled kills it.

    Args:
        environment: variables in addition to this process's.

    Raises:
        subprocess.TimeoutExpired, OSError
    """
    hidden = dict.fromkeys(_DEVICE_VARIABLES, "")
    end_s = time.monotonic() + timeout_s
    with subprocess.Popen(
        command(module, *arguments), env={**os.environ, **(hidden if without_gpus else {}), **(environment or {})},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,  # a signal to the group of this process is not for the child, whose end means something
    ) as process:  # fmt: skip
        try:
            while True:
                left_s = end_s - time.monotonic()
                try:
                    out, _ = process.communicate(timeout=min(left_s, LOOK_S) if can_be_cancelled() else left_s)
                    return subprocess.CompletedProcess(process.args, process.returncode, out)
                except subprocess.TimeoutExpired:
                    if is_cancelled() or time.monotonic() >= end_s:
                        raise
        except BaseException:
            process.kill()
            raise
