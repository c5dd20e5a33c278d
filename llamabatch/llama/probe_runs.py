"""Runs the probe (llama/probe.py) in a child process. Makes the key under which the verdict is kept."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from llamabatch.planning.binding_choice import for_children
from llamabatch.utils import paths
from llamabatch.utils.subprogram import run_program

logger = logging.getLogger(__name__)

_VERSION = 1  # version of the probe; verdicts of other versions do not count
_TIMEOUT_S = 60.0


def key(library: Path, cpu: str = "") -> str:
    """Returns the key of a verdict on a library with ggml's kernels. `cpu` names the CPU if the verdict depends on the
    CPU."""
    digest = hashlib.sha256(library.read_bytes() + cpu.encode()).hexdigest()
    return f"{digest[:16]}-{_VERSION}"


def status(subject: str, variables: Mapping[str, str]) -> int | None:
    """Runs the probe in a child process. Returns its exit status, or None if the child cannot run or does not end.

    Args:
        subject: name of the tested kernels or buffers in log messages.
        variables: environment variables for the child. They choose the libraries that it loads.
    """
    if not sys.executable or not paths.bundled_model().is_file():
        logger.debug("%s cannot be probed: no interpreter or no bundled model", subject)
        return None
    try:
        environment = {**for_children(), **variables}
        child = run_program("llamabatch.llama.probe", timeout_s=_TIMEOUT_S, environment=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.debug("%s cannot be probed: %s", subject, error)
        return None
    if child.returncode:
        output = child.stdout.decode("utf-8", "replace")[-2000:]
        logger.debug("the probe of %s ended with %d: %s", subject, child.returncode, output)
    return child.returncode
