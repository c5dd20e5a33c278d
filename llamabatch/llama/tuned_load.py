"""Finds the tuned profile of a load before the library is loaded. A profile is used only for its own devices."""

from __future__ import annotations

from pathlib import Path

from llamabatch.config import EngineConfig
from llamabatch.gguf.resolve import file_bytes
from llamabatch.llama import devices, library
from llamabatch.llama.environment import NOTHING_MEASURED, OnLoad
from llamabatch.planning import profile_store
from llamabatch.planning.profile import Profile


def profile_for(path: Path, config: EngineConfig) -> Profile | None:
    """Returns the profile that `llamabatch tune` wrote for this file, these cache types and these devices, or None.
    Loads the library if necessary, with the profile's environment, because only the loaded library knows the
    devices."""
    found = profile_store.find(path, config) if config.profile else None
    measured = OnLoad(found.spins, found.amx) if found is not None else NOTHING_MEASURED
    library.load(file_bytes(path), measured)
    if found is None or found.gpus != used_gpus(config):
        return None
    return found


def used_gpus(config: EngineConfig) -> tuple[str, ...]:
    """Returns the names of the devices that would get layers."""
    if config.n_gpu_layers == 0:
        return ()
    return tuple(device.shown for device in devices.used(config, library.load()))
