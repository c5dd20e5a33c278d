"""The mark of a prompt's tokens in llama_batch.logits, as an engine gives it, for the programs beside this file."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any


def of_prompt(llama: ModuleType, context: Any) -> int:
    """What is added to the mark of an output: LLAMA_ROW_PROMPT of llama.h, or 0 where no such kernels are."""
    try:
        takes = llama.llama_cpp._lib.llama_takes_prompts
    except AttributeError:  # stock
        return 0
    takes.restype, takes.argtypes = ctypes.c_bool, [ctypes.c_void_p]
    return 2 if takes(context) else 0
