"""The circumstances of a figure: machine, instructions of its CPU, versions, revision, command."""

from __future__ import annotations

import dataclasses
import datetime
import shlex
import subprocess
import sys
from typing import Any

import psutil

from benchmarks.places import ROOT
from llamabatch.planning.cpu import cpu_flags
from llamabatch.tools.machine_facts import MachineFacts

_INSTRUCTIONS = ("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512", "amx", "asimd", "sve", "i8mm", "bf16")


def facts(command: str) -> dict[str, Any]:
    """Returns the circumstances of a figure, ready for JSON. `command`: the command line, without folders."""
    machine = MachineFacts.here()
    machine_facts = dataclasses.asdict(machine)
    versions = machine_facts.pop("versions")
    return {
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "revision": revision(),
        "machine": machine_facts,
        "cpu_flags": vector_flags(),
        "load_average": [round(load, 2) for load in psutil.getloadavg()],
        "versions": versions,
    }


def command_line(program: str) -> str:
    return " ".join([program, shlex.join(sys.argv[1:])]).rstrip()


def revision() -> str:
    """Returns the commit, with a note if files of the package were changed since; empty without a repository."""
    found = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "llamabatch")
    return f"{found} with changes" if found and changed else found


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def vector_flags() -> list[str]:
    """Returns the vector and matrix instructions of the CPU; empty if the system does not list them."""
    return sorted(flag for flag in cpu_flags() if flag.startswith(_INSTRUCTIONS))
