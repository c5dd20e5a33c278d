"""Finds out, without risking this process, whether llama.cpp's extra buffer types may be used.

On a CPU with AMX a stock build that GCC 12 compiled dies in its first quantised matrix product (the story is in
native_patches/0001-amx-tile-config.patch). So on such a machine, and only where the build does not say that it has
the patch, a child process runs the bundled model once; the verdict is kept by the hash of the library.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from llamabatch import paths
from llamabatch.cpu import cpu_flags
from llamabatch.lifetime import in_forks
from llamabatch.llama import library

logger = logging.getLogger(__name__)

PATCH = "0001-amx-tile-config.patch"
PROBE_VERSION = 1
_TIMEOUT_S = 60.0

_lock = threading.Lock()
_verdicts: dict[Path, bool] = {}


@in_forks
def _renew_lock() -> None:
    """Whoever held it did not come along."""
    global _lock
    _lock = threading.Lock()


def safe(module: ModuleType) -> bool:
    """Whether `use_extra_bufts` may be true here. The first call of a machine may take seconds, later ones none."""
    if not at_risk(module):
        return True
    cpu_library = _cpu_library(module)
    with _lock:
        if cpu_library not in _verdicts:
            _verdicts[cpu_library] = _kept_or_probed(cpu_library)
        return _verdicts[cpu_library]


def at_risk(module: ModuleType) -> bool:
    """The CPU has AMX, the build uses it, and nothing says that the build has the patch."""
    if b"AMX_INT8 = 1" not in module.llama_print_system_info() or not _cpu_has_amx():
        return False
    marker = library.build_marker(module)
    return marker is None or PATCH not in marker.get("patches", {})


def kept_verdict(cpu_library: Path) -> bool | None:
    """What an earlier probe of this very library found, or None."""
    try:
        kept: Any = json.loads(_verdict_file(cpu_library).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    verdict = kept.get("safe") if isinstance(kept, dict) else None
    return verdict if isinstance(verdict, bool) else None


def _kept_or_probed(cpu_library: Path) -> bool:
    verdict = kept_verdict(cpu_library)
    reason = "crashes"
    if verdict is None:
        verdict, certain = _probe()
        if certain:
            _keep(cpu_library, verdict)
        else:
            reason = "may crash (a trial run gave no answer)"
    if not verdict:
        logger.warning(
            "this build of llama.cpp %s in its AMX kernels, so they stay off and models run 2 to 3 times slower: "
            "run `make setup` in a checkout of llamabatch to get the patched build",
            reason,
        )
    return verdict


def _probe() -> tuple[bool, bool]:
    """Run the probe in a child. Returns the verdict and whether it is certain; where it is not, caution says no."""
    if not sys.executable or not paths.bundled_model().is_file():
        logger.debug("the extra buffer types cannot be probed: no interpreter or no bundled model")
        return False, False
    command = [sys.executable, "-m", "llamabatch.llama.probe"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # the child sees what we see
    package_parent = Path(paths.__file__).parents[1]
    try:
        child = subprocess.run(
            command, env=environment, cwd=package_parent, timeout=_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        logger.debug("the probe of the extra buffer types did not end within %.0f s", _TIMEOUT_S)
        return False, False
    except OSError as error:
        logger.debug("the probe of the extra buffer types did not start: %s", error)
        return False, False
    if child.returncode == 0:
        return True, True
    logger.debug("the probe ended with %d: %s", child.returncode, child.stdout.decode("utf-8", "replace")[-2000:])
    died = child.returncode in {-signal.SIGSEGV, -signal.SIGILL, -signal.SIGABRT, -signal.SIGBUS}
    return False, died


def _keep(cpu_library: Path, verdict: bool) -> None:
    """Write the verdict, whole or not at all; a cache that cannot be written costs a probe a process, no more."""
    target = _verdict_file(cpu_library)
    body = json.dumps({"safe": verdict, "library": cpu_library.name, "probe": PROBE_VERSION})
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False, encoding="utf-8") as file:
            file.write(body)
        os.replace(file.name, target)
    except OSError as error:
        logger.debug("the verdict could not be kept: %s", error)


def _verdict_file(cpu_library: Path) -> Path:
    digest = hashlib.sha256(cpu_library.read_bytes()).hexdigest()
    return paths.cache_dir() / "verdicts" / f"extra-bufts-{digest[:16]}-{PROBE_VERSION}.json"


def _cpu_library(module: ModuleType) -> Path:
    """libggml-cpu, which holds the kernels; libllama where everything is in one file."""
    folder = library.library_dir(module)
    found = sorted(p for p in folder.iterdir() if "ggml-cpu" in p.name)
    return (found[0] if found else Path(module.llama_cpp._lib._name)).resolve()


def _cpu_has_amx() -> bool:
    return {"amx_tile", "amx_int8"} <= cpu_flags()
