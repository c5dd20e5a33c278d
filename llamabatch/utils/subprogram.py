"""Runs llamabatch's modules as programs in child processes, with this process's import path."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from llamabatch.utils.cancellation import LOOK_S, can_be_cancelled, is_cancelled

# The program of a child. It sets sys.path to the parent's, so that no module in the working directory is imported
# instead.
_RUN = (
    "import sys; module, n = sys.argv[1], 3 + int(sys.argv[2]); sys.path[:] = sys.argv[3:n]; sys.argv[1:n] = []; "
    "import runpy; runpy.run_module(module, run_name='__main__')"
)
_ROOT = str(Path(__file__).absolute().parents[2])


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module as a program. Raises OSError as interpreter() does."""
    path = import_path()
    return [interpreter(), "-c", _RUN, module, str(len(path)), *path, *arguments]


def interpreter() -> str:
    """Returns the path of the Python interpreter for child processes.

    Raises:
        OSError: there is no interpreter. In a frozen program (PyInstaller), sys.executable is the program itself.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        kind = f"{sys.executable} is a frozen program" if sys.executable else "Python is embedded in another program"
        raise OSError(f"{kind}, and runs no modules: a child process needs a Python interpreter as sys.executable")
    return sys.executable


def import_path() -> list[str]:
    """Returns sys.path for a child, followed by the folder that contains this package.

    The folder is necessary because this package may have been found through "" in sys.path. "" means the working
    directory, which may have changed since.
    """
    return [*sys.path, _ROOT]


# These variables choose devices besides the CPU: numbers of GPUs, a backend in a separate file, RPC servers.
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
    """Runs a module as a program, and waits for its end. Kills the program after `timeout_s`, or if the current load is
    cancelled.

    The result's stdout contains both stdout and stderr.

    Args:
        without_gpus: hide all devices besides the CPU.
        environment: variables in addition to this process's environment.

    Raises:
        subprocess.TimeoutExpired: the time is over, or the load was cancelled.
        OSError: the program cannot be started.
    """
    hidden = dict.fromkeys(_DEVICE_VARIABLES, "")
    end_s = time.monotonic() + timeout_s
    with subprocess.Popen(
        command(module, *arguments), env={**os.environ, **(hidden if without_gpus else {}), **(environment or {})},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,  # a signal to our process group must not end the child, because its exit is a result
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
