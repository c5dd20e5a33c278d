"""Checks that the binding and the library have the same C structs, before any struct is passed to the library.

llama.cpp changes its structs without notice. A library that does not match its binding (another libllama in
LLAMA_CPP_LIB_PATH, a hand-copied file) would read our options from the wrong places or write past them.
"""

from __future__ import annotations

import ctypes
import platform
from types import ModuleType
from typing import Any

from llamabatch.errors import SetupError

_FIELDS = {
    "llama_batch": ("n_tokens", "token", "embd", "pos", "n_seq_id", "seq_id", "logits"),
    "llama_model_params": (
        "n_gpu_layers", "split_mode", "main_gpu", "tensor_split", "progress_callback", "vocab_only", "check_tensors",
        "use_extra_bufts", "load_mode", "devices",
    ),
    "llama_context_params": (
        "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_outputs_max", "n_threads", "n_threads_batch",
        "flash_attn_type", "type_k", "type_v", "abort_callback", "embeddings", "offload_kqv", "no_perf", "kv_unified",
        "op_offload", "swa_full",
    ),
}  # fmt: skip
_FUNCTIONS = (
    "llama_model_load_from_file", "llama_init_from_model", "llama_batch_init", "llama_decode", "llama_get_logits_ith",
    "llama_get_memory", "llama_memory_seq_rm", "llama_memory_seq_cp", "llama_memory_seq_pos_max",
    "llama_max_parallel_sequences", "llama_log_set", "llama_log_get",
)  # fmt: skip

# The defaults of any version lie in these ranges. If the fields of a struct are shifted, some value lies outside.
_MODEL_RANGES: dict[str, tuple[int, int]] = {
    "n_gpu_layers": (-1, 100_000),
    "split_mode": (0, 8),
    "main_gpu": (-1, 64),
    "use_extra_bufts": (0, 1),
    "vocab_only": (0, 0),
}
_CONTEXT_RANGES: dict[str, tuple[int, int]] = {
    "n_ctx": (0, 1 << 20),
    "n_batch": (32, 1 << 16),
    "n_ubatch": (32, 1 << 16),
    "n_seq_max": (1, 256),
    "n_threads": (1, 4096),
    "n_threads_batch": (1, 4096),
    "flash_attn_type": (-1, 1),
    "type_k": (0, 1),  # f32 or f16
    "type_v": (0, 1),
    "embeddings": (0, 0),
    "kv_unified": (0, 1),
}


def check_layout(module: ModuleType) -> None:
    """Raises SetupError unless the binding and the library have the same structs, as far as llamabatch uses them. The
    error's text gives the reason without advice, because the advice depends on the other builds on this machine."""
    version = getattr(module, "__version__", "unknown")
    for function in _FUNCTIONS:
        if not hasattr(module, function):
            raise SetupError(f"llama-cpp-python {version} has no {function}")
    for name, fields in _FIELDS.items():
        known = {field[0] for field in getattr(module, name)._fields_}
        missing = [field for field in fields if field not in known]
        if missing:
            raise SetupError(f"llama-cpp-python {version} has a {name} without {', '.join(missing)}")
    _check_defaults(module, "llama_model_params", "llama_model_default_params", _MODEL_RANGES)
    _check_defaults(module, "llama_context_params", "llama_context_default_params", _CONTEXT_RANGES)
    _check_batch(module)


def _check_defaults(module: ModuleType, name: str, function: str, ranges: dict[str, tuple[int, int]]) -> None:
    struct: type[ctypes.Structure] = getattr(module, name)
    if platform.machine() in {"x86_64", "AMD64"} and not _same_size(module, struct, function):
        raise SetupError(f"libllama's {name} is not as large as llama-cpp-python's")
    value = _call_padded(module, struct, function)
    for field, (low, high) in ranges.items():
        got = int(getattr(value, field))
        if not low <= got <= high:
            raise SetupError(f"libllama's default of {name}.{field} is {got}, not in {low}..{high}")


def _same_size(module: ModuleType, struct: type[ctypes.Structure], function: str) -> bool:
    """Returns True if the library and the binding agree on the size of a struct. On x86-64, a function that returns a
    large struct writes the struct to the address in its first argument. So `_same_size` passes a buffer and checks
    which bytes were written."""
    size, untouched = ctypes.sizeof(struct), 0xA5
    buffer = (ctypes.c_ubyte * (size + 1024))(*([untouched] * (size + 1024)))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)((function, module.llama_cpp._lib))(ctypes.addressof(buffer))
    last = getattr(struct, struct._fields_[-1][0])
    end_written = any(byte != untouched for byte in buffer[last.offset : last.offset + last.size])
    return end_written and all(byte == untouched for byte in buffer[size:])


def _call_padded(module: ModuleType, struct: type[ctypes.Structure], function: str) -> Any:
    """Calls a function that returns `struct`, with spare room in case the library's struct is larger."""
    padded = type("Padded", (ctypes.Structure,), {"_fields_": [("value", struct), ("tail", ctypes.c_ubyte * 1024)]})
    return ctypes.CFUNCTYPE(padded)((function, module.llama_cpp._lib))().value


def _check_batch(module: ModuleType) -> None:
    """Checks a llama_batch of 4 tokens: all its arrays except the embeddings exist, and seq_id ends with a null
    pointer."""
    batch = module.llama_batch_init(4, 0, 1)
    try:
        arrays = (batch.token, batch.pos, batch.n_seq_id, batch.seq_id, batch.logits)
        if batch.n_tokens != 0 or batch.embd or not all(arrays) or batch.seq_id[4]:
            raise SetupError("libllama's llama_batch differs from llama-cpp-python's")
    finally:
        module.llama_batch_free(batch)
