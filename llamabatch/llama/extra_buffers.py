"""The verdict on llama.cpp's extra buffer types. A child process tries them, because they may crash the process.

On a CPU with AMX, a stock build made by GCC 12 crashes in its first quantised matrix product (the reason is in
native_patches/0001-amx-tile-config.patch). On such a machine a child process runs the bundled model once, unless the
marker of the build names the patch. The verdict is kept under the hash of the library.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import ModuleType

from llamabatch.llama import build_info, probe_runs
from llamabatch.planning.cpu import cpu_flags
from llamabatch.utils import disk_cache
from llamabatch.utils.cures import patched_build
from llamabatch.utils.lifetime import in_forks
from llamabatch.utils.system import fatal_signal

logger = logging.getLogger(__name__)

PATCH = "0001-amx-tile-config.patch"
_KIND = "extra-bufts"
_OF_THE_BUFFERS = ("SIGSEGV", "SIGILL", "SIGABRT", "SIGBUS")  # signals that end the probe if the buffers are broken

_lock = threading.Lock()
_verdicts: dict[Path, bool] = {}


@in_forks
def _renew_lock() -> None:
    """Makes a new lock in a fork. A thread that does not exist in the fork may hold the old lock."""
    global _lock
    _lock = threading.Lock()


def safe(module: ModuleType) -> bool:
    """Returns True if `use_extra_bufts` may be true on this machine. The first call may take seconds."""
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
    """Returns the kept verdict on this library; None if the library was not probed. Verdicts are kept under the hash of
    the library."""
    kept = disk_cache.read(_KIND, probe_runs.key(cpu_library))
    verdict = kept.get("safe") if kept is not None else None
    return verdict if isinstance(verdict, bool) else None


def _kept_or_probed(cpu_library: Path) -> bool:
    verdict = kept_verdict(cpu_library)
    reason = "crashes"
    if verdict is None:
        status = probe_runs.status("the extra buffer types", {})
        verdict = status == 0
        if verdict or (status is not None and fatal_signal(status) in _OF_THE_BUFFERS):
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


def _keep(cpu_library: Path, verdict: bool) -> None:
    disk_cache.keep(_KIND, probe_runs.key(cpu_library), {"safe": verdict, "library": cpu_library.name})


def _cpu_has_amx() -> bool:
    return {"amx_tile", "amx_int8"} <= cpu_flags()
