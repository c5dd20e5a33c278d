"""The value in llama_batch.logits that marks a prompt's tokens, as an engine sets it; for programs in this folder."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any


def of_prompt(llama: ModuleType, context: Any) -> int:
    """Returns what to add to the mark of a prompt's token: LLAMA_ROW_PROMPT of llama.h, or 0 if there is none."""
    try:
        takes = llama.llama_cpp._lib.llama_takes_prompts
    except AttributeError:  # the stock library
        return 0
    takes.restype, takes.argtypes = ctypes.c_bool, [ctypes.c_void_p]
    return 2 if takes(context) else 0
