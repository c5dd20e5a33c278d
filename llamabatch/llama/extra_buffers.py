"""The verdict on llama.cpp's extra buffer types. A child process tries them, so that a crash harms no other process.

On a CPU with AMX, a stock build that GCC 12 compiled crashes in its first quantised matrix product (the reason is in
native_patches/0001-amx-tile-config.patch). On such a machine a child process runs the bundled model once, unless the
marker of the build names the patch. The verdict is kept under the hash of the library.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

from llamabatch.llama import build_info
from llamabatch.planning.binding_choice import for_children
from llamabatch.planning.cpu import cpu_flags
from llamabatch.utils import disk_cache, paths
from llamabatch.utils.cures import patched_build
from llamabatch.utils.lifetime import in_forks
from llamabatch.utils.subprogram import run_program
from llamabatch.utils.system import fatal_signal

logger = logging.getLogger(__name__)

PATCH = "0001-amx-tile-config.patch"
PROBE_VERSION = 1
_KIND = "extra-bufts"
_TIMEOUT_S = 60.0
_OF_THE_BUFFERS = ("SIGSEGV", "SIGILL", "SIGABRT", "SIGBUS")  # signals that end the probe if the buffers are broken

_lock = threading.Lock()
_verdicts: dict[Path, bool] = {}


@in_forks
def _renew_lock() -> None:
    """Makes a new lock in a fork, where the thread that may hold the old lock does not exist."""
    global _lock
    _lock = threading.Lock()


def safe(module: ModuleType) -> bool:
    """Returns True if `use_extra_bufts` may be true here. The first call on a machine may take seconds."""
    if not at_risk(module):
        return True
    cpu_library = build_info.cpu_library(module)
    with _lock:
        if cpu_library not in _verdicts:
            _verdicts[cpu_library] = _kept_or_probed(cpu_library)
        return _verdicts[cpu_library]


def at_risk(module: ModuleType) -> bool:
    """Returns True if the CPU has AMX, the build uses it, and the marker does not name the patch."""
    if b"AMX_INT8 = 1" not in module.llama_print_system_info() or not _cpu_has_amx():
        return False
    marker = build_info.build_marker(module)
    return marker is None or PATCH not in marker.get("patches", {})


def kept_verdict(cpu_library: Path) -> bool | None:
    """Returns the verdict of an earlier probe of this library, by its hash; None if it was not probed."""
    kept = disk_cache.read(_KIND, _key(cpu_library))
    verdict = kept.get("safe") if kept is not None else None
    return verdict if isinstance(verdict, bool) else None


def _kept_or_probed(cpu_library: Path) -> bool:
    verdict = kept_verdict(cpu_library)
    reason = "crashes"
    if verdict is None:
        verdict, certain = _probe()
        if certain:
            _keep(cpu_library, verdict)
        else:
            reason = "may crash (a test run gave no result)"
    if not verdict:
        logger.warning(
            "this build of llama.cpp %s in its AMX kernels, so they stay off and models run 2 to 3 times slower: "
            "%s to get the patched build",
            reason,
            patched_build(),
        )
    return verdict


def _probe() -> tuple[bool, bool]:
    """Runs the probe in a child process. Returns the verdict, and True if it is certain (else the verdict is False)."""
    if not sys.executable or not paths.bundled_model().is_file():
        logger.debug("the extra buffer types cannot be probed: no interpreter or no bundled model")
        return False, False
    try:
        child = run_program("llamabatch.llama.probe", timeout_s=_TIMEOUT_S, environment=for_children())
    except subprocess.TimeoutExpired:
        logger.debug("the probe of the extra buffer types did not end within %.0f s", _TIMEOUT_S)
        return False, False
    except OSError as error:
        logger.debug("the probe of the extra buffer types did not start: %s", error)
        return False, False
    if child.returncode == 0:
        return True, True
    logger.debug("the probe ended with %d: %s", child.returncode, child.stdout.decode("utf-8", "replace")[-2000:])
    return False, fatal_signal(child.returncode) in _OF_THE_BUFFERS


def _keep(cpu_library: Path, verdict: bool) -> None:
    found = {"safe": verdict, "library": cpu_library.name, "probe": PROBE_VERSION}
    disk_cache.keep(_KIND, _key(cpu_library), found)


def _key(cpu_library: Path) -> str:
    digest = hashlib.sha256(cpu_library.read_bytes()).hexdigest()
    return f"{digest[:16]}-{PROBE_VERSION}"


def _cpu_has_amx() -> bool:
    return {"amx_tile", "amx_int8"} <= cpu_flags()
