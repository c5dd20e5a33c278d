"""The environment variables that llama.cpp's libraries read once, when they are loaded. Imports no llama.cpp."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llamabatch.utils.system import kernel_lines

logger = logging.getLogger(__name__)

_SMALL_MODEL_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class OnLoad:
    """Measured settings that take effect only when a process loads llama.cpp. None means not measured.

    Attributes:
        spins: value of GOMP_SPINCOUNT.
        amx: "off" turns the AMX kernels off, so that weights are repacked for other kernels (native_patches/0007).
    """

    spins: int | None = None
    amx: str | None = None


NOTHING_MEASURED = OnLoad()


def environment_defaults(model_bytes: int | None, measured: OnLoad = NOTHING_MEASURED) -> dict[str, str]:
    """Returns the best environment variables of llama.cpp for a model file of this size.

    `GOMP_SPINCOUNT` sets how long an OpenMP thread spins at a barrier before it sleeps. libgomp's default is about 3
    ms. Such long spins cost 60 % to 90 % of the speed as soon as another process needs a core. Short spins cost nothing
    if a step takes milliseconds. A model below 64 MB has steps of microseconds and needs the longer spin.

    `GGML_NO_BACKTRACE` keeps an abort inside ggml from starting a debugger. `GGML_CPU_AMX`: see `OnLoad`. The settings
    in `measured`, from measurements on this machine (llamabatch/planning/profile.py), replace these rules.
    """
    small = model_bytes is not None and model_bytes < _SMALL_MODEL_BYTES
    rule = 3000 if small else 1000
    spins = rule if measured.spins is None else measured.spins
    amx = {"GGML_CPU_AMX": "0"} if measured.amx == "off" else {}
    return {"GOMP_SPINCOUNT": str(spins), "GGML_NO_BACKTRACE": "1", **amx}


def undecided(model_bytes: int | None, given: Mapping[str, str], measured: OnLoad = NOTHING_MEASURED) -> dict[str, str]:
    """Returns the variables of `environment_defaults` that the user's environment `given` does not set."""
    defaults = environment_defaults(model_bytes, measured)
    if "OMP_WAIT_POLICY" in given:  # GOMP_SPINCOUNT would override this setting of the user
        del defaults["GOMP_SPINCOUNT"]
    return {name: value for name, value in defaults.items() if name not in given}


@contextlib.contextmanager
def prepared(model_bytes: int | None, measured: OnLoad = NOTHING_MEASURED) -> Iterator[None]:
    """Sets the undecided variables in os.environ. After the block, removes the variables that are read only during a
    load. Otherwise child programs would mistake them for the user's settings."""
    missing = undecided(model_bytes, os.environ, measured)
    if "GOMP_SPINCOUNT" in missing and is_mapped("libgomp.so"):
        logger.debug("libgomp was loaded before llamabatch, so GOMP_SPINCOUNT comes too late; set it yourself")
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing.keys() & {"GOMP_SPINCOUNT", "GGML_CPU_AMX"}:
            os.environ.pop(name, None)


def amx_is_off() -> bool:
    """Returns True if the environment turns the AMX kernels off."""
    return os.environ.get("GGML_CPU_AMX") == "0"


def tiled_is_on() -> bool:
    """Returns True unless GGML_CPU_TILED_MM=0 turns the tiled kernel off. For 8 or more rows, this kernel computes the
    products with K-quants that are not repacked."""
    return os.environ.get("GGML_CPU_TILED_MM", "1").strip() != "0"


def is_mapped(name: str) -> bool:
    """Returns True if this process has mapped a library whose name begins with `name`. Linux only; False elsewhere."""
    return any(f"/{name}" in line for line in kernel_lines("/proc/self/maps"))
