"""EngineOptions: the options of an engine as keywords, for type checkers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypedDict

from llamabatch.config.values import Auto, Fit


class EngineOptions(TypedDict, total=False):
    """The options of EngineConfig as keywords, for type checkers; a test compares the two classes."""

    strategy: str
    n_slots: int | Auto
    start_slots: int | Auto
    n_ctx: int | Auto | Fit
    n_batch: int
    n_ubatch: int | Auto
    prefill_budget: int | Auto
    prefill_share: float
    n_threads: int | Auto
    n_threads_batch: int | Auto
    instances: int | Auto
    instance_strategy: str
    n_gpu_layers: int
    main_gpu: int
    split_mode: str | int
    devices: tuple[str, ...] | list[str] | str | None
    tensor_split: tuple[float, ...] | list[float] | None
    override_tensor: Mapping[str, str] | str
    n_cpu_moe: int
    cpu_moe: bool
    offload_kqv: bool
    op_offload: bool
    device_sampling: str | bool
    row_ladder: str | bool
    flash_attn: str | bool
    kv: str
    swa_full: bool
    kv_cells: int | Auto
    type_k: str
    type_v: str
    batch_invariant: bool
    pooling: str
    cache_prefix: bool
    cache_ram: int | Auto
    cache_disk: str | os.PathLike[str] | None
    cache_disk_mib: int
    max_queue: int | None
    max_wait_ms: int
    preempt: bool
    use_mmap: bool
    use_mlock: bool
    numa: str | bool | None
    rope_scaling: str | None
    rope_freq_base: float | None
    rope_freq_scale: float | None
    yarn_ext_factor: float | None
    yarn_attn_factor: float | None
    yarn_beta_fast: float | None
    yarn_beta_slow: float | None
    yarn_orig_ctx: int | None
    kv_overrides: Mapping[str, bool | int | float | str] | str
    trial: str
    sha256: str | None
    extra_bufts: str
    speculate: str
    draft_model: str | os.PathLike[str] | None
    mmproj: str | os.PathLike[str] | None
    allowed_local_media_path: str | os.PathLike[str] | None
    allowed_media_domains: tuple[str, ...] | list[str] | str
    image_min_tokens: int
    image_max_tokens: int
    n_draft: int
    speculate_always: bool
    isolate: bool
    adapters: Mapping[str, str | os.PathLike[str]]
    reasoning_format: str
    reasoning_tags: tuple[str, str] | list[str] | None
    seed: int | None
    profile: bool
