"""The values that options of an engine may take."""

from __future__ import annotations

from typing import Literal

from llamabatch.gguf.pooling import POOLINGS
from llamabatch.gguf.validation import MAX_LAYERS
from llamabatch.scheduler.policies import POLICIES, STRATEGIES

Auto = Literal["auto"]
Fit = Literal["fit"]

# KV cache types of llama.cpp (common/arg.cpp, kv_cache_types). CPUs support any pair of types; for CUDA see
# planning/capacity.py.
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
KV_LAYOUTS = ("auto", "split", "unified")
# The smallest n_ubatch that allows draft tokens. A ubatch of a recurrent model needs room for one token per snapshot,
# plus two tokens (llama-batch.cpp, split_equal).
MIN_GUESSING_UBATCH = 3
MIN_CTX = 32  # n_ctx = 1 aborts llama.cpp, and a context below 32 serves no request
MAX_CTX = 2**24
MAX_SLOTS = 256  # LLAMA_MAX_SEQ; seq ids beyond it abort the process
MAX_BATCH = 2**17
MAX_CACHE_RAM = 2**24  # MiB
MAX_CACHE_DISK = 2**30  # MiB
SPLIT_MODES = ("none", "layer", "row")  # enum llama_split_mode
SPECULATION = ("off", "lookup", "draft")
MAX_DRAFT = 64
NUMA = ("off", "distribute", "isolate", "numactl")
# With device_sampling, the device returns only the likeliest tokens of each output row: this is their number. top_k
# must be smaller, because the first dropped token must be known, too: it may be as likely as the last kept token.
DEVICE_TOP = 65
RANGES = (
    ("n_slots", 1, MAX_SLOTS),
    ("start_slots", 1, MAX_SLOTS),
    ("n_ctx", MIN_CTX, MAX_CTX),
    ("kv_cells", MIN_CTX, MAX_CTX),
    ("n_batch", 1, MAX_BATCH),
    ("n_ubatch", 1, MAX_BATCH),
    ("prefill_budget", 1, MAX_BATCH),
    ("n_threads", 1, 512),
    ("n_threads_batch", 1, 512),
    ("instances", 1, 64),
    ("cache_ram", 0, MAX_CACHE_RAM),
    ("cache_disk_mib", 1, MAX_CACHE_DISK),
    ("n_gpu_layers", -1, 10_000),
    ("main_gpu", 0, 15),
    ("n_draft", 1, MAX_DRAFT),
    ("max_wait_ms", 0, 60_000),
    ("n_cpu_moe", 0, MAX_LAYERS),
    ("image_min_tokens", 0, MAX_BATCH),
    ("image_max_tokens", 0, MAX_BATCH),
)
# Ranges of the options of the rotary embedding, named as in llama_context_params. Without an option, the file's value
# counts.
ROPE_NUMBERS = (
    ("rope_freq_base", 1.0, 1e12),
    ("rope_freq_scale", 1e-6, 1e3),
    ("yarn_ext_factor", 0.0, 100.0),
    ("yarn_attn_factor", 1e-3, 1e3),
    ("yarn_beta_fast", 0.0, 1e6),
    ("yarn_beta_slow", 0.0, 1e6),
)
ROPE_OPTIONS = ("rope_scaling", *(name for name, _, _ in ROPE_NUMBERS), "yarn_orig_ctx")
CONTENT_OPTIONS = (*ROPE_OPTIONS, "kv_overrides")  # a value for one of these changes the results of the model
AUTO_NUMBERS = (
    *("n_slots", "start_slots", "n_ctx", "kv_cells", "n_ubatch", "prefill_budget", "n_threads", "n_threads_batch"),
    *("instances", "cache_ram"),
)
BOOLEANS = (
    *("cache_prefix", "preempt", "use_mmap", "use_mlock", "cpu_moe", "isolate", "profile", "speculate_always"),
    *("offload_kqv", "op_offload", "swa_full", "batch_invariant"),
)
CHOICES = (
    ("strategy", STRATEGIES),
    ("instance_strategy", POLICIES),
    ("flash_attn", ("auto", "on", "off")),
    ("split_mode", SPLIT_MODES),
    ("extra_bufts", ("auto", "on", "off")),
    ("device_sampling", ("auto", "on", "off")),
    ("row_ladder", ("auto", "on", "off")),
    ("trial", ("auto", "on", "off")),
    ("kv", KV_LAYOUTS),
    ("type_k", KV_TYPES),
    ("type_v", KV_TYPES),
    ("speculate", SPECULATION),
    ("reasoning_format", ("auto", "none")),
    ("pooling", ("auto", *POOLINGS)),
)
