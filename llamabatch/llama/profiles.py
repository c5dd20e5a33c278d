"""The profile that holds for a load: looked for before the library is there, believed when its devices are."""

from __future__ import annotations

from pathlib import Path

from llamabatch import profile_store
from llamabatch.config import EngineConfig
from llamabatch.llama import library
from llamabatch.model_file import file_bytes
from llamabatch.profile import Profile


def profile_for(path: Path, config: EngineConfig) -> Profile | None:
    """What `llamabatch tune` found for this file, these cache types and the devices in use; None if there is nothing.

    Loads the library, with the spin count of the profile if it was not loaded before.
    """
    found = profile_store.find(path, config.type_k, config.type_v) if config.profile else None
    library.load(file_bytes(path), found.spins if found is not None else None)
    if found is None or found.gpus != used_gpus(config):
        return None
    return found


def used_gpus(config: EngineConfig) -> tuple[str, ...]:
    """Names of the devices that would hold layers."""
    return library.gpu_names() if config.n_gpu_layers != 0 else ()
