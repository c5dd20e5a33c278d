"""Makes the plan of a model on this machine, from the header of its file, the machine and facts of the library."""

from __future__ import annotations

import contextlib
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from llamabatch.chat.conversation import check_template, without_template
from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError, MemoryPlanError, ModelFileError
from llamabatch.gguf.header import read_parts
from llamabatch.gguf.mmproj import resolve_mmproj
from llamabatch.gguf.overrides import KvOverrides, check_place, expert_overrides, overridden, places
from llamabatch.gguf.reader import TensorInfo
from llamabatch.gguf.resolve import file_bytes
from llamabatch.gguf.resolve import resolve as resolve_path
from llamabatch.llama import devices, library
from llamabatch.llama.environment import tiled_is_on
from llamabatch.llama.tuned_load import profile_for
from llamabatch.llama.vetting import FileIdentity, ensure_sound
from llamabatch.planning.capacity import resolve
from llamabatch.planning.context_length import scaled_ctx
from llamabatch.planning.machine import Machine
from llamabatch.planning.memory import MIB
from llamabatch.planning.model_facts import ModelFacts
from llamabatch.planning.placement import Places
from llamabatch.planning.plan import Plan
from llamabatch.planning.projector import projector_bytes
from llamabatch.utils import disk_cache
from llamabatch.utils.checks import counted, show
from llamabatch.utils.paths import one_line

HEADERS = "header"  # name of the headers' facts in the disk cache
_VERSION = 3  # version of the format of the cached facts
_LIBRARY_SPACE = 96 * MIB  # address space of llama.cpp's libraries for CPUs
_UNLIMITED = 2**62


def plan(
    config: EngineConfig, path: Path, *, loaded: bool = False, computes_here: bool = True, share: float = 1.0
) -> Plan:
    """Fills in "auto" for this model, and its draft model, on this machine. Loads llama.cpp's library, but no model.

    Args:
        loaded: another engine of this process has loaded the weights. The plan of that engine includes the memory of
            the engine that is planned here.
        computes_here: False: child processes will compute, and this process makes no context on a GPU.
        share: this engine may use this part of the free memory, on this machine and on each GPU. Other engines use the
            rest.

    Raises:
        ModelFileError: the header of a file is damaged.
        ConfigError, MemoryPlanError: as capacity.resolve.
    """
    facts = read_facts(config, path)
    _check_library_fits(config, facts)
    profile = profile_for(path, config)
    machine = machine_here(config, computes_here=computes_here)
    if share < 1:
        gpus = tuple(replace(gpu, free_bytes=int(gpu.free_bytes * share)) for gpu in machine.gpus)
        machine = replace(machine, available_bytes=int(machine.available_bytes * share), gpus=gpus)
    if loaded:
        # no check here: the first engine has checked the memory for all engines, and a part of it is already in use
        machine = replace(machine, available_bytes=_UNLIMITED, address_space=None, data_bytes=None, gpus=())
    return resolve(config, facts, machine, profile)


def read_facts(config: EngineConfig, path: Path) -> ModelFacts:
    """Reads facts from the headers of the model and its draft model, and the size of the adapters."""
    # the file is checked first, because arithmetic must not use the figures of a damaged header
    known = ensure_sound(path, kv_overrides=config.kv_overrides)
    facts = _with_overrides(path, config.kv_overrides) if config.kv_overrides else facts_of(path, known)
    mmproj = None if config.mmproj is None else resolve_mmproj(config.mmproj, config.model)
    facts = replace(
        facts,
        adapter_bytes=sum(_adapter_bytes(each) for _, each in config.adapters),
        projector_bytes=0 if mmproj is None else projector_bytes(mmproj, config),
        n_ctx_scaled=scaled_ctx(config, facts),
        placed=_placed(config, path, facts),
    )
    if config.draft_model is None:
        return facts
    draft = resolve_path(config.draft_model)
    theirs = facts_of(draft, ensure_sound(draft))
    if draft.samefile(path):  # the same file is loaded only once
        theirs = replace(theirs, file_bytes=0, tensors=())
    return replace(facts, draft=theirs)


def check_chat_template(config: EngineConfig, option: str) -> None:
    """Raises ConfigError if the header of a model has no chat template that can be compiled.

    Args:
        option: as for without_template.
    """
    template = read_facts(config, resolve_path(config.model)).chat_template
    if template is None:
        raise ConfigError(without_template(option))
    try:
        check_template(template)
    except ConfigError as error:
        raise ConfigError(f"{config.model}: {error}; {option}") from error


def _with_overrides(path: Path, kv_overrides: KvOverrides) -> ModelFacts:
    first, *others = read_parts(path)
    return ModelFacts.from_headers(path, (overridden(first, kv_overrides), *others))


def _placed(config: EngineConfig, path: Path, facts: ModelFacts) -> Places:
    """Returns pairs of tensor and GPU (None: main memory), as set by override_tensor, cpu_moe and n_cpu_moe.

    Raises:
        ConfigError: an option names no tensor of this file, or a place that this engine cannot use.
    """
    if not config.tensor_overrides:
        return ()
    names = [tensor.name for tensor in facts.tensors]
    profile_for(path, config)  # called so that the library loads with the profile's environment
    module = library.load()
    known = devices.buffer_types(module)
    chosen = [device.name for device in devices.used(config, module)]
    apart = config.strategy == "multi-instance" and len(chosen) > 1 and config.n_gpu_layers != 0
    for pattern, place in config.override_tensor:
        check_place(place, known)
        device = known[place].device
        if device is not None and (device not in chosen or apart):
            why = "multi-instance gives each engine one GPU of its own" if apart else "the engine does not use it"
            raise ConfigError(
                f"override_tensor puts tensors on {show(place)}, but {why}; give 'CPU'"
                + ("" if apart or not chosen else f", or one of {', '.join(chosen)}")
            )
        if not places(names, ((pattern, place),)):
            what = f"override_tensor has the pattern {show(pattern)}"
            raise ConfigError(f"{what}, which fits none of the {counted(len(names), 'tensor')} of {facts.name}")
    if (config.cpu_moe or config.n_cpu_moe) and not places(names, expert_overrides(None)):
        option = "cpu_moe is True" if config.cpu_moe else f"n_cpu_moe is {config.n_cpu_moe}"
        raise ConfigError(f"{option}, but {facts.name} is no mixture of experts")
    found = places(names, config.tensor_overrides).items()
    numbers = {name: number for number, name in enumerate(chosen)}
    return tuple((name, numbers.get(known[place].device or "")) for name, place in found)


def _adapter_bytes(path: str) -> int:
    try:
        return file_bytes(Path(path))
    except OSError as error:
        raise ModelFileError(f"the adapter {one_line(path)} cannot be read: {error.strerror}") from error


def machine_here(config: EngineConfig, *, computes_here: bool = True) -> Machine:
    """Returns the facts of this machine, with the abilities of llama.cpp here and the GPUs chosen by the config.

    Raises:
        ConfigError: the config chooses GPUs that are not here.
    """
    module = library.load()
    chosen = devices.used(config, module)
    repacks = config.extra_bufts == "on" or (config.extra_bufts == "auto" and library.extra_bufts_safe())
    features = library.repack_features() if repacks else frozenset[str]()
    machine = Machine.here(
        len(chosen),
        library.has_fast_attention(),
        features,
        library.has_lazy_cells(),
        devices.memory(module, chosen, computes_here=computes_here),
        bool(chosen) and all(device.kind == devices.INTEGRATED for device in chosen),
        frozenset(device.backend for device in chosen),
        library.cuda_kv_pairs(),
    )
    return replace(
        machine,
        equal_rows=library.has_equal_rows(),
        tiled=tiled_is_on(),
        drops_copied_pages=library.drops_copied_pages(),
    )


def _check_library_fits(config: EngineConfig, facts: ModelFacts) -> None:
    """Raises MemoryPlanError if RLIMIT_AS or RLIMIT_DATA is too small. Called before the library is loaded.

    The check counts memory of GPUs as main memory, because CUDA does not work under such limits anyway.
    """
    machine = replace(Machine.here(), fast_attention=True, equal_rows=True, tiled=False)
    if machine.address_space is None and machine.data_bytes is None:
        return
    resolve(config, facts, machine)
    if machine.address_space is not None and machine.address_space < _LIBRARY_SPACE:
        raise MemoryPlanError(
            f"RLIMIT_AS leaves {machine.address_space / MIB:,.0f} MiB, too little for llama.cpp's libraries"
        )


def facts_of(path: Path, known: FileIdentity) -> ModelFacts:
    """Returns the facts of the headers. For unchanged files the facts come from the cache, so that a start need not
    read the vocabulary.

    Raises ModelFileError and OSError, as ModelFacts.read.

    Args:
        known: the identity of the files at the time of their check.
    """
    kept = disk_cache.read(HEADERS, known.key)
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):  # not cached, or outdated
        return _from_cache(path, known, kept)
    parts = read_parts(path)
    found = ModelFacts.from_headers(path, parts)
    arch = parts[0].architecture
    starts = (f"{arch}.", "general.name", "general.architecture", "tokenizer.chat_template")
    kept = {
        "version": _VERSION,
        "identity": known.identity,
        "texts": {key: text for key, text in parts[0].texts().items() if key.startswith(starts)},
        "n_tokens": parts[0].n_tokens,
        "tensors": [astuple(tensor) for tensor in found.tensors],
        "parts": found.parts,
    }
    disk_cache.keep(HEADERS, known.key, kept)
    return found


def _from_cache(path: Path, known: FileIdentity, kept: Any) -> ModelFacts:
    if kept["version"] != _VERSION or kept["identity"] != [list(each) for each in known.identity]:
        raise ValueError("the files have changed")
    tensors = tuple(
        TensorInfo(name, tuple(dims), kind, offset, n_bytes) for name, dims, kind, offset, n_bytes in kept["tensors"]
    )
    facts = ModelFacts.from_header(path, kept["texts"], tensors, kept["n_tokens"], known.n_bytes)
    return replace(facts, parts=tuple(kept["parts"]))
